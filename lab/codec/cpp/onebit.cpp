// One bit per value and two reconstruction values per row, as lab/codec/codecs.py defines them.

#include "rows.h"

namespace {

struct OneBit {
  static constexpr bool LONG = false;
  static constexpr int64_t HEADER = 2 * sizeof(float);
  bool split_at_mean;

  OneBit(int64_t option, int64_t) : split_at_mean(option) {}
  static int64_t width(int64_t columns) { return (columns + 7) / 8; }
  static bool finite(const uint8_t* header) {
    const Pair scales = get_header(header);
    return std::isfinite(scales.first) && std::isfinite(scales.second);
  }

  static Pair means_of_sides(const Row& row, uint8_t* bits) {
    const Lanes zero = Lanes::all(0);
    Sum lower, upper;
    int64_t num_upper = 0;
    groups(row.columns, [&](int64_t i, int64_t count) {
      const Lanes v = row.at(i, count);
      const uint32_t mask = v.at_least(zero) & first(count);
      put(mask, bits, i, count);
      num_upper += __builtin_popcount(mask);
      lower.add(Lanes::choose(mask, v, zero));
      upper.add(Lanes::choose(mask, zero, v));
    });
    // An empty side has the sum 0: dividing it by 1 makes its mean 0.
    return {static_cast<float>(lower.total() / std::max<int64_t>(row.columns - num_upper, 1)),
            static_cast<float>(upper.total() / std::max<int64_t>(num_upper, 1))};
  }

  static Pair mean_and_deviation(const Row& row, uint8_t* bits) {
    const Lanes zero = Lanes::all(0);
    Sum sum, distance;
    groups(row.columns, [&](int64_t i, int64_t count) { sum.add(row.at(i, count)); });
    const float mean = static_cast<float>(sum.total() / row.columns);
    const Lanes middle = Lanes::all(mean);
    groups(row.columns, [&](int64_t i, int64_t count) {
      const Lanes v = row.at(i, count);
      put(v.at_least(middle) & first(count), bits, i, count);
      distance.add(Lanes::choose(first(count), zero, (v - middle).magnitude()));
    });
    const float deviation = static_cast<float>(distance.total() / row.columns);
    return {mean - deviation, mean + deviation};
  }

  void encode(const Row& row, uint8_t* header, uint8_t* bits) const {
    const Pair scales = (split_at_mean ? mean_and_deviation : means_of_sides)(row, bits);
    put_header(scales.first, scales.second, header);
    if (!row.residual) return;
    const Lanes zero = Lanes::all(scales.first), one = Lanes::all(scales.second);
    groups(row.columns, [&](int64_t i, int64_t count) {
      const Lanes lost = row.at(i, count) - Lanes::choose(get(bits, i, count), zero, one);
      store(lost, row.residual + i, count);
    });
  }

  template <class F>
  static void decoded(const uint8_t* header, const uint8_t* bits, int64_t columns, F f) {
    const Pair scales = get_header(header);
    const Lanes zero = Lanes::all(scales.first), one = Lanes::all(scales.second);
    groups(columns, [=](int64_t i, int64_t count) {
      f(i, count, Lanes::choose(get(bits, i, count), zero, one));
    });
  }
};

}  // namespace

extern "C" {
ROW_CODEC(onebit, OneBit)
}
