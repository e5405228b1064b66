// Loops over arrays of any length in groups of Lanes::width values, the last of which may be short.

#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"

constexpr int64_t W = Lanes::width;

// Calls f(first, count) for groups of W values, and for the remainder.
template <class F>
inline void groups(int64_t columns, F f) {
  int64_t i = 0;
  for (; i + W <= columns; i += W) f(i, W);
  if (i < columns) f(i, columns - i);
}

// The first `count` values, and zeros after them.
inline Lanes load(const float* p, int64_t count) {
  if (count == W) return Lanes::load(p);
  float padded[W] = {};
  std::memcpy(padded, p, count * sizeof(float));
  return Lanes::load(padded);
}

inline void store(Lanes x, float* p, int64_t count) {
  if (count == W) return x.store(p);
  float padded[W];
  x.store(padded);
  std::memcpy(p, padded, count * sizeof(float));
}

inline uint32_t first(int64_t count) { return (1u << count) - 1; }

inline void put(uint32_t mask, uint8_t* bits, int64_t i, int64_t count) {
  for (int64_t byte = 0; byte < (count + 7) / 8; ++byte)
    bits[i / 8 + byte] = static_cast<uint8_t>(mask >> 8 * byte);
}

inline uint32_t get(const uint8_t* bits, int64_t i, int64_t count) {
  uint32_t mask = 0;
  for (int64_t byte = 0; byte < (count + 7) / 8; ++byte)
    mask |= static_cast<uint32_t>(bits[i / 8 + byte]) << 8 * byte;
  return mask;
}

// Whether `stream` may be used for a row that begins at `out`.
inline bool streams(const float* out) {
  return reinterpret_cast<uintptr_t>(out) % sizeof(Lanes) == 0;
}

// Like store, but bypasses the cache; Lanes::fence must follow the last one.
inline void stream(Lanes x, float* p, int64_t count) {
  if (count == W) return x.stream(p);
  store(x, p, count);
}
