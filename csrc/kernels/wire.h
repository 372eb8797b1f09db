// The payload header and its checks: hvd_quant/wire.py in C++, with the same sentences.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "levels.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payloads are little-endian and are written as memory holds them"
#endif

namespace hvd_quant {

constexpr int64_t kHeaderBytes = 32;
constexpr uint8_t kWireVersion = 1;
constexpr uint8_t kNonfinite = 1;  // the gradient held a value that was left out
constexpr uint8_t kFailed = 2;     // the worker could not encode; its rank and the reason follow

// hvd_quant.wire.PayloadError
struct PayloadError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A payload as it arrived: any bytes at any address.
struct Bytes {
  const uint8_t* data;
  int64_t size;
};

template <class T>
T load_as(const uint8_t* p) {
  T x;
  std::memcpy(&x, p, sizeof(T));
  return x;
}

template <class T>
void store_as(uint8_t* p, T x) {
  std::memcpy(p, &x, sizeof(T));
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t padded(int64_t nbytes) { return ceil_div(nbytes, 8) * 8; }

// CRC-32 of a compressor's name.
inline uint32_t codec_id(const std::string& name) {
  uint32_t crc = ~0u;
  for (unsigned char c : name) {
    crc ^= c;
    for (int i = 0; i < 8; ++i) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
  }
  return ~crc;
}

// sum of word[j] * (2 j + 1) mod 2^64 over a payload's 32-bit words, the checksum field itself (words 6 and 7) left out.
inline uint64_t checksum(const uint8_t* payload, int64_t nbytes) {
  return loops().weigh(payload, nbytes / 4) - uint64_t{load_as<uint32_t>(payload + 24)} * 13 -
         uint64_t{load_as<uint32_t>(payload + 28)} * 15;
}

inline void write_header(uint8_t* payload, const std::string& codec, int64_t numel, int64_t body_bytes) {
  std::memcpy(payload, "HQ", 2);
  payload[2] = kWireVersion;
  payload[3] = 0;
  store_as(payload + 4, codec_id(codec));
  store_as(payload + 8, numel);
  store_as(payload + 16, body_bytes);
}

// Sets the flags of a payload that is complete otherwise, and its checksum.
inline void seal(uint8_t* payload, int64_t nbytes, bool finite) {
  payload[3] = finite ? 0 : kNonfinite;
  store_as(payload + 24, checksum(payload, nbytes));
}

template <class... Args>
std::string format(const char* text, Args... args) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, text, args...);
  return buffer;
}

// Bytes as UTF-8, what is not UTF-8 replaced as bytes.decode(errors="replace") does: a U+FFFD for each longest start of a
// character that breaks off.
inline std::string valid_utf8(const uint8_t* p, int64_t n) {
  std::string text;
  for (int64_t i = 0; i < n;) {
    const uint8_t c = p[i];
    const int more = c < 0x80 ? 0 : c >= 0xC2 && c < 0xE0 ? 1 : c >= 0xE0 && c < 0xF0 ? 2 : c >= 0xF0 && c < 0xF5 ? 3 : -1;
    int64_t end = i + 1;
    // The second byte excludes overlong forms, surrogates and what lies beyond U+10FFFF.
    uint8_t low = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80, high = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
    while (end - i <= more && end < n && p[end] >= low && p[end] <= high) ++end, low = 0x80, high = 0xBF;
    if (end - i == more + 1) text.append(reinterpret_cast<const char*>(p + i), end - i);
    else text += "\xEF\xBF\xBD";
    i = end;
  }
  return text;
}

inline std::string failure_message(const uint8_t* body, int64_t nbytes) {
  if (nbytes < 8) return "a worker failed to encode its gradient and its reason is damaged";
  const int64_t length = std::min<int64_t>(load_as<uint32_t>(body + 4), nbytes - 8);
  return format("worker %u failed to encode its gradient: ", load_as<uint32_t>(body)) +
         valid_utf8(body + 8, int64_t(strnlen(reinterpret_cast<const char*>(body + 8), size_t(length))));
}

// What a worker that has nothing to send sends instead: its rank and the reason.
inline std::vector<uint8_t> failure(const std::string& codec, int64_t numel, int64_t rank, const std::string& reason) {
  const int64_t length = std::min<int64_t>(int64_t(reason.size()), 4096), body = padded(8 + length);
  std::vector<uint8_t> payload(kHeaderBytes + body);
  write_header(payload.data(), codec, numel, body);
  store_as(payload.data() + kHeaderBytes, uint32_t(rank));
  store_as(payload.data() + kHeaderBytes + 4, uint32_t(length));
  std::memcpy(payload.data() + kHeaderBytes + 8, reason.data(), size_t(length));
  payload[3] = kFailed;
  store_as(payload.data() + 24, checksum(payload.data(), kHeaderBytes + body));
  return payload;
}

// Checks the fields of a payload's header and returns the flags.
inline uint8_t check_header(Bytes payload, const std::string& codec, int64_t numel) {
  const uint8_t* p = payload.data;
  if (payload.size < kHeaderBytes)
    throw PayloadError(format("payload of %lld bytes is shorter than the header of 32", (long long)payload.size));
  if (std::memcmp(p, "HQ", 2) != 0)
    throw PayloadError(format("payload starts with %02x%02x, expected 4851: it is damaged or not a payload", p[0], p[1]));
  if (p[2] != kWireVersion)
    throw PayloadError(
        format("payload has wire version %u, this worker reads %u: "
               "install the same hvd_quant on all workers",
               p[2], kWireVersion));
  if (p[3] & ~(kNonfinite | kFailed)) throw PayloadError(format("payload has unknown flags 0x%02x", p[3]));
  const uint32_t codec_found = load_as<uint32_t>(p + 4);
  if (codec_found != codec_id(codec))
    throw PayloadError(format("payload is of codec 0x%08x, expected 0x%08x (%s): use the same compression on all workers",
                              codec_found, codec_id(codec), codec.c_str()));
  const uint64_t numel_found = load_as<uint64_t>(p + 8), body_found = load_as<uint64_t>(p + 16);
  if (numel_found != uint64_t(numel))
    throw PayloadError(format("payload holds %llu entries, expected %lld", (unsigned long long)numel_found, (long long)numel));
  const int64_t body_held = payload.size - kHeaderBytes;
  if (body_found != uint64_t(body_held) || body_found % 8)
    throw PayloadError(
        format("payload says its body has %llu bytes, it has %lld", (unsigned long long)body_found, (long long)body_held));
  return p[3];
}

// Checks the checksum of a payload whose header has been checked.
inline void check_sum(Bytes payload) {
  const uint64_t expected = load_as<uint64_t>(payload.data + 24), found = checksum(payload.data, payload.size);
  if (found != expected)
    throw PayloadError(format("payload has checksum 0x%016llx, its bytes give 0x%016llx: it is damaged",
                              (unsigned long long)expected, (unsigned long long)found));
}

// Checks a whole payload but for its body's contents and returns the flags. `body_bytes` is what the codec expects, without
// padding, which must be zero.
inline uint8_t check(Bytes payload, const std::string& codec, int64_t numel, int64_t body_bytes) {
  const uint8_t flags = check_header(payload, codec, numel);
  check_sum(payload);
  const uint8_t* p = payload.data;
  const int64_t body_held = payload.size - kHeaderBytes;
  if (flags & kFailed) throw PayloadError(failure_message(p + kHeaderBytes, body_held));
  if (body_held != padded(body_bytes))
    throw PayloadError(
        format("payload has a body of %lld bytes, expected %lld for %lld entries: "
               "use the same compression settings on all workers",
               (long long)body_held, (long long)padded(body_bytes), (long long)numel));
  for (int64_t i = body_bytes; i < body_held; ++i)
    if (p[kHeaderBytes + i]) throw PayloadError("payload is damaged: padding is not zero");
  return flags;
}

// Cuts what an allgather returned into `world` payloads, as their headers tell; evenly where these make no sense, so
// that decoding can say what is wrong with which field.
inline std::vector<Bytes> split(Bytes gathered, int64_t world) {
  std::vector<Bytes> payloads;
  Bytes rest = gathered;
  while (rest.size >= kHeaderBytes && int64_t(payloads.size()) < world) {
    const uint64_t body = load_as<uint64_t>(rest.data + 16);
    if (body > uint64_t(rest.size - kHeaderBytes)) break;
    const int64_t size = kHeaderBytes + int64_t(body);
    payloads.push_back({rest.data, size});
    rest = {rest.data + size, rest.size - size};
  }
  if (int64_t(payloads.size()) == world && rest.size == 0) return payloads;
  if (gathered.size % world || gathered.size < world * kHeaderBytes)
    throw PayloadError(
        format("%lld payloads came as %lld bytes whose headers tell other lengths: a payload is damaged, or "
               "compression settings differ between workers",
               (long long)world, (long long)gathered.size));
  payloads.clear();
  const int64_t size = gathered.size / world;
  for (int64_t i = 0; i < world; ++i) payloads.push_back({gathered.data + i * size, size});
  return payloads;
}

inline void require(bool ok, const char* what) {
  if (!ok) throw PayloadError(std::string("payload is damaged: ") + what);
}

// True if `n` bytes at `p` are zero.
inline bool all_zero(const uint8_t* p, int64_t n) {
  uint8_t any = 0;
  for (int64_t i = 0; i < n; ++i) any |= p[i];
  return !any;
}

// True if none of n values at `p` is infinite or NaN: floats, halves, or what else has its exponent in those bits.
template <class T>
bool all_finite(const uint8_t* p, int64_t n, T exponent = T(sizeof(T) == 4 ? 0x7f800000 : 0x7c00)) {
  bool ok = true;
  for (int64_t i = 0; i < n; ++i) ok &= (load_as<T>(p + i * int64_t(sizeof(T))) & exponent) != exponent;
  return ok;
}

}  // namespace hvd_quant
