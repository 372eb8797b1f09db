// threshold, adaptive and topk: positions local to blocks, and what their values are. They differ in how kept entries are
// coded; scan, choice, slots and positions are the same. hvd_quant/ops/generic.py says the same in array operations.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "decode.h"

namespace hvd_quant {

constexpr int64_t kBlock = 256;  // entries that share a count byte
constexpr int64_t kBlocksInUnit = 64;
constexpr int64_t kUnit = kBlock * kBlocksInUnit;  // entries that share adaptive's levels; a scan starts at a unit
constexpr int kWords = kUnit / 64;                 // of a unit's candidate bits
constexpr int kMostInBlock = 255;

constexpr uint32_t step_hash(int64_t step) { return uint32_t(step) * 0x9E3779B1u; }

// From topk on, what topk's values may be: themselves, or signs and means of magnitudes.
enum class Code { threshold, adaptive, topk, topk_half, topk_sign, topk_tensor_sign, topk_2bit };

// topk's code by the name of its values; Code::threshold for a name that is none.
inline Code topk_code(const std::string& values) {
  return values == "float32"       ? Code::topk
         : values == "float16"     ? Code::topk_half
         : values == "sign"        ? Code::topk_sign
         : values == "tensor_sign" ? Code::topk_tensor_sign
         : values == "2bit"        ? Code::topk_2bit
                                   : Code::threshold;
}
constexpr const char* kTopkValues = "float32, float16, sign, tensor_sign or 2bit";

// The lengths and offsets of a sparse payload.
struct SparseLayout {
  int64_t numel, slots, units, blocks;
  const char* codec;
  int64_t level_pairs, code_bits;
  int64_t levels, counts, positions, codes, body, payload_bytes;  // offsets in the payload, but body: its length

  SparseLayout(Code code, int64_t numel, int64_t slots)
      : numel(numel), slots(slots), units(ceil_div(numel, kUnit)), blocks(ceil_div(numel, kBlock)) {
    codec = code == Code::threshold ? "threshold" : code == Code::adaptive ? "adaptive" : "topk";
    level_pairs = code == Code::topk || code == Code::topk_half               ? 0
                  : code == Code::threshold || code == Code::topk_tensor_sign ? 1
                                                                              : units;
    code_bits = code == Code::topk ? 32 : code == Code::topk_half ? 16 : code == Code::topk_2bit ? 2 : 1;
    levels = kHeaderBytes + 8;
    counts = levels + 8 * level_pairs;
    positions = counts + blocks;
    codes = positions + slots;
    body = codes + slots * code_bits / 8 - kHeaderBytes;
    payload_bytes = kHeaderBytes + padded(body);
  }

  // That of a block which is any of the tensor's with the same chance.
  int64_t first_unit(uint32_t hash) const { return int64_t(uint64_t{hash} * uint64_t(blocks) >> 32) / kBlocksInUnit; }
  int unit_entries(int64_t unit) const { return int(std::min(kUnit, numel - unit * kUnit)); }
  int unit_blocks(int64_t unit) const { return int(std::min(kBlocksInUnit, blocks - unit * kBlocksInUnit)); }
};

// ------------------------------------------------------------------------------------------------------------- encode

// Keeps the first `room` candidates of a unit of n entries, at most 255 of a block, in the step's cyclic order. Rarely
// needed: when slots run out, which happens in one unit, or a block is full. Returns how many are kept. The order begins at
// `fraction` (of 2^32) of the unit.
inline int64_t prune(uint64_t* words, int n, int64_t room, uint32_t fraction) {
  const int blocks = int(ceil_div(n, kBlock));
  const uint64_t begin = uint64_t{fraction} * uint64_t(blocks);
  const int first_block = int(begin >> 32);
  int64_t total = 0;
  for (int i = 0; i < blocks; ++i) {
    const int b = (first_block + i) % blocks, entries = std::min<int>(kBlock, n - b * kBlock);
    uint64_t* block = words + 4 * b;
    int count = 0;
    for (int w = 0; w < 4; ++w) count += __builtin_popcountll(block[w]);
    const int64_t allowed = std::min<int64_t>({count, kMostInBlock, room - total});
    if (allowed == 0) {
      std::memset(block, 0, kBlock / 8);
    } else if (allowed < count) {
      const int first = int((begin & 0xffffffff) * uint64_t(entries) >> 32);
      int64_t seen = 0;
      for (int j = 0; j < entries; ++j) {
        const int at = (first + j) % entries;
        const uint64_t bit = uint64_t{1} << (at % 64);
        if (block[at / 64] & bit && ++seen > allowed) block[at / 64] &= ~bit;
      }
    }
    total += allowed;
  }
  return total;
}

// ORs k bits into `codes`, which is zero so far, from bit `first` on. Units share the bytes at their ends, hence the atomics.
inline void place_bits(uint8_t* codes, int64_t first, const uint8_t* bits, int k) {
  const int shift = int(first % 8), bytes = (shift + k + 7) / 8;
  uint8_t* to = codes + first / 8;
  unsigned carry = 0;
  for (int i = 0; i < bytes; ++i) {
    const unsigned here = 8 * i < k ? bits[i] : 0;
    const uint8_t byte = uint8_t(here << shift | carry);
    carry = here >> (8 - shift);
    if (i == 0 || i == bytes - 1) __atomic_fetch_or(to + i, byte, __ATOMIC_RELAXED);
    else to[i] = byte;
  }
}

// Writes a whole payload of SparseLayout::payload_bytes: what lies beyond `high` > 0 or `low` < 0 and finds a slot. `e`, the
// residual, is updated in place; it may be null. For Code::threshold, low is -high, the level.
inline void sparse_encode(Code code, const float* g, float* e, int64_t numel, float high, float low, int64_t slots,
                          int64_t step, uint8_t* payload, const Parallel& parallel) {
  const DenormalGuard guard;
  const SparseLayout at(code, numel, slots);
  const Loops& loop = loops();
  const uint64_t begin = uint64_t{step_hash(step)} * uint64_t(at.units);
  const int64_t start = int64_t(begin >> 32);
  const uint32_t fraction = uint32_t(begin);
  uint8_t *counts = payload + at.counts, *positions = payload + at.positions, *codes = payload + at.codes;
  std::atomic<bool> finite{true};

  write_header(payload, at.codec, numel, at.payload_bytes - kHeaderBytes);
  if (at.code_bits <= 2) std::memset(codes, 0, slots * at.code_bits / 8);
  const auto set_levels = [&](int64_t pair, float first, float second) {
    store_as(payload + at.levels + 8 * pair, first);
    store_as(payload + at.levels + 8 * pair + 4, second);
  };

  // Finds a unit's candidates, at most 255 a block, and how many there are. The second time e holds v already.
  const auto scan = [&](int64_t unit, bool again, uint64_t* words) -> int64_t {
    const int64_t first = unit * kUnit;
    const bool residual = e && !again;
    int total, most;
    if (!loop.scan_unit((e && again ? e : g) + first, residual ? e + first : nullptr, at.unit_entries(unit), high, low, words,
                        &total, &most))
      finite = false;
    return most > kMostInBlock ? prune(words, at.unit_entries(unit), kUnit, fraction) : total;
  };

  // Lists a unit's kept entries and their values. `next` is the unit whose memory is wanted after this.
  const auto list = [&](int64_t unit, const uint64_t* words, int64_t slot, int64_t next, uint16_t* places, float* values) {
    const float* v = e ? e : g;  // without a residual v is g wherever it can be kept
    const int k =
        loop.list_unit(words, at.unit_blocks(unit), counts + unit * kBlocksInUnit, places, g + next * kUnit, v + next * kUnit);
    loop.gather(v + unit * kUnit, places, k, positions + slot, values);
    return k;
  };

  // The sum of the magnitudes of k values.
  const auto total_of = [&](const float* values, int k) {
    double total, none;
    loop.magnitudes(values, k, std::numeric_limits<float>::infinity(), &total, &none);
    return total;
  };
  float mean_of_all = 0;  // for Code::topk_tensor_sign

  // Writes a unit's kept entries into the slots from `slot` on and leaves the rest of them in the residual.
  const auto emit = [&](int64_t unit, const uint64_t* words, int64_t slot, int64_t next) {
    uint16_t places[kUnit + 2];
    alignas(64) float values[kUnit];
    const int k = list(unit, words, slot, next, places, values);
    if (code == Code::topk) {
      std::memcpy(codes + 4 * slot, values, 4 * size_t(k));
      std::memset(values, 0, 4 * size_t(k));
    } else if (code == Code::topk_half) {
      uint16_t halves[kUnit];
      loop.halve(values, k, halves);
      std::memcpy(codes + 2 * slot, halves, 2 * size_t(k));
    } else if (code == Code::topk_2bit) {
      const float middle = float(total_of(values, k) / std::max(k, 1));
      double within, beyond;
      const int above = loop.magnitudes(values, k, middle, &within, &beyond);
      const float lower = float(within / std::max(k - above, 1)), upper = float(beyond / std::max(above, 1));
      set_levels(unit, lower, upper);
      uint8_t signs[kUnit / 8], larger[kUnit / 8];
      loop.split_magnitudes(values, k, middle, lower, upper, signs, larger);
      place_bits(codes, slot, signs, k);
      place_bits(codes + slots / 8, slot, larger, k);
    } else {
      float up = high, down = low;
      if (code == Code::topk_tensor_sign) {
        up = mean_of_all;
        down = -up;
      } else if (code == Code::topk_sign) {
        up = float(total_of(values, k) / std::max(k, 1));
        down = -up;
        set_levels(unit, up, down);
      } else if (code == Code::adaptive) {
        loop.signed_means(values, k, &up, &down);
        if (!std::isfinite(up) || !std::isfinite(down)) {
          up = down = 0;
          finite = false;
        }
        set_levels(unit, up, down);
      }
      uint8_t signs[kUnit / 8];
      loop.split_signs(values, k, up, down, signs);
      place_bits(codes, slot, signs, k);
    }
    if (e) loop.scatter(values, places, k, e + unit * kUnit);
  };

  int64_t used = 0;
  const auto pass = [&](bool again) {
    if ((parallel.threads == 1 || at.units < 2) && code != Code::topk_tensor_sign) {
      parallel(1, 1, [&](int64_t, int64_t) {
        uint64_t words[kWords];
        for (int64_t i = 0; i < at.units; ++i) {
          const int64_t unit = (start + i) % at.units;
          int64_t kept = scan(unit, again, words);
          if (kept > slots - used) kept = prune(words, at.unit_entries(unit), slots - used, fraction);
          emit(unit, words, used, (unit + 1) % at.units);
          used += kept;
        }
      });
      return;
    }
    // Where a unit's slots begin depends on all units before it, and a mean of all on all, so candidates wait as bits: an
    // entry's 32nd part.
    std::unique_ptr<uint64_t[]> words(new uint64_t[at.units * kWords]);
    std::vector<int64_t> kept(at.units);
    parallel(at.units, 1, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) kept[unit] = scan(unit, again, words.get() + unit * kWords);
    });
    for (int64_t i = 0; i < at.units; ++i) {
      const int64_t unit = (start + i) % at.units;
      if (kept[unit] > slots - used)
        kept[unit] = prune(words.get() + unit * kWords, at.unit_entries(unit), slots - used, fraction);
      const int64_t first = used;
      used += kept[unit];
      kept[unit] = first;
    }
    if (code == Code::topk_tensor_sign) {
      std::vector<double> sums(at.units);
      parallel(at.units, 1, [&](int64_t begin, int64_t end) {
        for (int64_t unit = begin; unit < end; ++unit) {
          uint16_t places[kUnit + 2];
          alignas(64) float values[kUnit];
          const int k = list(unit, words.get() + unit * kWords, kept[unit], unit, places, values);
          sums[unit] = total_of(values, k);
        }
      });
      mean_of_all = float(std::accumulate(sums.begin(), sums.end(), 0.0) / double(std::max<int64_t>(used, 1)));
      set_levels(0, mean_of_all, -mean_of_all);
    }
    parallel(at.units, 1, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) emit(unit, words.get() + unit * kWords, kept[unit], unit);
    });
  };
  if (code == Code::threshold) set_levels(0, high, -high);
  pass(false);
  if (used == 0 && code >= Code::topk) {
    // The largest values all equal the threshold, as in a constant gradient: keep those.
    const float t = std::nextafter(high, 0.0f);
    if (t > 0) {
      high = t;
      low = -t;
      pass(true);
    }
  }

  std::memset(positions + used, 0, slots - used);
  if (at.code_bits > 2) std::memset(codes + used * at.code_bits / 8, 0, (slots - used) * at.code_bits / 8);
  std::memset(payload + kHeaderBytes + at.body, 0, padded(at.body) - at.body);
  store_as(payload + kHeaderBytes, uint32_t(start));
  store_as(payload + kHeaderBytes + 4, uint32_t(used));
  seal(payload, at.payload_bytes, finite);
}

// ------------------------------------------------------------------------------------------------------------- decode

// One payload's kept entries: for each unit its first slot and how many there are, for each slot its place in its unit.
// Checking needs the places as adding does, and finding them twice would cost more than keeping 2 bytes a slot.
struct Kept {
  struct Run {
    uint32_t slot, count;
  };
  std::unique_ptr<Run[]> units;
  std::unique_ptr<uint16_t[]> places;
};

// Checks the body of a sparse payload and lists its entries.
inline Kept check_sparse(const SparseLayout& at, const uint8_t* payload) {
  const Loops& loop = loops();
  const uint8_t *counts = payload + at.counts, *positions = payload + at.positions, *codes = payload + at.codes;
  const int64_t start = load_as<uint32_t>(payload + kHeaderBytes), kept = load_as<uint32_t>(payload + kHeaderBytes + 4);
  require(start < std::max<int64_t>(1, at.units), "the scan starts outside the tensor");
  require(kept <= at.slots, "more entries are kept than there are slots");
  Kept entries{std::unique_ptr<Kept::Run[]>(new Kept::Run[at.units]), nullptr};
  int64_t slot = 0;
  for (int64_t i = 0; i < at.units; ++i) {
    const int64_t unit = (start + i) % at.units;
    const uint8_t* c = counts + unit * kBlocksInUnit;
    uint32_t count = 0;
    for (int b = 0; b < at.unit_blocks(unit); ++b) count += c[b];
    entries.units[unit] = {uint32_t(slot), count};  // wraps only if the sum, which is checked next, is wrong
    slot += count;
  }
  require(slot == kept, "counts do not add up");
  require(all_finite<uint32_t>(payload + at.levels, 2 * at.level_pairs), "a level is not finite");
  require(all_zero(positions + kept, at.slots - kept), "an unused slot is not zero");
  entries.places.reset(new uint16_t[kept + 16]);
  bool inside = true, ascend = true;
  for (int64_t i = 0; i < at.units; ++i) {  // in the slots' order, since place_unit writes beyond what it lists
    const int64_t unit = (start + i) % at.units;
    const uint32_t first = entries.units[unit].slot;
    uint16_t* places = entries.places.get() + first;
    const int k = loop.place_unit(counts + unit * kBlocksInUnit, at.unit_blocks(unit), positions + first, places);
    const int n = at.unit_entries(unit);
    for (int j = 0; n < kUnit && j < k; ++j) inside &= places[j] < n;
    ascend &= loop.ascending(places, k);
  }
  require(inside, "a position lies outside the tensor");
  require(ascend, "positions do not ascend");
  if (at.code_bits <= 2) {
    for (const uint8_t* bits = codes; bits < codes + at.slots * at.code_bits / 8; bits += at.slots / 8)
      require(all_zero(bits + ceil_div(kept, 8), at.slots / 8 - ceil_div(kept, 8)) &&
                  (kept % 8 == 0 || bits[kept / 8] >> kept % 8 == 0),
              "an unused slot is not zero");
  } else {
    const int64_t bytes = at.code_bits / 8;
    require(all_zero(codes + kept * bytes, (at.slots - kept) * bytes), "an unused slot is not zero");
    require(bytes == 4 ? all_finite<uint32_t>(codes, kept) : all_finite<uint16_t>(codes, kept), "a value is not finite");
  }
  return entries;
}

// Adds a payload's entries of one unit to `tile`, which holds the unit.
inline void add_unit(Code code, const SparseLayout& at, const uint8_t* payload, const Kept& entries, int64_t unit,
                     float* tile) {
  const int64_t first = entries.units[unit].slot;
  const int k = int(entries.units[unit].count);
  const uint16_t* places = entries.places.get() + first;
  const uint8_t* codes = payload + at.codes;
  if (code == Code::topk) {
    for (int i = 0; i < k; ++i) tile[places[i]] += load_as<float>(codes + 4 * (first + i));
  } else if (code == Code::topk_half) {
    uint16_t halves[kUnit];
    float values[kUnit];
    std::memcpy(halves, codes + 2 * first, 2 * size_t(k));
    std::fill(halves + k, halves + ceil_div(k, 16) * 16, uint16_t(0));
    loops().widen(halves, k, values);
    for (int i = 0; i < k; ++i) tile[places[i]] += values[i];
  } else {
    const uint8_t* levels = payload + at.levels + (at.level_pairs > 1 ? 8 * unit : 0);
    const float a = load_as<float>(levels), b = load_as<float>(levels + 4);
    if (code == Code::topk_2bit) {
      const float level[4] = {-a, a, -b, b};
      for (int i = 0; i < k; ++i) {
        const int64_t slot = first + i, byte = slot / 8, bit = slot % 8;
        tile[places[i]] += level[(codes[at.slots / 8 + byte] >> bit & 1) << 1 | (codes[byte] >> bit & 1)];
      }
      return;
    }
    const float level[2] = {b, a};
    for (int i = 0; i < k; ++i) {
      const int64_t slot = first + i;
      tile[places[i]] += level[codes[slot / 8] >> slot % 8 & 1];
    }
  }
}

// out = scale times the sum of the payloads.
inline void sparse_decode_sum(Code code, const std::vector<Bytes>& payloads, int64_t numel, int64_t slots, float scale,
                              float* out, const Parallel& parallel) {
  const SparseLayout at(code, numel, slots);
  std::vector<Kept> entries(payloads.size());
  const bool finite = check_all(payloads.size(), parallel, numel, out, [&](int64_t i) {
    const uint8_t flags = check(payloads[i], at.codec, numel, at.body);
    entries[i] = check_sparse(at, payloads[i].data);
    return !(flags & kNonfinite);
  });
  if (!finite) return;
  parallel(at.units, 2, [&](int64_t begin, int64_t end) {
    alignas(64) float tile[kUnit] = {};
    for (int64_t unit = begin; unit < end; ++unit) {
      for (size_t i = 0; i < payloads.size(); ++i) add_unit(code, at, payloads[i].data, entries[i], unit, tile);
      loops().move_tile(tile, scale, out + unit * kUnit, at.unit_entries(unit), numel >= kStreamedEntries);
    }
  });
}

}  // namespace hvd_quant
