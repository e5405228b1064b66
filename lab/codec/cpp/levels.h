// Equidistant levels between the smallest and the largest value of a row, as lab/codec/codecs.py
// defines them: a header of the smallest value and the step, then a level for each value.

#pragma once

#include <limits>

#include "rows.h"

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

// `Packing` stores levels as bytes or halves of them: put(bytes, payload, i, count), and get.
template <class Packing>
struct Levels {
  static constexpr bool LONG = false;
  static constexpr int64_t HEADER = 2 * sizeof(float);

  Levels(int64_t, int64_t) {}
  static int64_t width(int64_t columns) { return Packing::width(columns); }
  static bool finite(const uint8_t* header) {
    const Pair ends = get_header(header);
    return std::isfinite(ends.first) && std::isfinite(ends.second);
  }

  static void encode(const Row& row, uint8_t* header, uint8_t* payload) {
    const float* const values = row.summed();
    const Range ends = range(values, row.columns);
    const float smallest = std::numeric_limits<float>::min();  // equal values have a step too
    const float step = std::max((ends.high - ends.low) / Packing::LARGEST, smallest);
    put_header(ends.low, step, header);
    const Lanes low = Lanes::all(ends.low), steps = Lanes::all(step), half = Lanes::all(0.5f);
    groups(row.columns, [&](int64_t i, int64_t count) {
      uint8_t bytes[W];
      ((load(values + i, count) - low) / steps + half).to_bytes(bytes);  // truncates
      Packing::put(bytes, payload, i, count);
    });
    if (!row.residual) return;
    decoded(header, payload, row.columns, [&](int64_t i, int64_t count, Lanes v) {
      store(load(values + i, count) - v, row.residual + i, count);
    });
  }

  template <class F>
  static void decoded(const uint8_t* header, const uint8_t* payload, int64_t columns, F f) {
    const Pair ends = get_header(header);
    const Lanes low = Lanes::all(ends.first), step = Lanes::all(ends.second);
    groups(columns, [=](int64_t i, int64_t count) {
      uint8_t bytes[W] = {};
      Packing::get(payload, bytes, i, count);
      f(i, count, Lanes::from_bytes(bytes) * step + low);
    });
  }
};
