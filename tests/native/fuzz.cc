// Any bytes, given to a code's decoder as payloads: an error or a sum, the same every time, and no byte read or written that
// isn't theirs. libFuzzer's target, for one compressor in all its settings:
//
//   HVD_QUANT_FUZZED=topk fuzz CORPUS
//
// An input is a head of 8 bytes (number of entries in 3, which of the code's settings, how many good payloads come after the
// bad one, whether the header is made to fit, SIMD levels being chosen by HVD_QUANT_SIMD), then a payload.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "codes.h"

using namespace hvd_quant;

namespace {

constexpr int64_t kHead = 8, kMostEntries = 3 * kUnit;

[[noreturn]] void complain(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// What decoding says: an error's sentence, or the sum's bytes.
std::string outcome(const Coder& coder, const std::vector<Bytes>& payloads, int64_t numel) {
  const std::unique_ptr<float[]> out(new float[numel]);  // of just this size, so that a sanitizer sees what lies beyond
  try {
    coder.decode_sum(payloads, numel, 0.5f, out.get(), Parallel());
  } catch (const PayloadError& error) {
    return error.what();
  }
  bool every_nan = true, all_finite = true;
  for (int64_t i = 0; i < numel; ++i) {
    every_nan &= std::isnan(out[i]);
    all_finite &= !std::isnan(out[i]);  // sums of large values may become infinite
  }
  if (!every_nan && !all_finite) complain("some entries are NaN, others aren't");
  return std::string(reinterpret_cast<const char*>(out.get()), 4 * size_t(numel));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<Coder> settings = [] {
    const char* name = std::getenv("HVD_QUANT_FUZZED");
    std::vector<Coder> found = settings_of(name ? name : "");
    if (found.empty()) complain("HVD_QUANT_FUZZED has to name a compressor");
    return found;
  }();
  if (size < size_t(kHead)) return 0;
  const int64_t numel = (data[0] | data[1] << 8 | data[2] << 16) % (kMostEntries + 1);
  const Coder& coder = settings[data[3] % settings.size()];
  const size_t length = size - kHead;
  const std::unique_ptr<uint8_t[]> bad(new uint8_t[length]);
  std::memcpy(bad.get(), data + kHead, length);
  if (data[5] & 1 && length >= size_t(kHeaderBytes)) {
    const uint8_t flags = bad[3];
    write_header(bad.get(), coder.name, numel, int64_t(length) - kHeaderBytes);
    bad[3] = flags;
    store_as(bad.get() + 24, checksum(bad.get(), int64_t(length)));
  }
  std::vector<Bytes> payloads = {{bad.get(), int64_t(length)}};
  std::vector<uint8_t> good;
  if (data[4] % 3) {
    const std::vector<float> g = normal(numel, 7);
    good = coder.encode(g.data(), nullptr, numel, Parallel());
    payloads.insert(payloads.end(), data[4] % 3, Bytes{good.data(), int64_t(good.size())});
  }
  if (outcome(coder, payloads, numel) != outcome(coder, payloads, numel)) complain("decoding twice gives two results");
  // As what an allgather returned: cut where the headers say, and never beyond the end.
  try {
    int64_t total = 0;
    for (const Bytes& part : split({bad.get(), int64_t(length)}, 1 + data[4] % 3)) {
      if (part.data < bad.get() || part.size < 0) complain("a part begins before the whole");
      total += part.size;
    }
    if (total != int64_t(length)) complain("the parts are not the whole");
  } catch (const PayloadError&) {
  }
  return 0;
}
