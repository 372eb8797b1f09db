// What the decoders share: all payloads are checked before anything is written.
#pragma once

#include <atomic>
#include <limits>
#include <string>
#include <vector>

#include "parallel.h"
#include "wire.h"

namespace hvd_quant {

// Outputs of at least this many entries bypass the caches: they would only push other things out.
constexpr int64_t kStreamedEntries = int64_t{1} << 20;

// Calls check(i), which returns whether payload i is all finite or throws PayloadError, for each payload; several at a time,
// but the error that is thrown is that of the lowest rank. Returns whether all are finite; if not, fills `out` with NaN.
template <class Check>
bool check_all(int64_t count, const Parallel& parallel, int64_t numel, float* out, const Check& check) {
  std::vector<std::string> errors(count);
  std::atomic<bool> finite{true};
  parallel(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      try {
        if (!check(i)) finite = false;
      } catch (const PayloadError& error) {
        errors[i] = error.what();
      }
    }
  });
  for (const std::string& error : errors)
    if (!error.empty()) throw PayloadError(error);
  if (!finite)
    parallel(numel, int64_t{1} << 16, [&](int64_t begin, int64_t end) {
      loops().fill(std::numeric_limits<float>::quiet_NaN(), out + begin, end - begin, false);
    });
  return finite;
}

}  // namespace hvd_quant
