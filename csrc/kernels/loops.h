// The hot loops, written once against simd.h. levels.h includes this file inside the namespace of each level, under that
// level's target options; hence no include guard, no std:: function and no template here.

// The first n (1 to 16) floats at p, the others 0.
HVD_QUANT_INLINE F load_part(const float* p, int n) {
  float x[16] = {};
  for (int i = 0; i < n; ++i) x[i] = p[i];
  return load(x);
}

HVD_QUANT_INLINE void store_part(float* p, F a, int n) {
  float x[16];
  store(x, a);
  for (int i = 0; i < n; ++i) p[i] = x[i];
}

// The sum of the lanes, by halves: a fixed order.
HVD_QUANT_INLINE float sum(F a) {
  float x[16];
  store(x, a);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  return x[0];
}

// v = g + e, or e where that is not finite; `ok` loses those lanes.
HVD_QUANT_INLINE F accumulate(F g, F e, M* ok) {
  const F v = add(g, e);
  const M good = finite(v);
  *ok = both(*ok, good);
  return select(good, v, e);
}

// Memory is asked for what comes kAhead entries later: the processor's own prefetch stops at each page.
constexpr int kAhead = 512;
HVD_QUANT_INLINE void prefetch(const float* p) { __builtin_prefetch(p, 0, 3); }

HVD_QUANT_INLINE uint32_t load_u32(const uint8_t* p) {
  uint32_t x;
  __builtin_memcpy(&x, p, 4);
  return x;
}

// ----------------------------------------------------------------------------------------------------------- checksum

// sum of word[j] * (2 j + 1) over n 32-bit words. In runs, so that a weight fits in 32 bits and a product in 64.
static uint64_t weigh(const uint8_t* p, int64_t n) {
  uint64_t total = 0;
  for (int64_t begin = 0; begin < n; begin += 4096) {
    const uint8_t* run = p + 4 * begin;
    const int64_t words = n - begin < 4096 ? n - begin : 4096;
    uint64_t plain_sum = 0, weighted = 0;
    for (int64_t i = 0; i < words; ++i) {  // an int could wrap around under -fwrapv, and wouldn't be vectorised
      const uint64_t word = load_u32(run + 4 * i);
      plain_sum += word;
      weighted += word * uint32_t(i);
    }
    total += 2 * weighted + uint64_t(2 * begin + 1) * plain_sum;
  }
  return total;
}

// ------------------------------------------------------------------------------------------------------------- onebit

// One vector of v into the sums of its block; returns its sign bits.
HVD_QUANT_INLINE unsigned onebit_signs(F x, F* up_sum, F* down_sum, unsigned* nonzero, const bool zeros) {
  const F zero = set(0);
  const M up = zeros ? gt(x, zero) : ge(x, zero), down = gt(zero, x);
  *up_sum = add_where(up, *up_sum, x);
  *down_sum = add_where(down, *down_sum, x);
  if (zeros) *nonzero = bits(either(up, down));
  return bits(up);
}

HVD_QUANT_INLINE F onebit_rest(F x, F up, F down, const bool zeros) {
  const F zero = set(0);
  return sub(x, zeros ? select(gt(x, zero), up, select(gt(zero, x), down, zero)) : select(ge(x, zero), up, down));
}

// One block: v = g + e into `v`, sign bits (and non-zero bits), two levels, then e = v - level. False if not all finite.
// `mirrored` levels are the mean magnitude and its negative.
HVD_QUANT_INLINE bool onebit_block(const float* g, const float* e, float* v, int64_t n, bool mirrored, float* levels,
                                   uint8_t* signs, uint8_t* nonzeros, const bool residual, const bool zeros) {
  const F zero = set(0);
  M ok = mask(0xffff);
  F up_total = zero, down_total = zero;
  int64_t ups = 0, downs = 0;
  // Partial sums of 512 entries keep the rounding error of a large block small.
  for (int64_t begin = 0; begin < n; begin += 512) {
    const int64_t end = n - begin < 512 ? n : begin + 512;
    F up_sum = zero, down_sum = zero;
    int64_t at = begin;
    for (; at + 64 <= end; at += 64) {
      uint64_t s = 0, z = ~uint64_t{0};
      unsigned nonzero = 0xffff;
      if (zeros) z = 0;
      for (int i = 0; i < 64; i += 16) {
        prefetch(g + at + i + kAhead);
        if (residual) prefetch(e + at + i + kAhead);
        const F x = accumulate(load(g + at + i), residual ? load(e + at + i) : zero, &ok);
        store(v + at + i, x);
        s |= uint64_t(onebit_signs(x, &up_sum, &down_sum, &nonzero, zeros)) << i;
        if (zeros) z |= uint64_t(nonzero) << i;
      }
      __builtin_memcpy(signs + at / 8, &s, 8);
      if (zeros) __builtin_memcpy(nonzeros + at / 8, &z, 8);
      ups += __builtin_popcountll(s);
      downs += __builtin_popcountll(z) - __builtin_popcountll(s);
    }
    for (; at < end; at += 16) {
      const int lanes = end - at < 16 ? int(end - at) : 16;
      const unsigned real = (1u << lanes) - 1;
      unsigned nonzero = real;
      const F x = accumulate(load_part(g + at, lanes), residual ? load_part(e + at, lanes) : zero, &ok);
      store_part(v + at, x, lanes);
      const unsigned s = onebit_signs(x, &up_sum, &down_sum, &nonzero, zeros) & real;
      __builtin_memcpy(signs + at / 8, &s, lanes > 8 ? 2 : 1);
      if (zeros) __builtin_memcpy(nonzeros + at / 8, &nonzero, lanes > 8 ? 2 : 1);
      ups += __builtin_popcount(s);
      downs += __builtin_popcount(nonzero) - __builtin_popcount(s);
    }
    up_total = add(up_total, up_sum);
    down_total = add(down_total, down_sum);
  }
  float up = sum(up_total), down = sum(down_total);
  if (mirrored) {
    up = (up - down) / float(ups + downs ? ups + downs : 1);
    down = -up;
  } else {
    up /= float(ups ? ups : 1);
    down /= float(downs ? downs : 1);
  }
  bool fine = bits(ok) == 0xffff;
  if (!(up - up == 0 && down - down == 0)) {
    up = down = 0;
    fine = false;
  }
  levels[0] = up;
  levels[1] = down;
  if (!residual) return fine;
  const F up_level = set(up), down_level = set(down);
  int64_t at = 0;
  for (; at + 16 <= n; at += 16) {
    const int64_t ahead = n + (at < 2048 ? at : 0);  // the next block's start: memory would idle otherwise
    prefetch(g + ahead);
    prefetch(e + ahead);
    store(v + at, onebit_rest(load(v + at), up_level, down_level, zeros));
  }
  if (at < n) store_part(v + at, onebit_rest(load_part(v + at, int(n - at)), up_level, down_level, zeros), int(n - at));
  return fine;
}

// The blocks [first, last) of a tensor. `scratch` holds one block and stands in for a missing residual.
static bool onebit_encode_blocks(const float* g, float* e, float* scratch, int64_t numel, int64_t block_size, bool zeros,
                                 bool mirrored, int64_t first, int64_t last, uint8_t* levels, uint8_t* signs,
                                 uint8_t* nonzeros) {
  const int size = mirrored ? 4 : 8;
  bool fine = true;
  for (int64_t b = first; b < last; ++b) {
    const int64_t at = b * block_size, n = numel - at < block_size ? numel - at : block_size;
    float pair[2];
    uint8_t *s = signs + at / 8, *z = nonzeros + at / 8;
    if (e && zeros) fine &= onebit_block(g + at, e + at, e + at, n, mirrored, pair, s, z, true, true);
    else if (e) fine &= onebit_block(g + at, e + at, e + at, n, mirrored, pair, s, z, true, false);
    else if (zeros) fine &= onebit_block(g + at, nullptr, scratch, n, mirrored, pair, s, z, false, true);
    else fine &= onebit_block(g + at, nullptr, scratch, n, mirrored, pair, s, z, false, false);
    __builtin_memcpy(levels + size * b, pair, size_t(size));
  }
  return fine;
}

// `scale` times the sum of the blocks [first, last) of n payloads, 64 entries at a time in registers.
HVD_QUANT_INLINE void onebit_decode(const OnebitView* payloads, int n, int64_t numel, int64_t block_size, bool mirrored,
                                    int64_t first, int64_t last, float scale, float* out, const bool zeros,
                                    const bool streamed) {
  const F zero = set(0), factor = set(scale);
  for (int64_t b = first; b < last; ++b) {
    const int64_t begin = b * block_size, end = numel - begin < block_size ? numel : begin + block_size;
    for (int64_t at = begin; at < end; at += 64) {
      const int64_t left = end - at;
      F x[4] = {zero, zero, zero, zero};
      for (int p = 0; p < n; ++p) {
        float pair[2];
        if (mirrored) {
          __builtin_memcpy(pair, payloads[p].levels + 4 * b, 4);
          pair[1] = -pair[0];
        } else {
          __builtin_memcpy(pair, payloads[p].levels + 8 * b, 8);
        }
        const F up = set(pair[0]), down = set(pair[1]);
        uint64_t s = 0, z = 0;
        if (left >= 64) {
          __builtin_memcpy(&s, payloads[p].signs + at / 8, 8);
          if (zeros) __builtin_memcpy(&z, payloads[p].nonzeros + at / 8, 8);
        } else {
          for (int i = 0; i < (left + 7) / 8; ++i) {
            s |= uint64_t(payloads[p].signs[at / 8 + i]) << (8 * i);
            if (zeros) z |= uint64_t(payloads[p].nonzeros[at / 8 + i]) << (8 * i);
          }
        }
        for (int i = 0; i < 4; ++i) {
          const F value = select(mask(unsigned(s >> (16 * i) & 0xffff)), up, down);
          x[i] = add(x[i], zeros ? select(mask(unsigned(z >> (16 * i) & 0xffff)), value, zero) : value);
        }
      }
      for (int i = 0; i < 4; ++i) {
        x[i] = mul(x[i], factor);
        const int64_t rest = left - 16 * i;
        if (rest >= 16) {
          if (streamed) stream(out + at + 16 * i, x[i]);
          else store(out + at + 16 * i, x[i]);
        } else if (rest > 0) {
          store_part(out + at + 16 * i, x[i], int(rest));
        }
      }
    }
  }
  if (streamed) fence();
}

static void onebit_decode_blocks(const OnebitView* payloads, int n, int64_t numel, int64_t block_size, bool zeros,
                                 bool mirrored, int64_t first, int64_t last, float scale, float* out, bool streamed) {
  if (zeros && streamed) onebit_decode(payloads, n, numel, block_size, mirrored, first, last, scale, out, true, true);
  else if (zeros) onebit_decode(payloads, n, numel, block_size, mirrored, first, last, scale, out, true, false);
  else if (streamed) onebit_decode(payloads, n, numel, block_size, mirrored, first, last, scale, out, false, true);
  else onebit_decode(payloads, n, numel, block_size, mirrored, first, last, scale, out, false, false);
}

// ------------------------------------------------------------------------------------------------------------- sparse

// v = g + e over up to one unit, into `v` if it is kept, and a bit for each v >= hi or v <= lo; the candidates in all and in
// the fullest block. False if not all is finite.
HVD_QUANT_INLINE bool scan(const float* g, const float* e, float* v, int n, float hi, float lo, uint64_t* words, int* total,
                           int* most, const bool residual, const bool keep) {
  const F zero = set(0), high = set(hi), low = set(lo);
  M ok = mask(0xffff);
  *total = *most = 0;
  for (int block = 0; block < n; block += 256) {
    const int end = n - block < 256 ? n : block + 256;
    int count = 0;
    int at = block;
    for (; at + 64 <= end; at += 64) {
      uint64_t word = 0;
      for (int i = 0; i < 64; i += 16) {
        prefetch(g + at + i + kAhead);
        if (residual) prefetch(e + at + i + kAhead);
        const F x = accumulate(load(g + at + i), residual ? load(e + at + i) : zero, &ok);
        if (keep) store(v + at + i, x);
        word |= uint64_t(bits(either(ge(x, high), ge(low, x)))) << i;
      }
      words[at / 64] = word;
      count += __builtin_popcountll(word);
    }
    if (at < end) {
      uint64_t word = 0;
      for (int i = 0; at + i < end; i += 16) {
        const int lanes = end - at - i < 16 ? end - at - i : 16;
        const F x = accumulate(load_part(g + at + i, lanes), residual ? load_part(e + at + i, lanes) : zero, &ok);
        if (keep) store_part(v + at + i, x, lanes);
        word |= uint64_t(bits(either(ge(x, high), ge(low, x))) & ((1u << lanes) - 1)) << i;
      }
      words[at / 64] = word;
      count += __builtin_popcountll(word);
    }
    *total += count;
    *most = count > *most ? count : *most;
  }
  for (int w = (n + 63) / 64; w < 256; ++w) words[w] = 0;
  return bits(ok) == 0xffff;
}

static bool scan_unit(const float* g, float* e, int n, float hi, float lo, uint64_t* words, int* total, int* most) {
  return e ? scan(g, e, e, n, hi, lo, words, total, most, true, true)
           : scan(g, nullptr, nullptr, n, hi, lo, words, total, most, false, false);
}

// The places in a unit of the set bits, in ascending order, and how many each block has. Returns how many there are.
// `places` has room for 2 more than it gets. Meanwhile memory fetches what is scanned next: it would idle otherwise.
static int list_unit(const uint64_t* words, int blocks, uint8_t* counts, uint16_t* places, const float* next_g,
                     const float* next_e) {
  int k = 0;
  for (int b = 0; b < blocks; ++b) {
    prefetch(next_g + 32 * b);
    prefetch(next_e + 32 * b);
    prefetch(next_g + 32 * b + 16);
    prefetch(next_e + 32 * b + 16);
    const int before = k;
    for (int w = 4 * b; w < 4 * b + 4; ++w) {
      uint64_t word = words[w];
      const int count = __builtin_popcountll(word);
      const uint64_t stop = uint64_t{1} << 63;
      // Most words have few bits, and a branch on how many would be mispredicted.
      places[k] = uint16_t(64 * w + __builtin_ctzll(word | stop));
      word &= word - 1;
      places[k + 1] = uint16_t(64 * w + __builtin_ctzll(word | stop));
      if (__builtin_expect(count > 2, 0)) {
        word &= word - 1;
        for (int i = 2; i < count; ++i, word &= word - 1) places[k + i] = uint16_t(64 * w + __builtin_ctzll(word));
      }
      k += count;
    }
    counts[b] = uint8_t(k - before);
  }
  return k;
}

// The k entries of v at `places`: their positions in their blocks and their values, filled up with zeros to a multiple of 16.
static void gather(const float* v, const uint16_t* places, int k, uint8_t* positions, float* values) {
  for (int i = 0; i < k; ++i) positions[i] = uint8_t(places[i]);
  for (int i = 0; i < k; ++i) values[i] = v[places[i]];
  for (; k % 16; ++k) values[k] = 0;
}

static void scatter(const float* values, const uint16_t* places, int k, float* v) {
  for (int i = 0; i < k; ++i) v[places[i]] = values[i];
}

// The means of the positive and of the negative values, which end with zeros as gather() leaves them.
static void signed_means(const float* values, int k, float* up, float* down) {
  const F zero = set(0);
  F up_total = zero, down_total = zero;
  int ups = 0, downs = 0;
  for (int begin = 0; begin < k; begin += 512) {
    F up_sum = zero, down_sum = zero;
    for (int i = begin; i < k && i < begin + 512; i += 16) {
      const F x = load(values + i);
      const M positive = gt(x, zero), negative = gt(zero, x);
      up_sum = add_where(positive, up_sum, x);
      down_sum = add_where(negative, down_sum, x);
      ups += __builtin_popcount(bits(positive));
      downs += __builtin_popcount(bits(negative));
    }
    up_total = add(up_total, up_sum);
    down_total = add(down_total, down_sum);
  }
  *up = sum(up_total) / float(ups ? ups : 1);
  *down = sum(down_total) / float(downs ? downs : 1);
}

// The sign bits of values, 16 at a time; what their levels leave of them replaces them.
static void split_signs(float* values, int k, float up, float down, uint8_t* signs) {
  const F zero = set(0), up_level = set(up), down_level = set(down);
  for (int i = 0; i < k; i += 16) {
    const F x = load(values + i);
    const M positive = gt(x, zero);
    const uint16_t b = uint16_t(bits(positive));
    __builtin_memcpy(signs + i / 8, &b, 2);
    store(values + i, sub(x, select(positive, up_level, down_level)));
  }
}

// The sums of the magnitudes of values, which end with zeros as gather() leaves them: of those up to `middle` and of those beyond,
// of which it returns how many there are. In double precision, so that the mean of a constant is that constant, and hardly any
// mean depends on the order of sums.
static int magnitudes(const float* values, int k, float middle, double* within, double* beyond) {
  double lower[16] = {}, upper[16] = {};
  int count = 0;
  for (int i = 0; i < k; i += 16)
    for (int j = 0; j < 16; ++j) {
      const float a = __builtin_fabsf(values[i + j]);
      const bool above = a > middle;
      lower[j] += above ? 0.0 : double(a);
      upper[j] += above ? double(a) : 0.0;
      count += above;
    }
  for (int width = 8; width; width /= 2)
    for (int j = 0; j < width; ++j) {
      lower[j] += lower[j + width];
      upper[j] += upper[j + width];
    }
  *within = lower[0];
  *beyond = upper[0];
  return count;
}

// Like split_signs, with a level for magnitudes up to `middle` and one for those beyond, and bits that tell these apart.
static void split_magnitudes(float* values, int k, float middle, float lower, float upper, uint8_t* signs, uint8_t* beyond) {
  const F zero = set(0), mid = set(middle), low = set(lower), high = set(upper);
  for (int i = 0; i < k; i += 16) {
    const F x = load(values + i), mirrored = sub(zero, x);
    const M positive = gt(x, zero), above = gt(select(positive, x, mirrored), mid);
    const uint16_t b[2] = {uint16_t(bits(positive)), uint16_t(bits(above))};
    __builtin_memcpy(signs + i / 8, b, 2);
    __builtin_memcpy(beyond + i / 8, b + 1, 2);
    const F level = select(above, high, low);
    store(values + i, select(positive, sub(x, level), add(x, level)));
  }
}

// The inverse of list_unit: places from counts and positions. `places` has room for 16 more than it gets.
static int place_unit(const uint8_t* counts, int blocks, const uint8_t* positions, uint16_t* places) {
  int k = 0;
  for (int b = 0; b < blocks; ++b) {  // no branch on a count of up to 16: it would be mispredicted most of the time
    const uint16_t base = uint16_t(256 * b);
    for (int i = 0; i < 16; ++i) places[k + i] = base;
    for (int i = 16; i < counts[b]; ++i) places[k + i] = base;
    k += counts[b];
  }
  for (int i = 0; i < k; ++i) places[i] = uint16_t(places[i] + positions[i]);
  return k;
}

static bool ascending(const uint16_t* places, int k) {
  int bad = 0;
  for (int i = 1; i < k; ++i) bad |= places[i] <= places[i - 1];
  return !bad;
}

// n floats, times `scale`, from `tile` to `out`, leaving zeros in the tile. With `streamed` they bypass the caches.
static void move_tile(float* tile, float scale, float* out, int n, bool streamed) {
  const F zero = set(0), factor = set(scale);
  int i = 0;
  if (streamed) {
    for (; i < n && (uintptr_t(out + i) & 63); ++i) {
      out[i] = tile[i] * scale;
      tile[i] = 0;
    }
    for (; i + 16 <= n; i += 16) {
      stream(out + i, mul(load(tile + i), factor));
      store(tile + i, zero);
    }
    fence();
  }
  for (; i + 16 <= n; i += 16) {
    store(out + i, mul(load(tile + i), factor));
    store(tile + i, zero);
  }
  for (; i < n; ++i) {
    out[i] = tile[i] * scale;
    tile[i] = 0;
  }
}

// --------------------------------------------------------------------------------------------------------------- fp16

// n floats to fp16, clamped to the largest finite values; what that leaves of them replaces them. In steps of 16: both
// arrays must have room for n rounded up.
static void halve(float* x, int n, uint16_t* out) {
  const F largest = set(65504.0f), smallest = set(-65504.0f);
  for (int i = 0; i < n; i += 16) {
    const F a = load(x + i);
    to_half(select(gt(a, largest), largest, select(gt(smallest, a), smallest, a)), out + i);
    store(x + i, sub(a, from_half(out + i)));
  }
}

static void widen(const uint16_t* x, int n, float* out) {
  for (int i = 0; i < n; i += 16) store(out + i, from_half(x + i));
}

// ----------------------------------------------------------------------------------------------- none, fp16 and bf16

// The values of `a`, which the type can hold, at `out`: the first `lanes` (1 to 16).
HVD_QUANT_INLINE void to_cast(F a, uint8_t* out, int lanes, const Cast type) {
  uint16_t half[16];
  float x[16];
  store(x, a);
  if (type == Cast::float32) {
    __builtin_memcpy(out, x, 4 * size_t(lanes));
    return;
  }
  if (type == Cast::float16) {
    to_half(a, half);
  } else {
    uint32_t u[16];
    __builtin_memcpy(u, x, 64);
    for (int i = 0; i < 16; ++i) half[i] = uint16_t((u[i] + 0x7fff + (u[i] >> 16 & 1)) >> 16);
  }
  __builtin_memcpy(out, half, 2 * size_t(lanes));
}

// n floats as another type, rounded to nearest even; what is not finite becomes 0, and what would round to infinity the
// largest finite value. False if there was any of these.
HVD_QUANT_INLINE bool cast_all(const float* x, int64_t n, uint8_t* out, const Cast type) {
  const float most = type == Cast::float16 ? 65504.0f : 0x1.fep127f;
  const float beyond = type == Cast::float16 ? 65520.0f : 0x1.ffp127f;
  const F zero = set(0), largest = set(most), smallest = set(-most), up = set(beyond), down = set(-beyond);
  const int64_t size = type == Cast::float32 ? 4 : 2;
  M ok = mask(0xffff), over = mask(0);
  for (int64_t i = 0; i < n; i += 16) {
    const int lanes = n - i < 16 ? int(n - i) : 16;
    prefetch(x + i + kAhead);
    F a = lanes == 16 ? load(x + i) : load_part(x + i, lanes);
    const M good = finite(a);
    a = select(good, a, zero);
    ok = both(ok, good);
    if (type != Cast::float32) {
      over = either(over, either(ge(a, up), ge(down, a)));
      a = select(gt(a, largest), largest, select(gt(smallest, a), smallest, a));
    }
    if (lanes == 16) to_cast(a, out + size * i, 16, type);
    else to_cast(a, out + size * i, lanes, type);
  }
  return bits(ok) == 0xffff && !bits(over);
}

static bool cast(Cast type, const float* x, int64_t n, uint8_t* out) {
  return type == Cast::float32   ? cast_all(x, n, out, Cast::float32)
         : type == Cast::float16 ? cast_all(x, n, out, Cast::float16)
                                 : cast_all(x, n, out, Cast::bfloat16);
}

// The first `lanes` (1 to 16) values at p, the others 0.
HVD_QUANT_INLINE F from_cast(const uint8_t* p, int lanes, const Cast type) {
  float x[16] = {};
  if (type == Cast::float32) {
    __builtin_memcpy(x, p, 4 * size_t(lanes));
    return load(x);
  }
  uint16_t half[16] = {};
  __builtin_memcpy(half, p, 2 * size_t(lanes));
  if (type == Cast::float16) return from_half(half);
  for (int i = 0; i < 16; ++i) {
    const uint32_t u = uint32_t(half[i]) << 16;
    __builtin_memcpy(x + i, &u, 4);
  }
  return load(x);
}

// `scale` times the sum of the entries [first, last) of n bodies.
HVD_QUANT_INLINE void add_casts(const uint8_t* const* bodies, int n, int64_t first, int64_t last, float scale, float* out,
                                bool streamed, const Cast type) {
  const F zero = set(0), factor = set(scale);
  const int64_t size = type == Cast::float32 ? 4 : 2;
  int64_t at = first;
  for (; at + 16 <= last; at += 16) {
    F x = zero;
    for (int p = 0; p < n; ++p) {
      __builtin_prefetch(bodies[p] + size * (at + kAhead), 0, 3);
      x = add(x, from_cast(bodies[p] + size * at, 16, type));
    }
    if (streamed) stream(out + at, mul(x, factor));
    else store(out + at, mul(x, factor));
  }
  if (at < last) {
    F x = zero;
    for (int p = 0; p < n; ++p) x = add(x, from_cast(bodies[p] + size * at, int(last - at), type));
    store_part(out + at, mul(x, factor), int(last - at));
  }
  if (streamed) fence();
}

static void cast_sum(Cast type, const uint8_t* const* bodies, int n, int64_t first, int64_t last, float scale, float* out,
                     bool streamed) {
  if (type == Cast::float32) add_casts(bodies, n, first, last, scale, out, streamed, Cast::float32);
  else if (type == Cast::float16) add_casts(bodies, n, first, last, scale, out, streamed, Cast::float16);
  else add_casts(bodies, n, first, last, scale, out, streamed, Cast::bfloat16);
}

// ----------------------------------------------------------------------- qsgd, terngrad, natural, blockwise8: fields

// Sixteen of a tensor's random numbers, for the entries from `at` of a range on: a hash of the entry's place with one key
// before the first round and one after it, so that streams of other keys are no shifted copies.
HVD_QUANT_INLINE U noise(const Rounding& r, int64_t at) {
  const uint64_t place = uint64_t(r.first + at);
  U x = unlike(add(ramp(), set_int(uint32_t(place))), set_int(r.key0));
  x = mul(unlike(x, shr(x, 17)), set_int(0xED5AD4BBu));
  x = add(unlike(x, shr(x, 11)), set_int(r.key1 + uint32_t(place >> 32) * 0x9E3779B1u));
  x = mul(x, set_int(0xAC4C1B51u));
  x = mul(unlike(x, shr(x, 15)), set_int(0x31848BABu));
  return unlike(x, shr(x, 14));
}

HVD_QUANT_INLINE F magnitude(F x) { return as_float(both(as_int(x), set_int(0x7FFFFFFF))); }

// The multiple of the scale, of the table or of two, whose inverse is given, that |x| = a is rounded to, without its sign.
HVD_QUANT_INLINE U quantise(F a, F inverse, U random, const Fields& c, const Grid grid, const int width, const bool randomly) {
  const F u = randomly ? mul(to_float(either(shr(random, 8), set_int(1))), set(0x1p-24f)) : set(0.5f);  // in (0, 1)
  const U one = set_int(1);
  if (grid == Grid::natural) {  // what is added to the mantissa carries into the exponent with the right chance
    a = lower(a, set(0x1p64f));
    const U power = sub(shr(add(as_int(a), shr(random, 9)), 23), set_int(64));
    const U smallest = select(gt(mul(a, set(0x1p62f)), u), one, set_int(0));
    return select(ge(a, set(0x1p-62f)), power, smallest);
  }
  if (grid == Grid::dynamic) {
    a = lower(mul(a, inverse), set(1));
    const U cell = sub(shr(as_int(higher(a, set(0x1p-22f))), DynamicCode::kCellBits), set_int(DynamicCode::kFirst));
    const U below = lookup(c.dynamic->below, cell);
    return select(gt(a, as_float(lookup(c.dynamic->marks, below))), add(below, one), below);
  }
  a = lower(mul(a, inverse), set(float((1 << (width - 1)) - 1)));
  const U floor = to_int(a);
  return select(gt(sub(a, to_float(floor)), u), add(floor, one), floor);
}

// The field of a magnitude and a sign, and what it decodes to.
HVD_QUANT_INLINE U field_of(U k, M negative, const Grid grid, const int width) {
  const U zero = set_int(0);
  if (grid == Grid::natural) return select(negative, select(positive(k), either(k, set_int(128)), zero), k);
  if (grid == Grid::dynamic)  // there is no -1
    k = select(negative, sub(k, select(positive(sub(k, set_int(127))), set_int(1), zero)), k);
  return both(select(negative, sub(zero, k), k), set_int((1u << width) - 1));
}

HVD_QUANT_INLINE F value_of(U field, F scale, const Fields& c, const Grid grid, const int width) {
  if (grid == Grid::dynamic) return mul(as_float(lookup(c.dynamic->values, field)), scale);
  if (grid == Grid::linear) {
    const U sign = set_int(1u << (width - 1));
    return mul(to_float(sub(unlike(field, sign), sign)), scale);
  }
  const U k = both(field, set_int(127)), power = shl(add(k, set_int(64)), 23);
  return as_float(either(select(positive(k), power, set_int(0)), shl(both(field, set_int(128)), 24)));
}

HVD_QUANT_INLINE float largest_of(F a) {
  float x[16], most = 0;
  store(x, a);
  for (int i = 0; i < 16; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

// v = g + e into `v`, and its largest magnitude. False if not all is finite.
HVD_QUANT_INLINE bool gather_block(const float* g, const float* e, float* v, int64_t n, float* most, const bool residual) {
  M ok = mask(0xffff);
  F largest = set(0);
  int64_t at = 0;
  for (; at + 16 <= n; at += 16) {
    prefetch(g + at + kAhead);
    if (residual) prefetch(e + at + kAhead);
    const F x = accumulate(load(g + at), residual ? load(e + at) : set(0), &ok);
    store(v + at, x);
    largest = higher(largest, magnitude(x));
  }
  if (at < n) {
    const int lanes = int(n - at);
    const F x = accumulate(load_part(g + at, lanes), residual ? load_part(e + at, lanes) : set(0), &ok);
    store_part(v + at, x, lanes);
    largest = higher(largest, magnitude(x));
  }
  *most = largest_of(largest);
  return bits(ok) == 0xffff;
}

HVD_QUANT_INLINE double sum(D a) {
  double x[16];
  store(x, a);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  return x[0];
}

// The sums of n entries of v = g + e and of their squares, and their largest magnitude; what is not finite counts as e.
HVD_QUANT_INLINE void add_moments(const float* g, const float* e, int64_t n, double* total, double* squares, float* most,
                                  const bool residual) {
  const F zero = set(0);
  M ok = mask(0xffff);
  F largest = zero;
  D sums = to_double(zero), square_sums = sums;
  for (int64_t at = 0; at < n; at += 16) {
    F x;
    if (n - at >= 16) {
      prefetch(g + at + kAhead);
      if (residual) prefetch(e + at + kAhead);
      x = accumulate(load(g + at), residual ? load(e + at) : zero, &ok);
    } else {
      x = accumulate(load_part(g + at, int(n - at)), residual ? load_part(e + at, int(n - at)) : zero, &ok);
    }
    largest = higher(largest, magnitude(x));
    const D wide = to_double(x);
    sums = add(sums, wide);
    square_sums = add(square_sums, mul(wide, wide));
  }
  *most = largest_of(largest);
  *total = sum(sums);
  *squares = sum(square_sums);
}

static void moments(const float* g, const float* e, int64_t n, double* total, double* squares, float* most) {
  if (e) add_moments(g, e, n, total, squares, most, true);
  else add_moments(g, nullptr, n, total, squares, most, false);
}

// Fields of 64 entries of v, of which `left` exist, and what they leave of v in `rest` unless that is null. Sixteen bytes
// hold sixteen fields of 8 bits, or of 4 with the sixteen of 32 entries later above them, and so on.
HVD_QUANT_INLINE void group_of_fields(const Fields& c, const Rounding& r, const float* v, float* rest, int64_t at, int64_t left,
                                      F scale, F inverse, uint8_t* out, const Grid grid, const int width, const bool randomly,
                                      const bool full) {
  const int planes = width / 2;
  for (int plane = 0; plane < planes; ++plane) {
    U packed = set_int(0);
    for (int i = plane; i < 4; i += planes) {
      const int lanes = full || left - 16 * i >= 16 ? 16 : left - 16 * i > 0 ? int(left - 16 * i) : 0;
      const F x = full ? load(v + 16 * i) : load_part(v + 16 * i, lanes);
      const U random = randomly ? noise(r, at + 16 * i) : set_int(0);
      const U k = quantise(magnitude(x), inverse, random, c, grid, width, randomly);
      const U field = field_of(k, gt(set(0), x), grid, width);
      packed = either(packed, shl(field, i / planes * width));
      if (!rest) continue;
      const F left_over = sub(x, value_of(field, scale, c, grid, width));
      if (full) store(rest + 16 * i, left_over);
      else store_part(rest + 16 * i, left_over, lanes);
    }
    to_bytes(packed, out + 16 * plane);
  }
}

// The blocks [first, last) of a tensor. `scratch` holds one block and stands in for a missing residual.
HVD_QUANT_INLINE bool encode_fields(const Fields& c, const Rounding& r, const float* g, float* e, float* scratch, int64_t numel,
                                    int64_t first, int64_t last, uint8_t* scales, uint8_t* fields, const Grid grid,
                                    const int width, const bool randomly) {
  bool fine = true;
  for (int64_t b = first; b < last; ++b) {
    const int64_t begin = b * c.block, n = numel - begin < c.block ? numel - begin : c.block;
    float* v = e ? e + begin : scratch;
    float scale;
    fine &= e ? gather_block(g + begin, v, v, n, &scale, true) : gather_block(g + begin, nullptr, v, n, &scale, false);
    if (grid == Grid::natural) fine &= scale <= 0x1p64f;
    if (r.l2) {
      double total, squares;
      float most;
      add_moments(v, nullptr, n, &total, &squares, &most, false);
      scale = float(__builtin_sqrt(squares));
      if (scale - scale != 0) scale = 0, fine = false;
    }
    if (grid == Grid::linear) scale /= float((1 << (width - 1)) - 1);
    if (c.scales == Fields::Scales::one) scale = r.scale;
    float inverse = 1 / scale;
    if (inverse - inverse != 0) scale = inverse = 0;
    if (c.scales == Fields::Scales::blocks) __builtin_memcpy(scales + 4 * b, &scale, 4);
    const F unit = set(scale), factor = set(inverse);
    uint8_t* out = fields + begin / 8 * width;
    int64_t at = 0;
    for (; at + 64 <= n; at += 64, out += 8 * width)
      group_of_fields(c, r, v + at, e ? v + at : nullptr, begin + at, 64, unit, factor, out, grid, width, randomly, true);
    if (at < n)
      group_of_fields(c, r, v + at, e ? v + at : nullptr, begin + at, n - at, unit, factor, out, grid, width, randomly, false);
  }
  return fine;
}

static bool fields_encode_blocks(const Fields& c, const Rounding& r, const float* g, float* e, float* scratch, int64_t numel,
                                 int64_t first, int64_t last, uint8_t* scales, uint8_t* fields) {
  if (c.grid == Grid::natural)
    return encode_fields(c, r, g, e, scratch, numel, first, last, scales, fields, Grid::natural, 8, true);
  if (c.grid == Grid::dynamic)
    return encode_fields(c, r, g, e, scratch, numel, first, last, scales, fields, Grid::dynamic, 8, false);
  if (!r.random) return encode_fields(c, r, g, e, scratch, numel, first, last, scales, fields, Grid::linear, 8, false);
  if (c.bits == 8) return encode_fields(c, r, g, e, scratch, numel, first, last, scales, fields, Grid::linear, 8, true);
  if (c.bits == 4) return encode_fields(c, r, g, e, scratch, numel, first, last, scales, fields, Grid::linear, 4, true);
  return encode_fields(c, r, g, e, scratch, numel, first, last, scales, fields, Grid::linear, 2, true);
}

// `factor` times the sum of the blocks [first, last) of n payloads, 64 entries at a time in registers.
HVD_QUANT_INLINE void decode_fields(const Fields& c, const FieldsView* payloads, int n, int64_t numel, int64_t first,
                                    int64_t last, float factor, float* out, bool streamed, const Grid grid, const int width) {
  const int planes = width / 2;
  float small[16];
  for (int i = 0; i < 16; ++i) {
    const int level = i % (1 << (width < 4 ? width : 4));
    small[i] = float(level < 1 << (width - 1) ? level : level - (1 << width));
  }
  for (int64_t b = first; b < last; ++b) {
    const int64_t begin = b * c.block, end = numel - begin < c.block ? numel : begin + c.block;
    for (int64_t at = begin; at < end; at += 64) {
      F x[4] = {set(0), set(0), set(0), set(0)};
      for (int p = 0; p < n; ++p) {
        float scale = 1;
        if (grid != Grid::natural)
          __builtin_memcpy(&scale, payloads[p].scales + (c.scales == Fields::Scales::blocks ? 4 * b : 0), 4);
        const F unit = set(scale), table = mul(load(small), unit);
        U packed[4];
        for (int i = 0; i < planes; ++i) packed[i] = from_bytes(payloads[p].fields + at / 8 * width + 16 * i);
        for (int i = 0; i < 4; ++i) {
          const U field = shr(packed[i % planes], i / planes * width);
          x[i] = add(x[i], width <= 4 ? pick(table, field) : value_of(field, unit, c, grid, width));
        }
      }
      for (int i = 0; i < 4; ++i) {
        const int64_t rest = end - at - 16 * i;
        x[i] = mul(x[i], set(factor));
        if (rest < 16) {
          if (rest > 0) store_part(out + at + 16 * i, x[i], int(rest));
        } else if (streamed) {
          stream(out + at + 16 * i, x[i]);
        } else {
          store(out + at + 16 * i, x[i]);
        }
      }
    }
  }
  if (streamed) fence();
}

static void fields_decode_blocks(const Fields& c, const FieldsView* payloads, int n, int64_t numel, int64_t first, int64_t last,
                                 float factor, float* out, bool streamed) {
  if (c.grid == Grid::natural) decode_fields(c, payloads, n, numel, first, last, factor, out, streamed, Grid::natural, 8);
  else if (c.grid == Grid::dynamic) decode_fields(c, payloads, n, numel, first, last, factor, out, streamed, Grid::dynamic, 8);
  else if (c.bits == 8) decode_fields(c, payloads, n, numel, first, last, factor, out, streamed, Grid::linear, 8);
  else if (c.bits == 4) decode_fields(c, payloads, n, numel, first, last, factor, out, streamed, Grid::linear, 4);
  else decode_fields(c, payloads, n, numel, first, last, factor, out, streamed, Grid::linear, 2);
}

// Whether none of the fields in n words of 64 bits has its first bit alone, which stands for nothing.
HVD_QUANT_INLINE bool no_first_bit_alone(const uint8_t* p, int64_t n, const int width) {
  const uint64_t ones = ~uint64_t{0} / ((uint64_t{1} << width) - 1), first = ones << (width - 1);
  uint64_t good = ones;
  for (int64_t i = 0; i < n; ++i) {
    uint64_t word;
    __builtin_memcpy(&word, p + 8 * i, 8);
    word ^= first;  // to see in each field's last bit whether any is set
    if (width == 8) word |= word >> 4;
    if (width >= 4) word |= word >> 2;
    good &= word | word >> 1;
  }
  return good == ones;
}

static bool fields_valid(const uint8_t* p, int64_t n, int width) {
  return width == 8 ? no_first_bit_alone(p, n, 8) : width == 4 ? no_first_bit_alone(p, n, 4) : no_first_bit_alone(p, n, 2);
}

// --------------------------------------------------------------------------------------- what the benchmark compares with

static void add_all(const float* a, const float* b, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    prefetch(a + i + kAhead);
    prefetch(b + i + kAhead);
    store(out + i, add(load(a + i), load(b + i)));
  }
  for (; i < n; ++i) out[i] = a[i] + b[i];
}

// The sum of a vector, which takes reading it.
static float read_all(const float* a, int64_t n) {
  F sums[4] = {set(0), set(0), set(0), set(0)};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; ++j) {
      prefetch(a + i + 16 * j + kAhead);
      sums[j] = add(sums[j], load(a + i + 16 * j));
    }
  float total = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  for (; i < n; ++i) total += a[i];
  return total;
}

static void fill(float value, float* out, int64_t n, bool streamed) {
  const F x = set(value);
  int64_t i = 0;
  if (streamed) {
    for (; i < n && (uintptr_t(out + i) & 63); ++i) out[i] = value;
    for (; i + 16 <= n; i += 16) stream(out + i, x);
    fence();
  }
  for (; i + 16 <= n; i += 16) store(out + i, x);
  for (; i < n; ++i) out[i] = value;
}

static constexpr Loops table() {
  return {weigh,
          onebit_encode_blocks,
          onebit_decode_blocks,
          scan_unit,
          list_unit,
          gather,
          scatter,
          signed_means,
          split_signs,
          magnitudes,
          split_magnitudes,
          place_unit,
          ascending,
          move_tile,
          halve,
          widen,
          cast,
          cast_sum,
          fields_encode_blocks,
          fields_decode_blocks,
          fields_valid,
          moments,
          add_all,
          read_all,
          fill};
}
