// Compiles loops.h for each level of simd.h and picks one when the program runs.
#pragma once

#include <cstdint>

#include "simd.h"

namespace hvd_quant {

// Where the parts of one onebit or signsgd payload lie.
struct OnebitView {
  const uint8_t *levels, *signs, *nonzeros;
};

// What a field of a few bits means: a multiple of its block's scale, an entry of a table times that, or a power of two.
enum class Grid { linear, dynamic, natural };

// The dynamic code: what each field stands for, half-way marks between magnitudes, and, for each interval of a float's
// first bits, how many marks lie below it: all of them but one at most.
struct DynamicCode {
  static constexpr int kCellBits = 17;                 // of a float that tell nothing of its cell
  static constexpr uint32_t kFirst = (127 - 22) << 6;  // the cell of 2^-22, which is below the first mark
  static constexpr int kCells = 22 * 64 + 1;           // up to that of 1
  float values[256], marks[129];
  uint32_t below[kCells];
};

// A code of `bits` (2, 4 or 8) an entry. `block` entries share a scale, or all do, in which case blocks are only what is
// worked on at a time.
struct Fields {
  enum class Scales { none, one, blocks };

  const char* codec;
  Grid grid;
  int bits;
  int64_t block;
  Scales scales;
  const DynamicCode* dynamic;
};

// How entries are rounded: by random numbers with these keys and the entries' places in the whole tensor, or to nearest.
// `scale` is given where all entries share one; with `l2` a block's is of its 2-norm, else of its largest magnitude.
struct Rounding {
  bool random;
  uint32_t key0, key1;
  int64_t first;
  bool l2;
  float scale;
};

// Where the parts of one payload of fields lie.
struct FieldsView {
  const uint8_t *scales, *fields;
};

// How a value travels as it is.
enum class Cast { float32, float16, bfloat16 };

// The functions of loops.h, compiled for one level.
struct Loops {
  uint64_t (*weigh)(const uint8_t*, int64_t);
  bool (*onebit_encode_blocks)(const float*, float*, float*, int64_t, int64_t, bool, bool, int64_t, int64_t, uint8_t*, uint8_t*,
                               uint8_t*);
  void (*onebit_decode_blocks)(const OnebitView*, int, int64_t, int64_t, bool, bool, int64_t, int64_t, float, float*, bool);
  bool (*scan_unit)(const float*, float*, int, float, float, uint64_t*, int*, int*);
  int (*list_unit)(const uint64_t*, int, uint8_t*, uint16_t*, const float*, const float*);
  void (*gather)(const float*, const uint16_t*, int, uint8_t*, float*);
  void (*scatter)(const float*, const uint16_t*, int, float*);
  void (*signed_means)(const float*, int, float*, float*);
  void (*split_signs)(float*, int, float, float, uint8_t*);
  int (*magnitudes)(const float*, int, float, double*, double*);
  void (*split_magnitudes)(float*, int, float, float, float, uint8_t*, uint8_t*);
  int (*place_unit)(const uint8_t*, int, const uint8_t*, uint16_t*);
  bool (*ascending)(const uint16_t*, int);
  void (*move_tile)(float*, float, float*, int, bool);
  void (*halve)(float*, int, uint16_t*);
  void (*widen)(const uint16_t*, int, float*);
  bool (*cast)(Cast, const float*, int64_t, uint8_t*);
  void (*cast_sum)(Cast, const uint8_t* const*, int, int64_t, int64_t, float, float*, bool);
  bool (*fields_encode_blocks)(const Fields&, const Rounding&, const float*, float*, float*, int64_t, int64_t, int64_t,
                               uint8_t*, uint8_t*);
  void (*fields_decode_blocks)(const Fields&, const FieldsView*, int, int64_t, int64_t, int64_t, float, float*, bool);
  bool (*fields_valid)(const uint8_t*, int64_t, int);
  void (*moments)(const float*, const float*, int64_t, double*, double*, float*);
  void (*add_all)(const float*, const float*, float*, int64_t);
  float (*read_all)(const float*, int64_t);
  void (*fill)(float, float*, int64_t, bool);
};

namespace plain {
#include "loops.h"
}

#if HVD_QUANT_X86

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,bmi,bmi2,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,bmi,bmi2,popcnt")
#endif
namespace avx2 {
#include "loops.h"
}
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,bmi,bmi2,popcnt"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,bmi,bmi2,popcnt")
#endif
namespace avx512 {
#include "loops.h"
}
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // HVD_QUANT_X86

inline const Loops& loops() {
#if HVD_QUANT_X86
  static const Loops chosen = level() == Level::avx512 ? avx512::table()
                              : level() == Level::avx2 ? avx2::table()
                                                       : plain::table();
#else
  static const Loops chosen = (level(), plain::table());
#endif
  return chosen;
}

}  // namespace hvd_quant
