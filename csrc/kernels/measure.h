// The thresholds of topk and adaptive, from a sample of v.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "sparse.h"

namespace hvd_quant {

inline int64_t sample_size(int64_t numel) { return std::min<int64_t>(numel, std::max<int64_t>(4096, numel / 512)); }

// One entry of v out of each stretch of N/S, at a place that changes with the step.
inline std::vector<float> sample(const float* g, const float* e, int64_t numel, int64_t step) {
  const int64_t count = sample_size(numel);
  const uint64_t stretch = count ? uint64_t(numel / count) : 0;
  const uint32_t hash = step_hash(step);
  std::vector<float> v(count);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t m = (uint32_t(i) ^ hash) * 0x9E3779B1u;
    m ^= m >> 15;
    m *= 0x85EBCA77u;
    m ^= m >> 13;
    const int64_t at = i * numel / count + int64_t(m * stretch >> 32);
    const float kept = e ? e[at] : 0.0f, sum = g[at] + kept;
    v[i] = std::isfinite(sum) ? sum : kept;
  }
  return v;
}

inline float kth_largest(std::vector<float>& v, int64_t k) {
  std::nth_element(v.begin(), v.begin() + (k - 1), v.end(), std::greater<float>());
  return v[k - 1];
}

// tau+ and tau-: `shared`, where it is not 0; else |v| must exceed the (ceil(ratio S) + 1)-th largest of the sample, which goes
// to `magnitudes` too, unless that is null.
inline void model_measure(const float* g, const float* e, int64_t numel, double ratio, int64_t step, float shared,
                          float* magnitudes, float* thresholds) {
  DenormalGuard guard;
  std::vector<float> v = sample(g, e, numel, step);
  for (float& x : v) x = std::fabs(x);
  if (magnitudes) std::copy(v.begin(), v.end(), magnitudes);
  thresholds[0] = shared;
  if (shared == 0) {
    const int64_t k = int64_t(std::ceil(ratio * double(v.size())));
    const float t = k < int64_t(v.size()) ? kth_largest(v, k + 1) : 0.0f;
    thresholds[0] = std::nextafter(t, std::numeric_limits<float>::infinity());
  }
  thresholds[1] = -thresholds[0];
}

inline void topk_measure(const float* g, const float* e, int64_t numel, double ratio, int64_t step, float* thresholds) {
  model_measure(g, e, numel, ratio, step, 0, nullptr, thresholds);
}

// tau+ and tau-: `ratio` of the sampled positive and of the sampled negative entries lie beyond them.
inline void adaptive_measure(const float* g, const float* e, int64_t numel, double ratio, int64_t step, float* thresholds) {
  DenormalGuard guard;
  std::vector<float> sides[2];
  for (float x : sample(g, e, numel, step)) {
    if (x > 0) sides[0].push_back(x);
    if (x < 0) sides[1].push_back(-x);
  }
  float tau[2] = {0, 0};
  for (int i = 0; i < 2; ++i) {
    const int64_t n = int64_t(sides[i].size());
    const int64_t k = std::max<int64_t>(1, int64_t(std::ceil(double(n) * ratio)));
    if (n) tau[i] = kth_largest(sides[i], std::min(k, n));
  }
  // A sign without a sample mirrors the other; without any, whatever is not zero is kept.
  if (tau[0] == 0) tau[0] = tau[1];
  if (tau[0] == 0) tau[0] = std::numeric_limits<float>::denorm_min();
  thresholds[0] = tau[0];
  thresholds[1] = tau[1] == 0 ? -tau[0] : -tau[1];
}

}  // namespace hvd_quant
