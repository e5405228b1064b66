// One bit per value and two reconstruction values per row, fused with the residual.
//
// Implements the definition in lab/codec/onebit/reference.py; lab/codec/build.py compiles it for
// this processor. A row is read from memory once: later passes find it in the cache.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "loops.h"
#include "parallel.h"

namespace {

struct Row {
  const float* gradient;
  float* residual;  // or null
  int64_t columns;

  Lanes value(int64_t i, int64_t count) const {
    const Lanes g = load(gradient + i, count);
    return residual ? g + load(residual + i, count) : g;
  }
};

inline void means_of_sides(const Row& row, float* scales, uint8_t* bits) {
  const Lanes zero = Lanes::all(0);
  Sum lower, upper;
  int64_t num_upper = 0;
  groups(row.columns, [&](int64_t i, int64_t count) {
    const Lanes v = row.value(i, count);
    const uint32_t mask = v.at_least(zero) & first(count);
    put(mask, bits, i, count);
    num_upper += __builtin_popcount(mask);
    lower.add(Lanes::choose(mask, v, zero));
    upper.add(Lanes::choose(mask, zero, v));
  });
  // An empty side has the sum 0: dividing it by 1 makes its mean 0.
  scales[0] = static_cast<float>(lower.total() / std::max<int64_t>(row.columns - num_upper, 1));
  scales[1] = static_cast<float>(upper.total() / std::max<int64_t>(num_upper, 1));
}

inline void mean_and_deviation(const Row& row, float* scales, uint8_t* bits) {
  const Lanes zero = Lanes::all(0);
  Sum sum, distance;
  groups(row.columns, [&](int64_t i, int64_t count) { sum.add(row.value(i, count)); });
  const float mean = static_cast<float>(sum.total() / row.columns);
  const Lanes middle = Lanes::all(mean);
  groups(row.columns, [&](int64_t i, int64_t count) {
    const Lanes v = row.value(i, count);
    put(v.at_least(middle) & first(count), bits, i, count);
    distance.add(Lanes::choose(first(count), zero, (v - middle).magnitude()));
  });
  const float deviation = static_cast<float>(distance.total() / row.columns);
  scales[0] = mean - deviation;
  scales[1] = mean + deviation;
}

inline void keep_loss(const Row& row, const float* scales, const uint8_t* bits) {
  const Lanes zero = Lanes::all(scales[0]), one = Lanes::all(scales[1]);
  groups(row.columns, [&](int64_t i, int64_t count) {
    const Lanes lost = row.value(i, count) - Lanes::choose(get(bits, i, count), zero, one);
    store(lost, row.residual + i, count);
  });
}

// The row's bits, scales and new residual.
inline void encode(const Row& row, float* scales, uint8_t* bits, bool split_at_mean) {
  (split_at_mean ? mean_and_deviation : means_of_sides)(row, scales, bits);
  if (row.residual) keep_loss(row, scales, bits);
}

// Calls f(first, count, value) for the groups of an encoded row.
template <class F>
inline void decoded(const float* scales, const uint8_t* bits, int64_t columns, F f) {
  const Lanes zero = Lanes::all(scales[0]), one = Lanes::all(scales[1]);
  groups(columns, [=](int64_t i, int64_t count) {
    f(i, count, Lanes::choose(get(bits, i, count), zero, one));
  });
}

inline void add(const float* scales, const uint8_t* bits, float* out, int64_t columns) {
  decoded(scales, bits, columns, [=](int64_t i, int64_t count, Lanes value) {
    store(load(out + i, count) + value, out + i, count);
  });
}

inline void replace(const float* scales, const uint8_t* bits, float* out, int64_t columns) {
  decoded(scales, bits, columns,
          [=](int64_t i, int64_t count, Lanes value) { store(value, out + i, count); });
}

// Like replace, but memory is not read before it is written.
inline void replace_far(const float* scales, const uint8_t* bits, float* out, int64_t columns) {
  if (!streams(out)) return replace(scales, bits, out, columns);
  decoded(scales, bits, columns,
          [=](int64_t i, int64_t count, Lanes value) { stream(value, out + i, count); });
  Lanes::fence();
}

// Calls f(row) for all rows, on up to `threads` threads.
template <class F>
void each_row(int64_t rows, int64_t columns, int64_t threads, F f) {
  each_piece(rows, columns, threads, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

}  // namespace

extern "C" {

// gradient, residual: [rows, columns]. Row r's scales and bits are row r % height of line r / height;
// lines are scales_stride floats and bits_stride bytes apart.
// The residual, unless null, is added to the gradient and replaced by the quantisation error.
void onebit_encode(const float* gradient, float* residual, float* scales, uint8_t* bits,
                   int64_t rows, int64_t columns, int64_t height, int64_t scales_stride,
                   int64_t bits_stride, int64_t split_at_mean, int64_t threads) {
  const int64_t width = (columns + 7) / 8;
  each_row(rows, columns, threads, [=](int64_t r) {
    const int64_t line = r / height, place = r % height;
    const Row row{gradient + r * columns, residual ? residual + r * columns : nullptr, columns};
    encode(row, scales + line * scales_stride + 2 * place,
           bits + line * bits_stride + place * width, split_at_mean);
  });
}

// out: [rows, columns], replaced or added to; scales and bits as above.
void onebit_decode(const float* scales, const uint8_t* bits, float* out, int64_t rows,
                   int64_t columns, int64_t height, int64_t scales_stride, int64_t bits_stride,
                   int64_t accumulate, int64_t threads) {
  const int64_t width = (columns + 7) / 8;
  each_row(rows, columns, threads, [=](int64_t r) {
    const int64_t line = r / height, place = r % height;
    (accumulate ? add : replace_far)(scales + line * scales_stride + 2 * place,
                                     bits + line * bits_stride + place * width, out + r * columns,
                                     columns);
  });
}

// Decodes the rows of `ranks` ranks, sums them in rank order and encodes the sum. The ranks' scales
// and bits are scales_stride floats and bits_stride bytes apart. A row's sum is never written to memory.
void onebit_reduce(const float* scales, const uint8_t* bits, float* residual, float* out_scales,
                   uint8_t* out_bits, int64_t ranks, int64_t scales_stride, int64_t bits_stride,
                   int64_t rows, int64_t columns, int64_t split_at_mean, int64_t threads) {
  const int64_t width = (columns + 7) / 8;
  each_row(rows, columns, threads, [=](int64_t r) {
    thread_local std::vector<float> sum;
    sum.resize(columns);
    for (int64_t rank = 0; rank < ranks; ++rank)
      (rank ? add : replace)(scales + rank * scales_stride + 2 * r,
                             bits + rank * bits_stride + r * width, sum.data(), columns);
    const Row row{sum.data(), residual ? residual + r * columns : nullptr, columns};
    encode(row, out_scales + 2 * r, out_bits + r * width, split_at_mean);
  });
}
}
