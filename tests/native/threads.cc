// All codes from several threads at once, each of which encodes and decodes with threads of its own, and compares with what one
// thread makes of it. For ThreadSanitizer:
//
//   threads [SECONDS]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "codes.h"

using namespace hvd_quant;

namespace {

constexpr int kCallers = 4, kThreads = 3;

// Each range on a thread of its own.
Parallel several() {
  return {kThreads, [](int64_t n, int64_t grain, const Range& body) {
            const int64_t length = std::max(grain, ceil_div(n, kThreads));
            std::vector<std::thread> threads;
            for (int64_t begin = 0; begin < n; begin += length) threads.emplace_back(body, begin, std::min(n, begin + length));
            for (std::thread& thread : threads) thread.join();
          }};
}

struct Results {
  std::vector<uint8_t> payload;
  std::vector<float> residual, sum;
  bool operator==(const Results& other) const {
    return payload == other.payload && !std::memcmp(residual.data(), other.residual.data(), 4 * residual.size()) &&
           !std::memcmp(sum.data(), other.sum.data(), 4 * sum.size());
  }
};

Results work(const Coder& coder, int64_t numel, uint64_t seed, const Parallel& parallel) {
  Results results{{}, normal(numel, seed + 1), std::vector<float>(numel)};
  results.payload = coder.encode(normal(numel, seed).data(), results.residual.data(), numel, parallel);
  const Bytes bytes{results.payload.data(), int64_t(results.payload.size())};
  coder.decode_sum({bytes, bytes, bytes}, numel, 1.0f / 3, results.sum.data(), parallel);
  return results;
}

}  // namespace

int main(int count, char** arguments) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(count > 1 ? std::atoi(arguments[1]) : 10);
  const std::vector<Coder> codes = coders();
  std::atomic<uint64_t> next{0}, wrong{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < kCallers; ++i)
    callers.emplace_back([&] {
      // Every code twice, however long that takes.
      for (uint64_t job; (job = next++) < 2 * codes.size() || std::chrono::steady_clock::now() < end;) {
        const Coder& coder = codes[job % codes.size()];
        const int64_t numel = int64_t(mix(job) % (6 * kUnit));
        if (!(work(coder, numel, job, several()) == work(coder, numel, job, Parallel()))) {
          std::fprintf(stderr, "%s, %lld entries: threads change the result\n", coder.name.c_str(), (long long)numel);
          ++wrong;
        }
      }
    });
  for (std::thread& caller : callers) caller.join();
  std::printf("%llu encodings, %llu wrong\n", (unsigned long long)next, (unsigned long long)wrong);
  return wrong != 0;
}
