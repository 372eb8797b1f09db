// Sixteen floats or 32-bit integers at a time: the only file with intrinsics.
//
// The same names exist in three namespaces, one a level: `plain` (any machine), `avx2` (x86-64-v3) and `avx512`
// (x86-64-v4). loops.h is written once against them and compiled for each. Every operation rounds alike on all levels (no
// fused multiply-add; build with -ffp-contract=off), so the levels give the same bytes.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#define HVD_QUANT_X86 1
#include <cpuid.h>
#include <immintrin.h>
#endif

// Functions of a level must never be shared between translation units or levels: an inline function that the linker takes
// from a region with more instructions would crash older machines. Hence static and always inlined, and no std:: inside.
#define HVD_QUANT_INLINE static inline __attribute__((always_inline, unused))

namespace hvd_quant {

enum class Level { plain, avx2, avx512 };

inline const char* level_name(Level level) {
  return level == Level::avx512 ? "avx512" : level == Level::avx2 ? "avx2" : "plain";
}

inline Level best_level() {
#if HVD_QUANT_X86
  __builtin_cpu_init();
  unsigned a, b, c = 0, d;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;  // which clang's __builtin_cpu_supports doesn't know
  bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
            __builtin_cpu_supports("popcnt") && f16c;
  bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return v4 ? Level::avx512 : v3 ? Level::avx2 : Level::plain;
#else
  return Level::plain;
#endif
}

// The level in use: the processor's best, or what the environment variable HVD_QUANT_SIMD asks for. Read once.
inline Level level() {
  static const Level chosen = [] {
    const Level best = best_level();
    const char* text = std::getenv("HVD_QUANT_SIMD");
    if (!text || !*text) return best;
    const std::string asked(text);
    for (Level l : {Level::plain, Level::avx2, Level::avx512}) {
      if (asked != level_name(l)) continue;
      if (l <= best) return l;
      throw std::invalid_argument("HVD_QUANT_SIMD=" + asked + " is not supported by this processor, its best is " +
                                  level_name(best));
    }
    throw std::invalid_argument("HVD_QUANT_SIMD=" + asked + " is unknown, expected plain, avx2 or avx512");
  }();
  return chosen;
}

// Honours denormals for as long as it lives, whatever mode the calling thread is in.
class DenormalGuard {
 public:
#if HVD_QUANT_X86
  DenormalGuard() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }
  ~DenormalGuard() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  DenormalGuard() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    set(saved_ & ~((uint64_t{1} << 24) | (uint64_t{1} << 19)));
  }
  ~DenormalGuard() { set(saved_); }

 private:
  static void set(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
  uint64_t saved_;
#else
  DenormalGuard() {}
  ~DenormalGuard() {}
#endif
  DenormalGuard(const DenormalGuard&) = delete;
};

// ------------------------------------------------------------------------------------------------------------- plain

namespace plain {

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef float f32x2 __attribute__((vector_size(8)));
typedef double f64x2 __attribute__((vector_size(16)));

// clang-format off: tables, an operation a line
struct F { f32x4 x[4]; };
struct D { f64x2 x[8]; };
struct U { u32x4 x[4]; };
struct M { i32x4 x[4]; };

#define HVD_QUANT_EACH for (int i = 0; i < 4; ++i)
HVD_QUANT_INLINE F set(float a) { F r; HVD_QUANT_EACH r.x[i] = f32x4{a, a, a, a}; return r; }
HVD_QUANT_INLINE F load(const float* p) { F r; std::memcpy(&r, p, 64); return r; }
HVD_QUANT_INLINE void store(float* p, F a) { std::memcpy(p, &a, 64); }
HVD_QUANT_INLINE void stream(float* p, F a) { std::memcpy(p, &a, 64); }
HVD_QUANT_INLINE void fence() {}
HVD_QUANT_INLINE F add(F a, F b) { HVD_QUANT_EACH a.x[i] += b.x[i]; return a; }
HVD_QUANT_INLINE F sub(F a, F b) { HVD_QUANT_EACH a.x[i] -= b.x[i]; return a; }
HVD_QUANT_INLINE F mul(F a, F b) { HVD_QUANT_EACH a.x[i] *= b.x[i]; return a; }
HVD_QUANT_INLINE M ge(F a, F b) { M r; HVD_QUANT_EACH r.x[i] = a.x[i] >= b.x[i]; return r; }
HVD_QUANT_INLINE M gt(F a, F b) { M r; HVD_QUANT_EACH r.x[i] = a.x[i] > b.x[i]; return r; }
HVD_QUANT_INLINE M both(M a, M b) { HVD_QUANT_EACH a.x[i] &= b.x[i]; return a; }
HVD_QUANT_INLINE M either(M a, M b) { HVD_QUANT_EACH a.x[i] |= b.x[i]; return a; }
HVD_QUANT_INLINE M finite(F a) {
  M r;
  HVD_QUANT_EACH r.x[i] = ((i32x4)a.x[i] & 0x7f800000) != 0x7f800000;
  return r;
}
HVD_QUANT_INLINE F select(M m, F a, F b) {
  HVD_QUANT_EACH a.x[i] = (f32x4)((m.x[i] & (i32x4)a.x[i]) | (~m.x[i] & (i32x4)b.x[i]));
  return a;
}
HVD_QUANT_INLINE F add_where(M m, F a, F b) {  // a + 0 is a: sums start at +0 and so are never -0
  HVD_QUANT_EACH a.x[i] += (f32x4)(m.x[i] & (i32x4)b.x[i]);
  return a;
}
HVD_QUANT_INLINE unsigned bits(M m) {
  unsigned r = 0;
  HVD_QUANT_EACH {
#if HVD_QUANT_X86
    r |= unsigned(_mm_movemask_ps((__m128)m.x[i])) << (4 * i);
#else
    i32x4 b = m.x[i] & i32x4{1, 2, 4, 8};
    r |= unsigned(b[0] + b[1] + b[2] + b[3]) << (4 * i);
#endif
  }
  return r;
}
HVD_QUANT_INLINE M mask(unsigned b) {
  M r;
  HVD_QUANT_EACH {
    int n = int(b >> (4 * i));
    r.x[i] = (i32x4{n, n, n, n} & i32x4{1, 2, 4, 8}) != 0;
  }
  return r;
}
HVD_QUANT_INLINE F lower(F a, F b) { return select(gt(b, a), a, b); }
HVD_QUANT_INLINE F higher(F a, F b) { return select(gt(a, b), a, b); }

// Integers wrap around. Where a sign counts, they are in two's complement.
HVD_QUANT_INLINE U set_int(uint32_t a) { U r; HVD_QUANT_EACH r.x[i] = u32x4{a, a, a, a}; return r; }
HVD_QUANT_INLINE U ramp() {  // 0, 1, ... 15
  U r;
  HVD_QUANT_EACH r.x[i] = u32x4{0, 1, 2, 3} + uint32_t(4 * i);
  return r;
}
HVD_QUANT_INLINE U add(U a, U b) { HVD_QUANT_EACH a.x[i] += b.x[i]; return a; }
HVD_QUANT_INLINE U sub(U a, U b) { HVD_QUANT_EACH a.x[i] -= b.x[i]; return a; }
HVD_QUANT_INLINE U mul(U a, U b) { HVD_QUANT_EACH a.x[i] *= b.x[i]; return a; }
HVD_QUANT_INLINE U both(U a, U b) { HVD_QUANT_EACH a.x[i] &= b.x[i]; return a; }
HVD_QUANT_INLINE U either(U a, U b) { HVD_QUANT_EACH a.x[i] |= b.x[i]; return a; }
HVD_QUANT_INLINE U unlike(U a, U b) { HVD_QUANT_EACH a.x[i] ^= b.x[i]; return a; }
HVD_QUANT_INLINE U shl(U a, int n) { HVD_QUANT_EACH a.x[i] <<= n; return a; }
HVD_QUANT_INLINE U shr(U a, int n) { HVD_QUANT_EACH a.x[i] >>= n; return a; }
HVD_QUANT_INLINE M positive(U a) { M r; HVD_QUANT_EACH r.x[i] = (i32x4)a.x[i] > 0; return r; }
HVD_QUANT_INLINE U select(M m, U a, U b) {
  HVD_QUANT_EACH a.x[i] = ((u32x4)m.x[i] & a.x[i]) | (~(u32x4)m.x[i] & b.x[i]);
  return a;
}
HVD_QUANT_INLINE U as_int(F a) { U r; HVD_QUANT_EACH r.x[i] = (u32x4)a.x[i]; return r; }    // the same bits
HVD_QUANT_INLINE F as_float(U a) { F r; HVD_QUANT_EACH r.x[i] = (f32x4)a.x[i]; return r; }
HVD_QUANT_INLINE U to_int(F a) {  // towards zero
  U r;
  HVD_QUANT_EACH r.x[i] = (u32x4)__builtin_convertvector(a.x[i], i32x4);
  return r;
}
HVD_QUANT_INLINE F to_float(U a) { F r; HVD_QUANT_EACH r.x[i] = __builtin_convertvector((i32x4)a.x[i], f32x4); return r; }
HVD_QUANT_INLINE void to_bytes(U a, uint8_t* p) {  // of integers below 256
  HVD_QUANT_EACH for (int j = 0; j < 4; ++j) p[4 * i + j] = uint8_t(a.x[i][j]);
}
HVD_QUANT_INLINE U from_bytes(const uint8_t* p) {
  U r;
  HVD_QUANT_EACH r.x[i] = u32x4{p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
  return r;
}
HVD_QUANT_INLINE F pick(F table, U index) {  // by an index's last four bits
  float from[16], to[16];
  store(from, table);
  HVD_QUANT_EACH for (int j = 0; j < 4; ++j) to[4 * i + j] = from[index.x[i][j] & 15];
  return load(to);
}
HVD_QUANT_INLINE U lookup(const void* table, U index) {  // of 32-bit words
  uint32_t to[16];
  HVD_QUANT_EACH for (int j = 0; j < 4; ++j) std::memcpy(to + 4 * i + j, (const char*)table + 4 * size_t(index.x[i][j]), 4);
  std::memcpy(&index, to, 64);
  return index;
}

// Doubles, for sums of floats and of their squares, which neither overflow nor vanish there.
HVD_QUANT_INLINE void store(double* p, D a) { std::memcpy(p, &a, 128); }
HVD_QUANT_INLINE D add(D a, D b) { for (int i = 0; i < 8; ++i) a.x[i] += b.x[i]; return a; }
HVD_QUANT_INLINE D mul(D a, D b) { for (int i = 0; i < 8; ++i) a.x[i] *= b.x[i]; return a; }
HVD_QUANT_INLINE D to_double(F a) {
  D r;
  HVD_QUANT_EACH {
    r.x[2 * i] = __builtin_convertvector((f32x2{a.x[i][0], a.x[i][1]}), f64x2);
    r.x[2 * i + 1] = __builtin_convertvector((f32x2{a.x[i][2], a.x[i][3]}), f64x2);
  }
  return r;
}
#undef HVD_QUANT_EACH

// fp16 by hand, to nearest even; the magnitudes given are at most 65504.
HVD_QUANT_INLINE uint16_t half_of(float a) {
  uint32_t u;
  std::memcpy(&u, &a, 4);
  const uint32_t sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  if (u < 0x38800000) {  // subnormal in fp16: let the addition round, 0.5 having the ulp 2^-24
    float m;
    std::memcpy(&m, &u, 4);
    m += 0.5f;
    std::memcpy(&u, &m, 4);
    return uint16_t(sign | (u - 0x3f000000));
  }
  return uint16_t(sign | ((u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13));
}
HVD_QUANT_INLINE float float_of(uint16_t h) {
  const uint32_t magnitude = h & 0x7fff, sign = uint32_t(h & 0x8000) << 16;
  float a;
  if (magnitude < 0x400) {
    a = float(magnitude) * 0x1p-24f;
    uint32_t u;
    std::memcpy(&u, &a, 4);
    u |= sign;
    std::memcpy(&a, &u, 4);
    return a;
  }
  uint32_t u = sign | ((magnitude << 13) + (magnitude >= 0x7c00 ? 0x70000000u : 0x38000000u));
  std::memcpy(&a, &u, 4);
  return a;
}
HVD_QUANT_INLINE void to_half(F a, uint16_t* p) {
  float x[16];
  store(x, a);
  for (int i = 0; i < 16; ++i) p[i] = half_of(x[i]);
}
HVD_QUANT_INLINE F from_half(const uint16_t* p) {
  float x[16];
  for (int i = 0; i < 16; ++i) x[i] = float_of(p[i]);
  return load(x);
}

}  // namespace plain

#if HVD_QUANT_X86

// -------------------------------------------------------------------------------------------------------------- avx2

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,bmi,bmi2,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,bmi,bmi2,popcnt")
#endif

namespace avx2 {

struct F { __m256 a, b; };
struct D { __m256d a, b, c, d; };
struct M { __m256 a, b; };
struct U { __m256i a, b; };

HVD_QUANT_INLINE F set(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
HVD_QUANT_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HVD_QUANT_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
HVD_QUANT_INLINE void stream(float* p, F x) { _mm256_stream_ps(p, x.a), _mm256_stream_ps(p + 8, x.b); }
HVD_QUANT_INLINE void fence() { _mm_sfence(); }
HVD_QUANT_INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
HVD_QUANT_INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
HVD_QUANT_INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
HVD_QUANT_INLINE M ge(F x, F y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)}; }
HVD_QUANT_INLINE M gt(F x, F y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)}; }
HVD_QUANT_INLINE M both(M x, M y) { return {_mm256_and_ps(x.a, y.a), _mm256_and_ps(x.b, y.b)}; }
HVD_QUANT_INLINE M either(M x, M y) { return {_mm256_or_ps(x.a, y.a), _mm256_or_ps(x.b, y.b)}; }
HVD_QUANT_INLINE M finite(F x) {  // x - x is 0 or NaN
  x = sub(x, x);
  return {_mm256_cmp_ps(x.a, x.a, _CMP_ORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_ORD_Q)};
}
HVD_QUANT_INLINE F select(M m, F x, F y) { return {_mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b)}; }
HVD_QUANT_INLINE F add_where(M m, F x, F y) { return add(x, {_mm256_and_ps(m.a, y.a), _mm256_and_ps(m.b, y.b)}); }
HVD_QUANT_INLINE unsigned bits(M m) {
  return unsigned(_mm256_movemask_ps(m.a)) | unsigned(_mm256_movemask_ps(m.b)) << 8;
}
HVD_QUANT_INLINE M mask(unsigned b) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i lo = _mm256_and_si256(_mm256_set1_epi32(int(b)), lane);
  const __m256i hi = _mm256_and_si256(_mm256_set1_epi32(int(b >> 8)), lane);
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(lo, lane)), _mm256_castsi256_ps(_mm256_cmpeq_epi32(hi, lane))};
}
HVD_QUANT_INLINE void to_half(F x, uint16_t* p) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
HVD_QUANT_INLINE F from_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
HVD_QUANT_INLINE F lower(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
HVD_QUANT_INLINE F higher(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
HVD_QUANT_INLINE U set_int(uint32_t a) { return {_mm256_set1_epi32(int(a)), _mm256_set1_epi32(int(a))}; }
HVD_QUANT_INLINE U ramp() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
HVD_QUANT_INLINE U add(U x, U y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
HVD_QUANT_INLINE U sub(U x, U y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
HVD_QUANT_INLINE U mul(U x, U y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
HVD_QUANT_INLINE U both(U x, U y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
HVD_QUANT_INLINE U either(U x, U y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
HVD_QUANT_INLINE U unlike(U x, U y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
HVD_QUANT_INLINE U shl(U x, int n) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
HVD_QUANT_INLINE U shr(U x, int n) { return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)}; }
HVD_QUANT_INLINE U as_int(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
HVD_QUANT_INLINE F as_float(U x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
HVD_QUANT_INLINE M positive(U x) {
  const __m256i zero = _mm256_setzero_si256();
  const F r = as_float({_mm256_cmpgt_epi32(x.a, zero), _mm256_cmpgt_epi32(x.b, zero)});
  return {r.a, r.b};
}
HVD_QUANT_INLINE U select(M m, U x, U y) { return as_int(select(m, as_float(x), as_float(y))); }
HVD_QUANT_INLINE U to_int(F x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }
HVD_QUANT_INLINE F to_float(U x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
HVD_QUANT_INLINE void to_bytes(U x, uint8_t* p) {
  const __m256i pairs = _mm256_packus_epi32(x.a, x.b);  // each half by itself: 0-3, 8-11 and 4-7, 12-15
  const __m256i order = _mm256_permute4x64_epi64(pairs, 0xD8);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(order), _mm256_extracti128_si256(order, 1)));
}
HVD_QUANT_INLINE U from_bytes(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
          _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
HVD_QUANT_INLINE F pick(F table, U index) {
  const U upper = shl(index, 28);  // the fourth bit as a sign, which blends look at
  return {_mm256_blendv_ps(_mm256_permutevar8x32_ps(table.a, index.a), _mm256_permutevar8x32_ps(table.b, index.a),
                           _mm256_castsi256_ps(upper.a)),
          _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.a, index.b), _mm256_permutevar8x32_ps(table.b, index.b),
                           _mm256_castsi256_ps(upper.b))};
}
HVD_QUANT_INLINE U lookup(const void* table, U x) {
  return {_mm256_i32gather_epi32((const int*)table, x.a, 4), _mm256_i32gather_epi32((const int*)table, x.b, 4)};
}
HVD_QUANT_INLINE void store(double* p, D x) {
  _mm256_storeu_pd(p, x.a), _mm256_storeu_pd(p + 4, x.b), _mm256_storeu_pd(p + 8, x.c), _mm256_storeu_pd(p + 12, x.d);
}
HVD_QUANT_INLINE D add(D x, D y) {
  return {_mm256_add_pd(x.a, y.a), _mm256_add_pd(x.b, y.b), _mm256_add_pd(x.c, y.c), _mm256_add_pd(x.d, y.d)};
}
HVD_QUANT_INLINE D mul(D x, D y) {
  return {_mm256_mul_pd(x.a, y.a), _mm256_mul_pd(x.b, y.b), _mm256_mul_pd(x.c, y.c), _mm256_mul_pd(x.d, y.d)};
}
HVD_QUANT_INLINE D to_double(F x) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(x.a)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1)),
          _mm256_cvtps_pd(_mm256_castps256_ps128(x.b)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1))};
}

}  // namespace avx2

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

// ------------------------------------------------------------------------------------------------------------ avx512

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,bmi,bmi2,popcnt"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,bmi,bmi2,popcnt")
#endif

namespace avx512 {

typedef uint32_t u32x16 __attribute__((vector_size(64)));

struct F { __m512 x; };
struct D { __m512d a, b; };
struct M { __mmask16 m; };
struct U { __m512i x; };

HVD_QUANT_INLINE F set(float a) { return {_mm512_set1_ps(a)}; }
HVD_QUANT_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
HVD_QUANT_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.x); }
HVD_QUANT_INLINE void stream(float* p, F a) { _mm512_stream_ps(p, a.x); }
HVD_QUANT_INLINE void fence() { _mm_sfence(); }
HVD_QUANT_INLINE F add(F a, F b) { return {_mm512_add_ps(a.x, b.x)}; }
HVD_QUANT_INLINE F sub(F a, F b) { return {_mm512_sub_ps(a.x, b.x)}; }
HVD_QUANT_INLINE F mul(F a, F b) { return {_mm512_mul_ps(a.x, b.x)}; }
HVD_QUANT_INLINE M ge(F a, F b) { return {_mm512_cmp_ps_mask(a.x, b.x, _CMP_GE_OQ)}; }
HVD_QUANT_INLINE M gt(F a, F b) { return {_mm512_cmp_ps_mask(a.x, b.x, _CMP_GT_OQ)}; }
HVD_QUANT_INLINE M both(M a, M b) { return {(__mmask16)(a.m & b.m)}; }
HVD_QUANT_INLINE M either(M a, M b) { return {(__mmask16)(a.m | b.m)}; }
HVD_QUANT_INLINE M finite(F a) { return {(__mmask16)~_mm512_fpclass_ps_mask(a.x, 0x99)}; }
HVD_QUANT_INLINE F select(M m, F a, F b) { return {_mm512_mask_blend_ps(m.m, b.x, a.x)}; }
HVD_QUANT_INLINE F add_where(M m, F a, F b) { return {_mm512_mask_add_ps(a.x, m.m, a.x, b.x)}; }
HVD_QUANT_INLINE unsigned bits(M m) { return m.m; }
HVD_QUANT_INLINE M mask(unsigned b) { return {(__mmask16)b}; }
HVD_QUANT_INLINE void to_half(F a, uint16_t* p) {
  _mm256_storeu_si256((__m256i*)p, _mm512_maskz_cvtps_ph(0xffff, a.x, _MM_FROUND_TO_NEAREST_INT));
}
HVD_QUANT_INLINE F from_half(const uint16_t* p) {  // maskz: GCC warns of the undefined register in the plain form
  return {_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p))};
}
HVD_QUANT_INLINE F lower(F a, F b) { return {_mm512_maskz_min_ps(0xffff, a.x, b.x)}; }
HVD_QUANT_INLINE F higher(F a, F b) { return {_mm512_maskz_max_ps(0xffff, a.x, b.x)}; }
HVD_QUANT_INLINE U set_int(uint32_t a) { return {_mm512_set1_epi32(int(a))}; }
HVD_QUANT_INLINE U ramp() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
HVD_QUANT_INLINE U add(U a, U b) { return {_mm512_add_epi32(a.x, b.x)}; }
HVD_QUANT_INLINE U sub(U a, U b) { return {_mm512_sub_epi32(a.x, b.x)}; }
HVD_QUANT_INLINE U mul(U a, U b) { return {_mm512_mullo_epi32(a.x, b.x)}; }
HVD_QUANT_INLINE U both(U a, U b) { return {_mm512_and_si512(a.x, b.x)}; }
HVD_QUANT_INLINE U either(U a, U b) { return {_mm512_or_si512(a.x, b.x)}; }
HVD_QUANT_INLINE U unlike(U a, U b) { return {_mm512_xor_si512(a.x, b.x)}; }
HVD_QUANT_INLINE U shl(U a, int n) { return {(__m512i)((u32x16)a.x << n)}; }  // the intrinsic wants a literal number
HVD_QUANT_INLINE U shr(U a, int n) { return {(__m512i)((u32x16)a.x >> n)}; }
HVD_QUANT_INLINE M positive(U a) { return {_mm512_cmpgt_epi32_mask(a.x, _mm512_setzero_si512())}; }
HVD_QUANT_INLINE U select(M m, U a, U b) { return {_mm512_mask_blend_epi32(m.m, b.x, a.x)}; }
HVD_QUANT_INLINE U as_int(F a) { return {_mm512_castps_si512(a.x)}; }
HVD_QUANT_INLINE F as_float(U a) { return {_mm512_castsi512_ps(a.x)}; }
HVD_QUANT_INLINE U to_int(F a) { return {_mm512_maskz_cvttps_epi32(0xffff, a.x)}; }
HVD_QUANT_INLINE F to_float(U a) { return {_mm512_maskz_cvtepi32_ps(0xffff, a.x)}; }
HVD_QUANT_INLINE void to_bytes(U a, uint8_t* p) {
  _mm_storeu_si128((__m128i*)p, _mm512_maskz_cvtepi32_epi8(0xffff, a.x));
}
HVD_QUANT_INLINE U from_bytes(const uint8_t* p) {
  return {_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)p))};
}
HVD_QUANT_INLINE F pick(F table, U index) { return {_mm512_maskz_permutexvar_ps(0xffff, index.x, table.x)}; }
HVD_QUANT_INLINE U lookup(const void* table, U index) {
  return {_mm512_mask_i32gather_epi32(_mm512_setzero_si512(), 0xffff, index.x, (const int*)table, 4)};
}
HVD_QUANT_INLINE void store(double* p, D x) { _mm512_storeu_pd(p, x.a), _mm512_storeu_pd(p + 8, x.b); }
HVD_QUANT_INLINE D add(D x, D y) { return {_mm512_add_pd(x.a, y.a), _mm512_add_pd(x.b, y.b)}; }
HVD_QUANT_INLINE D mul(D x, D y) { return {_mm512_mul_pd(x.a, y.a), _mm512_mul_pd(x.b, y.b)}; }
HVD_QUANT_INLINE D to_double(F x) {
  return {_mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, x.x, 0)),
          _mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, x.x, 1))};
}

}  // namespace avx512

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // HVD_QUANT_X86
// clang-format on

}  // namespace hvd_quant
