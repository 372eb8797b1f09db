// The codes with their settings, behind one interface, for programs that need no framework.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "../../csrc/kernels/cast.h"
#include "../../csrc/kernels/fields.h"
#include "../../csrc/kernels/measure.h"
#include "../../csrc/kernels/onebit.h"
#include "../../csrc/kernels/sparse.h"

namespace hvd_quant {

struct Coder {
  std::string name;  // of the compressor
  // The payload of a vector; the residual is updated, and may be null.
  std::function<std::vector<uint8_t>(const float* g, float* e, int64_t numel, const Parallel&)> encode;
  // out = scale times the sum of the payloads.
  std::function<void(const std::vector<Bytes>&, int64_t numel, float scale, float* out, const Parallel&)> decode_sum;
};

inline Coder signs(Signs code) {
  return {code.codec,
          [=](const float* g, float* e, int64_t numel, const Parallel& parallel) {
            std::vector<uint8_t> payload(signs_payload_bytes(code, numel));
            signs_encode(code, g, e, numel, payload.data(), parallel);
            return payload;
          },
          [=](const std::vector<Bytes>& payloads, int64_t numel, float scale, float* out, const Parallel& parallel) {
            signs_decode_sum(code, payloads, numel, scale, out, parallel);
          }};
}

inline Coder fields(Fields code, bool random, bool l2 = false) {
  return {code.codec,
          [=](const float* g, float* e, int64_t numel, const Parallel& parallel) {
            std::vector<uint8_t> payload(fields_payload_bytes(code, numel));
            const float scale = code.scales == Fields::Scales::one ? terngrad_measure(g, e, numel, 2.5, parallel) : 0;
            const Rounding rounding = random ? at_random({-77, 0, 3, 1, 0}, l2, scale) : to_nearest();
            fields_encode(code, rounding, g, e, numel, payload.data(), parallel);
            return payload;
          },
          [=](const std::vector<Bytes>& payloads, int64_t numel, float scale, float* out, const Parallel& parallel) {
            fields_decode_sum(code, payloads, numel, scale, out, parallel);
          }};
}

inline Coder sparse(Code code) {
  const auto slots_for = [](int64_t numel) { return padded(std::max<int64_t>(1, ceil_div(numel, 20))); };
  return {SparseLayout(code, 0, 8).codec,
          [=](const float* g, float* e, int64_t numel, const Parallel& parallel) {
            const int64_t slots = slots_for(numel);
            std::vector<uint8_t> payload(SparseLayout(code, numel, slots).payload_bytes);
            float tau[2] = {2.0f, -2.0f};
            if (code == Code::adaptive) adaptive_measure(g, e, numel, 0.05, 3, tau);
            if (code >= Code::topk) topk_measure(g, e, numel, 0.05, 3, tau);
            sparse_encode(code, g, e, numel, tau[0], tau[1], slots, 3, payload.data(), parallel);
            return payload;
          },
          [=](const std::vector<Bytes>& payloads, int64_t numel, float scale, float* out, const Parallel& parallel) {
            sparse_decode_sum(code, payloads, numel, slots_for(numel), scale, out, parallel);
          }};
}

inline Coder cast(Cast type, const char* name) {
  return {name,
          [=](const float* g, float*, int64_t numel, const Parallel& parallel) {
            std::vector<uint8_t> payload(cast_payload_bytes(type, numel));
            cast_encode(type, name, g, numel, payload.data(), parallel);
            return payload;
          },
          [=](const std::vector<Bytes>& payloads, int64_t numel, float scale, float* out, const Parallel& parallel) {
            cast_decode_sum(type, name, payloads, numel, scale, out, parallel);
          }};
}

// All codes, each with the settings that change its payload's layout.
inline std::vector<Coder> coders() {
  return {signs(onebit_signs(128, false)),
          signs(onebit_signs(2048, true)),
          signs(signsgd_signs(128, true)),
          signs(signsgd_signs(2048, false)),
          fields(qsgd_fields(2, 128), true),
          fields(qsgd_fields(4, 512), true),
          fields(qsgd_fields(8, 512), true, true),
          fields(terngrad_fields(), true),
          fields(natural_fields(), true),
          fields(blockwise8_fields(true, 256), false),
          fields(blockwise8_fields(false, 2048), false),
          sparse(Code::threshold),
          sparse(Code::adaptive),
          sparse(Code::topk),
          sparse(Code::topk_half),
          sparse(Code::topk_sign),
          sparse(Code::topk_tensor_sign),
          sparse(Code::topk_2bit),
          cast(Cast::float32, "none"),
          cast(Cast::float16, "fp16"),
          cast(Cast::bfloat16, "bf16")};
}

inline std::vector<Coder> settings_of(const std::string& name) {
  std::vector<Coder> found;
  for (const Coder& coder : coders())
    if (coder.name == name) found.push_back(coder);
  return found;
}

// A vector of standard normal numbers, about: sums of four uniform ones.
inline std::vector<float> normal(int64_t numel, uint64_t seed) {
  std::vector<float> v(numel);
  for (float& x : v) {
    const uint64_t bits = seed = mix(seed);
    x = 0;
    for (int i = 0; i < 64; i += 16) x += float(bits >> i & 0xffff) / 65536 - 0.5f;
    x *= 1.7320508f;
  }
  return v;
}

}  // namespace hvd_quant
