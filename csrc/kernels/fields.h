// qsgd, terngrad, natural and blockwise8: a few bits an entry, most with a scale a block or a tensor.
// hvd_quant/ops/generic.py says the same in array operations.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "decode.h"

namespace hvd_quant {

// -------------------------------------------------------------------------------------------------------------- codes

inline const DynamicCode& dynamic_code() {
  static const DynamicCode code = [] {
    DynamicCode c = {};
    const double decades[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
    for (int i = 0; i < 7; ++i)
      for (int j = 0; j < 1 << i; ++j) {
        const int k = (1 << i) + j;
        c.values[k] = float(decades[i] * (0.1 + 0.9 * (2 * j + 1) / (2 << i)));
        c.values[256 - k] = -c.values[k];
      }
    c.values[128] = 1;
    for (int k = 0; k < 128; ++k) c.marks[k] = (c.values[k] + c.values[k + 1]) * 0.5f;
    c.marks[128] = 2;  // above all that is looked up
    for (int i = 0; i < DynamicCode::kCells; ++i) {
      const uint32_t first_bits = (DynamicCode::kFirst + uint32_t(i)) << DynamicCode::kCellBits;
      const float start = load_as<float>(reinterpret_cast<const uint8_t*>(&first_bits));
      c.below[i] = uint32_t(std::lower_bound(c.marks, c.marks + 128, start) - c.marks);
    }
    return c;
  }();
  return code;
}

constexpr int64_t kRun = 1024;  // entries that are worked on at a time where no scale tells how many

inline Fields qsgd_fields(int bits, int64_t block_size) {
  return {"qsgd", Grid::linear, bits, block_size, Fields::Scales::blocks, nullptr};
}
inline Fields terngrad_fields() { return {"terngrad", Grid::linear, 2, kRun, Fields::Scales::one, nullptr}; }
inline Fields natural_fields() { return {"natural", Grid::natural, 8, kRun, Fields::Scales::none, nullptr}; }
inline Fields blockwise8_fields(bool dynamic, int64_t block_size) {
  return {"blockwise8",           dynamic ? Grid::dynamic : Grid::linear, 8, block_size,
          Fields::Scales::blocks, dynamic ? &dynamic_code() : nullptr};
}

inline int64_t fields_scales(const Fields& code, int64_t numel) {
  return code.scales == Fields::Scales::blocks ? ceil_div(numel, code.block) : code.scales == Fields::Scales::one ? 1 : 0;
}

inline int64_t fields_body_bytes(const Fields& code, int64_t numel) {
  return 4 * fields_scales(code, numel) + ceil_div(numel, 64) * 8 * code.bits;
}

inline int64_t fields_payload_bytes(const Fields& code, int64_t numel) {
  return kHeaderBytes + padded(fields_body_bytes(code, numel));
}

// ------------------------------------------------------------------------------------------------------ random numbers

// What the random numbers of a range are keyed with: a constant of the seed and the tensor's name, the place of the range's
// first entry in the tensor, which is a multiple of 64, the step, the worker, and 1 where an owner encodes a mean again.
struct Draw {
  int64_t stream, first, step, rank, phase;
};

// splitmix64.
constexpr uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

inline Rounding at_random(const Draw& draw, bool l2 = false, float scale = 0) {
  uint64_t key = uint64_t(draw.stream);
  for (const int64_t word : {draw.step, draw.rank, draw.phase}) key = mix(key ^ uint64_t(word));
  return {true, uint32_t(key), uint32_t(key >> 32), draw.first, l2, scale};
}

inline Rounding to_nearest() { return {false, 0, 0, 0, false, 0}; }

// ------------------------------------------------------------------------------------------------------------- measure

// The scale of terngrad, for a whole tensor: the largest magnitude, at most `clip` standard deviations about the mean unless
// that is 0, but no less than the mean's.
inline float terngrad_measure(const float* g, const float* e, int64_t numel, double clip, const Parallel& parallel) {
  const DenormalGuard guard;
  constexpr int64_t kChunk = int64_t{1} << 15;  // sums don't depend on how many threads there are
  struct Moments {
    double sum, square;
    float most;
  };
  std::vector<Moments> each(size_t(ceil_div(numel, kChunk)));
  parallel(int64_t(each.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i * kChunk;
      Moments& m = each[size_t(i)];
      loops().moments(g + at, e ? e + at : nullptr, std::min(kChunk, numel - at), &m.sum, &m.square, &m.most);
    }
  });
  Moments all = {0, 0, 0};
  for (const Moments& m : each) all = {all.sum + m.sum, all.square + m.square, std::max(all.most, m.most)};
  if (clip == 0 || numel == 0) return all.most;
  const double mean = all.sum / double(numel), variance = all.square / double(numel) - mean * mean;
  const double bound = std::max(clip * std::sqrt(std::max(variance, 0.0)), std::fabs(mean));
  return float(std::min(double(all.most), bound));
}

// ---------------------------------------------------------------------------------------------------- encode and decode

// Writes a whole payload of fields_payload_bytes(). `e`, the residual, is updated in place; it may be null.
inline void fields_encode(const Fields& code, Rounding rounding, const float* g, float* e, int64_t numel, uint8_t* payload,
                          const Parallel& parallel) {
  const DenormalGuard guard;
  const int64_t blocks = ceil_div(numel, code.block), body = fields_body_bytes(code, numel);
  uint8_t* scales = payload + kHeaderBytes;
  uint8_t* fields = scales + 4 * fields_scales(code, numel);
  write_header(payload, code.codec, numel, padded(body));
  std::memset(scales + body, 0, padded(body) - body);
  if (code.scales == Fields::Scales::one) {
    if (!std::isfinite(1 / rounding.scale)) rounding.scale = 0;
    store_as(scales, rounding.scale);
  }
  std::atomic<bool> finite{true};
  parallel(blocks, std::max<int64_t>(1, (1 << 15) / code.block), [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(e ? 0 : std::min(numel, code.block));
    if (!loops().fields_encode_blocks(code, rounding, g, e, scratch.data(), numel, begin, end, scales, fields)) finite = false;
  });
  seal(payload, kHeaderBytes + padded(body), finite);
}

// out = scale times the sum of the payloads.
inline void fields_decode_sum(const Fields& code, const std::vector<Bytes>& payloads, int64_t numel, float scale, float* out,
                              const Parallel& parallel) {
  const int64_t groups = ceil_div(numel, 64), scales = fields_scales(code, numel);
  std::vector<FieldsView> views(payloads.size());
  const bool finite = check_all(payloads.size(), parallel, numel, out, [&](int64_t i) {
    const uint8_t flags = check(payloads[i], code.codec, numel, fields_body_bytes(code, numel));
    FieldsView& view = views[i];
    view.scales = payloads[i].data + kHeaderBytes;
    view.fields = view.scales + 4 * scales;
    bool good = true;
    for (int64_t s = 0; s < scales; ++s) good &= load_as<uint32_t>(view.scales + 4 * s) < 0x7f800000;
    require(good, "a scale is negative or not finite");
    require(code.grid == Grid::dynamic || loops().fields_valid(view.fields, groups * code.bits, code.bits),
            "a field stands for nothing");
    bool unused = true;
    const int64_t stride = 8 * code.bits;
    for (int64_t i = (numel + 63) % 64 + 1; numel && i < 64; ++i) {
      const uint8_t byte = view.fields[(groups - 1) * stride + i % stride];
      unused &= !(byte >> (i / stride * code.bits) & ((1 << code.bits) - 1));
    }
    require(unused, "an unused field is not zero");
    return !(flags & kNonfinite);
  });
  if (!finite) return;
  // Blocks are multiples of 64 entries, so all are aligned if the first is.
  const bool streamed = numel >= kStreamedEntries && reinterpret_cast<uintptr_t>(out) % 64 == 0;
  parallel(ceil_div(numel, code.block), std::max<int64_t>(1, (1 << 15) / code.block), [&](int64_t begin, int64_t end) {
    loops().fields_decode_blocks(code, views.data(), int(views.size()), numel, begin, end, scale, out, streamed);
  });
}

}  // namespace hvd_quant
