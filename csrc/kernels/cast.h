// none, fp16 and bf16: the values themselves. hvd_quant/ops/generic.py says the same in array operations.
#pragma once

#include <algorithm>
#include <vector>

#include "decode.h"

namespace hvd_quant {

inline int64_t cast_body_bytes(Cast type, int64_t numel) { return numel * (type == Cast::float32 ? 4 : 2); }

inline int64_t cast_payload_bytes(Cast type, int64_t numel) { return kHeaderBytes + padded(cast_body_bytes(type, numel)); }

// Writes a whole payload of cast_payload_bytes().
inline void cast_encode(Cast type, const std::string& codec, const float* g, int64_t numel, uint8_t* payload,
                        const Parallel& parallel) {
  const int64_t body = cast_body_bytes(type, numel);
  uint8_t* values = payload + kHeaderBytes;
  write_header(payload, codec, numel, padded(body));
  std::memset(values + body, 0, padded(body) - body);
  std::atomic<bool> finite{true};
  parallel(numel, int64_t{1} << 15, [&](int64_t begin, int64_t end) {
    if (!loops().cast(type, g + begin, end - begin, values + cast_body_bytes(type, begin))) finite = false;
  });
  seal(payload, kHeaderBytes + padded(body), finite);
}

// out = scale times the sum of the payloads.
inline void cast_decode_sum(Cast type, const std::string& codec, const std::vector<Bytes>& payloads, int64_t numel, float scale,
                            float* out, const Parallel& parallel) {
  std::vector<const uint8_t*> bodies(payloads.size());
  const bool finite = check_all(payloads.size(), parallel, numel, out, [&](int64_t i) {
    const uint8_t flags = check(payloads[i], codec, numel, cast_body_bytes(type, numel));
    bodies[i] = payloads[i].data + kHeaderBytes;
    require(type == Cast::float32   ? all_finite<uint32_t>(bodies[i], numel)
            : type == Cast::float16 ? all_finite<uint16_t>(bodies[i], numel)
                                    : all_finite<uint16_t>(bodies[i], numel, 0x7f80),
            "a value is not finite");
    return !(flags & kNonfinite);
  });
  if (!finite) return;
  constexpr int64_t kRun = 1024;  // entries: a multiple of 16, so that all runs are aligned if the first is
  const bool streamed = numel >= kStreamedEntries && reinterpret_cast<uintptr_t>(out) % 64 == 0;
  parallel(ceil_div(numel, kRun), 32, [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(numel, end * kRun);
    loops().cast_sum(type, bodies.data(), int(bodies.size()), begin * kRun, last, scale, out, streamed);
  });
}

}  // namespace hvd_quant
