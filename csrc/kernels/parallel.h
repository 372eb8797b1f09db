// The framework's threads, injected: the kernels start none of their own.
#pragma once

#include <cstdint>
#include <functional>

#include "simd.h"

namespace hvd_quant {

using Range = std::function<void(int64_t begin, int64_t end)>;

struct Parallel {
  int threads = 1;  // the most that run() uses
  std::function<void(int64_t n, int64_t grain, const Range&)> run = [](int64_t n, int64_t, const Range& body) { body(0, n); };

  // Calls body on ranges that make up [0, n), each of at least `grain` but the last, with denormals honoured: TensorFlow's
  // threads flush them and PyTorch's don't, and workers must not differ.
  void operator()(int64_t n, int64_t grain, const Range& body) const {
    if (n <= 0) return;
    run(n, grain, [&](int64_t begin, int64_t end) {
      DenormalGuard guard;
      body(begin, end);
    });
  }
};

}  // namespace hvd_quant
