// onebit and signsgd: one bit an entry and two levels a block, or one and its negative ("mirrored").
// hvd_quant/ops/generic.py says the same in array operations.
#pragma once

#include <algorithm>
#include <vector>

#include "decode.h"

namespace hvd_quant {

// What a payload of signs is like. `block_size` must be a multiple of 64, so that no two blocks share a byte.
struct Signs {
  const char* codec;
  int64_t block_size;
  bool zeros, mirrored;
};

inline Signs onebit_signs(int64_t block_size, bool zeros) { return {"onebit", block_size, zeros, false}; }
inline Signs signsgd_signs(int64_t block_size, bool zeros) { return {"signsgd", block_size, zeros, true}; }

inline int64_t signs_body_bytes(const Signs& code, int64_t numel) {
  return ceil_div(numel, code.block_size) * (code.mirrored ? 4 : 8) + ceil_div(numel, 8) * (code.zeros ? 2 : 1);
}

inline int64_t signs_payload_bytes(const Signs& code, int64_t numel) {
  return kHeaderBytes + padded(signs_body_bytes(code, numel));
}

// Writes a whole payload of signs_payload_bytes(). `e`, the residual, is updated in place; it may be null.
inline void signs_encode(const Signs& code, const float* g, float* e, int64_t numel, uint8_t* payload,
                         const Parallel& parallel) {
  const int64_t blocks = ceil_div(numel, code.block_size), body = signs_body_bytes(code, numel);
  uint8_t* levels = payload + kHeaderBytes;
  uint8_t* signs = levels + (code.mirrored ? 4 : 8) * blocks;
  uint8_t* nonzeros = signs + ceil_div(numel, 8);
  write_header(payload, code.codec, numel, padded(body));
  std::memset(levels + body, 0, padded(body) - body);
  std::atomic<bool> finite{true};
  parallel(blocks, std::max<int64_t>(1, (1 << 15) / code.block_size), [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(e ? 0 : std::min(numel, code.block_size));
    if (!loops().onebit_encode_blocks(g, e, scratch.data(), numel, code.block_size, code.zeros, code.mirrored, begin, end,
                                      levels, signs, nonzeros))
      finite = false;
  });
  seal(payload, kHeaderBytes + padded(body), finite);
}

// out = scale times the sum of the payloads.
inline void signs_decode_sum(const Signs& code, const std::vector<Bytes>& payloads, int64_t numel, float scale, float* out,
                             const Parallel& parallel) {
  const int64_t blocks = ceil_div(numel, code.block_size), plane = ceil_div(numel, 8), levels = code.mirrored ? 1 : 2;
  std::vector<OnebitView> views(payloads.size());
  const auto unused = [&](const uint8_t* bits) { return numel % 8 ? bits[plane - 1] >> numel % 8 : 0; };
  const bool finite = check_all(payloads.size(), parallel, numel, out, [&](int64_t i) {
    const uint8_t flags = check(payloads[i], code.codec, numel, signs_body_bytes(code, numel));
    OnebitView& view = views[i];
    view.levels = payloads[i].data + kHeaderBytes;
    view.signs = view.levels + 4 * levels * blocks;
    view.nonzeros = view.signs + plane;
    require(all_finite<uint32_t>(view.levels, levels * blocks), "a level is not finite");
    require(!unused(view.signs), "unused bits are not zero");
    if (code.zeros) {
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
  parallel(blocks, std::max<int64_t>(1, (1 << 15) / code.block_size), [&](int64_t begin, int64_t end) {
    loops().onebit_decode_blocks(views.data(), int(views.size()), numel, code.block_size, code.zeros, code.mirrored, begin, end,
                                 scale, out, streamed);
  });
}

}  // namespace hvd_quant
