// Eight bits per value between the ends of its block: each block is read from memory once.
//
// Implements the definition in lab/codec/int8/reference.py. A record is a block's smallest value and
// the step between two levels, both float32, then a byte for each value.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "loops.h"
#include "parallel.h"

namespace {

constexpr int64_t HEADER = 2 * sizeof(float);

struct Range {
  float low, high;  // both NaN if a value is
};

inline Range range(const float* values, int64_t count) {
  Lanes low = Lanes::all(std::numeric_limits<float>::infinity());
  Lanes high = Lanes::all(-std::numeric_limits<float>::infinity());
  Lanes sum = Lanes::all(0);  // NaN if a value is, or if infinities cancel
  const int64_t whole = count / W * W;
  for (int64_t i = 0; i < whole; i += W) {
    const Lanes v = Lanes::load(values + i);
    low = low.min(v);
    high = high.max(v);
    sum = sum + v;
  }
  float lows[W], highs[W], sums[W];
  low.store(lows), high.store(highs), sum.store(sums);
  Range found{lows[0], highs[0]};
  bool is_nan = false;
  const auto widen = [&](float least, float most, float probe) {
    found = {std::min(found.low, least), std::max(found.high, most)};
    is_nan |= std::isnan(probe);
  };
  for (int64_t i = 0; i < W; ++i) widen(lows[i], highs[i], sums[i]);
  for (int64_t i = whole; i < count; ++i) widen(values[i], values[i], values[i]);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  return is_nan ? Range{nan, nan} : found;
}

inline Lanes load_levels(const uint8_t* p, int64_t count) {
  if (count == W) return Lanes::from_bytes(p);
  uint8_t padded[W] = {};
  std::memcpy(padded, p, count);
  return Lanes::from_bytes(padded);
}

inline void store_levels(Lanes x, uint8_t* p, int64_t count) {
  if (count == W) return x.to_bytes(p);
  uint8_t padded[W];
  x.to_bytes(padded);
  std::memcpy(p, padded, count);
}

// Unused places of the last record repeat its last byte, as the reference does.
inline void encode(const float* values, int64_t count, int64_t block, uint8_t* record) {
  const Range ends = range(values, count);
  const float smallest = std::numeric_limits<float>::min();  // a block of equal values has a step too
  const float step = std::max((ends.high - ends.low) / 255, smallest);
  std::memcpy(record, &ends.low, sizeof(float));
  std::memcpy(record + sizeof(float), &step, sizeof(float));
  uint8_t* bytes = record + HEADER;
  const Lanes low = Lanes::all(ends.low), steps = Lanes::all(step), half = Lanes::all(0.5f);
  groups(count, [&](int64_t i, int64_t number) {
    store_levels((load(values + i, number) - low) / steps + half, bytes + i, number);
  });
  std::memset(bytes + count, bytes[count - 1], block - count);
}

// Calls f(first, number, values) for the groups of a decoded block.
template <class F>
inline void decoded(const uint8_t* record, int64_t count, F f) {
  float header[2];
  std::memcpy(header, record, HEADER);
  const uint8_t* bytes = record + HEADER;
  const Lanes low = Lanes::all(header[0]), step = Lanes::all(header[1]);
  groups(count, [=](int64_t i, int64_t number) {
    f(i, number, load_levels(bytes + i, number) * step + low);
  });
}

// Calls f(block, its first value, its number of values) for all blocks.
template <class F>
void each_block(int64_t count, int64_t block, int64_t threads, F f) {
  each_piece((count + block - 1) / block, block, threads, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) f(b, b * block, std::min(block, count - b * block));
    Lanes::fence();
  });
}

}  // namespace

extern "C" {

// values: [count]; records: [at least ceil(count / block), HEADER + block].
void int8_encode(const float* values, uint8_t* records, int64_t count, int64_t block,
                 int64_t threads) {
  each_block(count, block, threads, [=](int64_t b, int64_t first, int64_t number) {
    encode(values + first, number, block, records + b * (HEADER + block));
  });
}

void int8_decode(const uint8_t* records, float* out, int64_t count, int64_t block,
                 int64_t threads) {
  const bool far = streams(out) && block % W == 0;
  each_block(count, block, threads, [=](int64_t b, int64_t first, int64_t number) {
    float* place = out + first;
    decoded(records + b * (HEADER + block), number, [=](int64_t i, int64_t n, Lanes value) {
      far ? stream(value, place + i, n) : store(value, place + i, n);
    });
  });
}

// Decodes the records of `ranks` ranks, `stride` bytes apart, and encodes their mean, added in rank
// order. The mean of a block never leaves the cache.
void int8_mean(const uint8_t* records, uint8_t* out, int64_t ranks, int64_t stride, int64_t count,
               int64_t block, int64_t threads) {
  each_block(count, block, threads, [=](int64_t b, int64_t, int64_t number) {
    thread_local std::vector<float> memory;
    memory.resize(block);
    float* sum = memory.data();
    const int64_t at = b * (HEADER + block);
    for (int64_t rank = 0; rank < ranks; ++rank)
      decoded(records + rank * stride + at, number, [=](int64_t i, int64_t n, Lanes value) {
        store(rank ? load(sum + i, n) + value : value, sum + i, n);
      });
    const Lanes size = Lanes::all(static_cast<float>(ranks));
    groups(number, [=](int64_t i, int64_t n) { store(load(sum + i, n) / size, sum + i, n); });
    encode(sum, number, block, out + at);
  });
}
}
