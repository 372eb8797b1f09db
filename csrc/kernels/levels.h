// Compiles loops.h for each level of simd.h and picks one when the program runs.
#pragma once

#include <cstdint>

#include "simd.h"

namespace hvd_quant {

// Where the parts of one onebit payload lie.
struct OnebitView {
  const uint8_t *levels, *signs, *nonzeros;
};

// How a value travels as it is.
enum class Cast { float32, float16, bfloat16 };

// The functions of loops.h, compiled for one level.
struct Loops {
  uint64_t (*weigh)(const uint8_t*, int64_t);
  bool (*onebit_encode_blocks)(const float*, float*, float*, int64_t, int64_t, bool, int64_t, int64_t, uint8_t*, uint8_t*,
                               uint8_t*);
  void (*onebit_decode_blocks)(const OnebitView*, int, int64_t, int64_t, bool, int64_t, int64_t, float, float*, bool);
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
  void (*add_all)(const float*, const float*, float*, int64_t);
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
