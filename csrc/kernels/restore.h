// Takes an encode back. hvd_quant/ops/generic.py says the same in array operations.
#pragma once

#include <algorithm>
#include <cmath>

#include "parallel.h"

namespace hvd_quant {

// e + decoded - g in `e`, with g left out where it was not finite, and 0 where that is but the rounding of what was
// added.
inline void restore(float* e, const float* decoded, const float* g, int64_t numel, const Parallel& parallel) {
  parallel(numel, int64_t{1} << 15, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float given = std::isfinite(g[i]) ? g[i] : 0.0f, v = e[i] + decoded[i], before = v - given;
      const float noise = 0x1p-22f * std::max({std::fabs(v), std::fabs(decoded[i]), std::fabs(given)});
      e[i] = std::fabs(before) > noise ? before : 0.0f;
    }
  });
}

}  // namespace hvd_quant
