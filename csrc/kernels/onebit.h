// onebit: one bit an entry and two levels a block. hvd_quant/ops/generic.py says the same in array operations.
#pragma once

#include <algorithm>
#include <vector>

#include "decode.h"

namespace hvd_quant {

inline int64_t onebit_body_bytes(int64_t numel, int64_t block_size, bool zeros) {
  return ceil_div(numel, block_size) * 8 + ceil_div(numel, 8) * (zeros ? 2 : 1);
}

inline int64_t onebit_payload_bytes(int64_t numel, int64_t block_size, bool zeros) {
  return kHeaderBytes + padded(onebit_body_bytes(numel, block_size, zeros));
}

// Writes a whole payload of onebit_payload_bytes(). `e`, the residual, is updated in place; it may be null. `block_size`
// must be a multiple of 64, so that no two blocks share a byte.
inline void onebit_encode(const float* g, float* e, int64_t numel, int64_t block_size, bool zeros, uint8_t* payload,
                          const Parallel& parallel) {
  const int64_t blocks = ceil_div(numel, block_size), body = onebit_body_bytes(numel, block_size, zeros);
  uint8_t* levels = payload + kHeaderBytes;
  uint8_t* signs = levels + 8 * blocks;
  uint8_t* nonzeros = signs + ceil_div(numel, 8);
  write_header(payload, "onebit", numel, padded(body));
  std::memset(levels + body, 0, padded(body) - body);
  std::atomic<bool> finite{true};
  parallel(blocks, std::max<int64_t>(1, (1 << 15) / block_size), [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(e ? 0 : std::min(numel, block_size));
    if (!loops().onebit_encode_blocks(g, e, scratch.data(), numel, block_size, zeros, begin, end, levels, signs, nonzeros))
      finite = false;
  });
  seal(payload, kHeaderBytes + padded(body), finite);
}

// out = scale times the sum of the payloads.
inline void onebit_decode_sum(const std::vector<Bytes>& payloads, int64_t numel, int64_t block_size, bool zeros, float scale,
                              float* out, const Parallel& parallel) {
  const int64_t blocks = ceil_div(numel, block_size), plane = ceil_div(numel, 8);
  std::vector<OnebitView> views(payloads.size());
  const auto unused = [&](const uint8_t* bits) { return numel % 8 ? bits[plane - 1] >> numel % 8 : 0; };
  const bool finite = check_all(payloads.size(), parallel, numel, out, [&](int64_t i) {
    const uint8_t flags = check(payloads[i], "onebit", numel, onebit_body_bytes(numel, block_size, zeros));
    OnebitView& view = views[i];
    view.levels = payloads[i].data + kHeaderBytes;
    view.signs = view.levels + 8 * blocks;
    view.nonzeros = view.signs + plane;
    require(all_finite<uint32_t>(view.levels, 2 * blocks), "a level is not finite");
    require(!unused(view.signs), "unused bits are not zero");
    if (zeros) {
      require(!unused(view.nonzeros), "unused bits are not zero");
      uint8_t wrong = 0;
      for (int64_t b = 0; b < plane; ++b) wrong |= view.signs[b] & ~view.nonzeros[b];
      require(!wrong, "a zero has a sign");
    }
    return !(flags & kNonfinite);
  });
  if (!finite) return;
  // block_size is a multiple of 64 entries, so all blocks are aligned if the first is.
  const bool streamed = numel >= kStreamedEntries && reinterpret_cast<uintptr_t>(out) % 64 == 0;
  parallel(blocks, std::max<int64_t>(1, (1 << 15) / block_size), [&](int64_t begin, int64_t end) {
    loops().onebit_decode_blocks(views.data(), int(views.size()), numel, block_size, zeros, begin, end, scale, out,
                                 streamed);
  });
}

}  // namespace hvd_quant
