// Inputs of fuzz.cc, kept in one file a compressor that has its name: each after its length, 4 bytes, little-endian.
//
//   inputs seeds FOLDER [NUMEL ...]    valid inputs of all compressors, in a folder each
//   inputs pack FOLDER FILE            the files of a folder into one
//   inputs unpack FILE FOLDER          and back, named by their number
//   inputs decode FILE                 all of them to the decoders, as the fuzzer does it
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "fuzz.cc"

namespace {

namespace fs = std::filesystem;

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) complain(("can't read " + path.string()).c_str());
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const fs::path& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  if (!file.write(bytes.data(), std::streamsize(bytes.size()))) complain(("can't write " + path.string()).c_str());
}

std::vector<std::string> inputs_in(const fs::path& packed) {
  const std::string bytes = contents(packed);
  std::vector<std::string> inputs;
  for (size_t at = 0; at < bytes.size();) {
    const size_t length =
        at + 4 <= bytes.size() ? load_as<uint32_t>(reinterpret_cast<const uint8_t*>(bytes.data()) + at) : bytes.size();
    if (length > bytes.size() - at - 4) complain((packed.string() + " is cut off").c_str());
    inputs.push_back(bytes.substr(at + 4, length));
    at += 4 + length;
  }
  return inputs;
}

void pack(const fs::path& folder, const fs::path& packed) {
  std::vector<std::string> inputs;
  for (const fs::directory_entry& file : fs::directory_iterator(folder)) inputs.push_back(contents(file.path()));
  std::sort(inputs.begin(), inputs.end());  // the same inputs are the same file
  std::string bytes;
  for (const std::string& input : inputs) {
    uint8_t length[4];
    store_as(length, uint32_t(input.size()));
    bytes.append(reinterpret_cast<const char*>(length), 4).append(input);
  }
  write(packed, bytes);
}

void unpack(const fs::path& packed, const fs::path& folder) {
  fs::create_directories(folder);
  size_t number = 0;
  for (const std::string& input : inputs_in(packed)) write(folder / ("kept-" + std::to_string(number++)), input);
}

void seeds(const fs::path& folder, const std::vector<int64_t>& numels) {
  for (const Coder& coder : coders()) {
    fs::create_directories(folder / coder.name);
    const std::vector<Coder> settings = settings_of(coder.name);
    for (size_t i = 0; i < settings.size(); ++i)
      for (const int64_t numel : numels) {
        std::vector<float> g = normal(numel, 1 + i), e(numel);
        const std::vector<uint8_t> payload = settings[i].encode(g.data(), e.data(), numel, Parallel());
        std::string bytes = {char(numel), char(numel >> 8), char(numel >> 16), char(i), 1, 1, 0, 0};
        bytes.append(payload.begin(), payload.end());
        write(folder / coder.name / (std::to_string(i) + "-" + std::to_string(numel)), bytes);
      }
  }
}

void decode(const fs::path& packed) {
  setenv("HVD_QUANT_FUZZED", packed.filename().c_str(), 1);
  const std::vector<std::string> inputs = inputs_in(packed);
  for (const std::string& input : inputs) {
    const std::vector<uint8_t> exactly(input.begin(), input.end());  // so that a sanitizer sees what lies beyond
    LLVMFuzzerTestOneInput(exactly.data(), exactly.size());
  }
  std::printf("%s: %zu inputs\n", packed.filename().c_str(), inputs.size());
}

}  // namespace

int main(int count, char** arguments) {
  const std::vector<std::string> given(arguments + 1, arguments + count);
  const std::string what = given.empty() ? "" : given[0];
  if (what == "seeds" && given.size() > 1) {
    std::vector<int64_t> numels;
    for (size_t i = 2; i < given.size(); ++i) numels.push_back(std::stoll(given[i]));
    seeds(given[1], numels);
  } else if (what == "pack" && given.size() == 3) {
    pack(given[1], given[2]);
  } else if (what == "unpack" && given.size() == 3) {
    unpack(given[1], given[2]);
  } else if (what == "decode" && given.size() == 2) {
    decode(given[1]);
  } else {
    complain("give seeds FOLDER [NUMEL ...], pack FOLDER FILE, unpack FILE FOLDER or decode FILE");
  }
  return 0;
}
