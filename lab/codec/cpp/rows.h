// Messages of encoded rows (lab/codec/layout.py): written, added up, and added up and written again.
//
// A codec of rows is a struct that is made with an option and a number of threads, and has
//   LONG                                   rows are long: each is divided among the threads
//   HEADER                                 bytes of a row's header
//   width(columns)                         bytes of its payload
//   encode(row, header, payload)           writes both, and the row's loss if it has a residual
//   decoded(header, payload, columns, f)   calls f(first, count, values) for its groups
//   finite(header)                         false if a value of the row was not finite
// One of long rows has an `add_row` of its own instead of the last two. A row that is not long is
// read from memory once: later passes find it in the cache.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "loops.h"
#include "parallel.h"

struct Piece {
  int64_t start, rows, columns, header, payload;
};

struct Copy {
  int64_t start, count, at;
};

struct Layout {
  const Piece* pieces;
  int64_t num_pieces;
  const Copy* copies;
  int64_t num_copies;
  int64_t num_values;  // encoded ones

  // Calls f(values before, header, payload, columns) for all rows, on up to `threads` threads; one
  // after the other if they are long.
  template <class C, class F>
  void each_row(const C& codec, int64_t threads, F f) const {
    each_item(num_pieces, num_values, C::LONG ? 1 : threads, [=](int64_t i) {
      const Piece p = pieces[i];
      for (int64_t r = 0; r < p.rows; ++r)
        f(p.start + r * p.columns, p.header + r * C::HEADER, p.payload + r * codec.width(p.columns),
          p.columns);
      Lanes::fence();
    });
  }
};

// A row to encode. The residual, unless null, is added to its values and replaced by the loss.
struct Row {
  const float* values;
  float* residual;
  int64_t columns;

  Lanes at(int64_t i, int64_t count) const {
    const Lanes v = load(values + i, count);
    return residual ? v + load(residual + i, count) : v;
  }

  // All of them, in memory that the thread's next row reuses.
  const float* summed() const {
    if (!residual) return values;
    thread_local std::vector<float> sum;
    sum.resize(columns);
    groups(columns, [&](int64_t i, int64_t count) { store(at(i, count), sum.data() + i, count); });
    return sum.data();
  }
};

inline void put_header(float first, float second, uint8_t* header) {
  const float both[2] = {first, second};
  std::memcpy(header, both, sizeof both);
}

struct Pair {
  float first, second;
};

inline Pair get_header(const uint8_t* header) {
  Pair pair;
  std::memcpy(&pair, header, sizeof pair);
  return pair;
}

inline void copy_values(const Copy* copies, int64_t num_copies, const float* values,
                        uint8_t* message) {
  for (int64_t i = 0; i < num_copies; ++i)
    std::memcpy(message + copies[i].at, values + copies[i].start, copies[i].count * sizeof(float));
}

// Fills a message with `values` + residual, whose loss becomes the residual unless that is null.
template <class C>
void encode_rows(const C& codec, const Layout& layout, const float* values, float* residual,
                 uint8_t* message, int64_t threads) {
  layout.each_row(codec, threads, [=](int64_t at, int64_t header, int64_t payload, int64_t columns) {
    const Row row{values + at, residual ? residual + at : nullptr, columns};
    codec.encode(row, message + header, message + payload);
  });
  copy_values(layout.copies, layout.num_copies, values, message);
}

// Divides by the number of ranks; by a product where that gives the same bits.
struct Divisor {
  float number;
  bool is_power, is_one;

  explicit Divisor(int64_t n) : number(static_cast<float>(n)), is_power(!(n & (n - 1))), is_one(n == 1) {}
  Lanes of(Lanes v) const {
    if (is_one) return v;
    return is_power ? v * Lanes::all(1 / number) : v / Lanes::all(number);
  }
};

// Adds one row of `count` messages, `stride` bytes apart, in their order, over a divisor, into `out`.
template <class C>
bool add_row(const C& codec, const uint8_t* messages, int64_t header, int64_t payload, int64_t count,
             int64_t stride, Divisor divisor, float* out, int64_t columns) {
  const bool far = count == 1 && streams(out) && columns % W == 0;
  bool finite = true;
  for (int64_t m = 0; m < count; ++m, header += stride, payload += stride) {
    finite &= codec.finite(messages + header);
    codec.decoded(messages + header, messages + payload, columns,
                  [=](int64_t i, int64_t n, Lanes v) {
                    if (m) v = load(out + i, n) + v;
                    if (m + 1 == count) v = divisor.of(v);
                    far ? stream(v, out + i, n) : store(v, out + i, n);
                  });
  }
  return finite;
}

// The same for the copied values of `c`, into `out`.
inline bool add_copy(const Copy& c, const uint8_t* messages, int64_t count, int64_t stride,
                     Divisor divisor, float* out) {
  Lanes probe = Lanes::all(0);
  groups(c.count, [&](int64_t i, int64_t n) {
    const auto of = [&](int64_t m) {
      return load(reinterpret_cast<const float*>(messages + m * stride + c.at) + i, n);
    };
    Lanes sum = of(0);
    for (int64_t m = 1; m < count; ++m) sum = sum + of(m);
    probe = probe + (sum - sum);
    store(divisor.of(sum), out + i, n);
  });
  return probe.at_least(Lanes::all(0)) == first(W);
}

inline bool add_copies(const Copy* copies, int64_t num_copies, const uint8_t* messages,
                       int64_t count, int64_t stride, Divisor divisor, float* out) {
  bool finite = true;
  for (int64_t i = 0; i < num_copies; ++i)
    finite &= add_copy(copies[i], messages, count, stride, divisor, out + copies[i].start);
  return finite;
}

// The same in the place of the values: `out` is a message.
inline void sum_copies(const Copy* copies, int64_t num_copies, const uint8_t* messages,
                       int64_t count, int64_t stride, uint8_t* out) {
  for (int64_t i = 0; i < num_copies; ++i)
    add_copy(copies[i], messages, count, stride, Divisor(1),
             reinterpret_cast<float*>(out + copies[i].at));
}

// Fills `out` with the sum of messages over a divisor, and tells whether all was finite.
template <class C>
void add_rows(const C& codec, const Layout& layout, const uint8_t* messages, int64_t count,
              int64_t stride, Divisor divisor, float* out, uint8_t* finite, int64_t threads) {
  std::atomic<bool> all{true};
  layout.each_row(codec, threads,
                  [=, &all](int64_t at, int64_t header, int64_t payload, int64_t columns) {
                    if (!add_row(codec, messages, header, payload, count, stride, divisor, out + at,
                                 columns))
                      all = false;
                  });
  *finite = add_copies(layout.copies, layout.num_copies, messages, count, stride, divisor, out) && all;
}

// Encodes the sum of messages into `out`, with its residual. A row's sum stays in the cache.
template <class C>
void reduce_rows(const C& codec, const Layout& layout, const uint8_t* messages, int64_t count,
                 int64_t stride, float* residual, uint8_t* out, int64_t threads) {
  std::vector<float> of_long;
  const auto reduce = [=, &of_long](int64_t at, int64_t header, int64_t payload, int64_t columns) {
    thread_local std::vector<float> kept;
    std::vector<float>& sum = C::LONG ? of_long : kept;
    sum.resize(columns);
    add_row(codec, messages, header, payload, count, stride, Divisor(1), sum.data(), columns);
    const Row row{sum.data(), residual ? residual + at : nullptr, columns};
    codec.encode(row, out + header, out + payload);
  };
  layout.each_row(codec, threads, reduce);
  sum_copies(layout.copies, layout.num_copies, messages, count, stride, out);
}

// The three functions of a codec, for `extern "C"`.
#define ROW_CODEC(name, Codec)                                                                      \
  void name##_encode(const float* values, float* residual, uint8_t* message, const Piece* pieces,  \
                     const Copy* copies, int64_t num_pieces, int64_t num_copies,                   \
                     int64_t num_values, int64_t option, int64_t threads) {                        \
    const Layout layout{pieces, num_pieces, copies, num_copies, num_values};                       \
    encode_rows(Codec(option, threads), layout, values, residual, message, threads);               \
  }                                                                                                \
  void name##_add_up(const uint8_t* messages, float* out, uint8_t* finite, const Piece* pieces,    \
                     const Copy* copies, int64_t num_pieces, int64_t num_copies,                   \
                     int64_t num_values, int64_t count, int64_t stride, int64_t divisor,           \
                     int64_t option, int64_t threads) {                                            \
    const Layout layout{pieces, num_pieces, copies, num_copies, num_values};                       \
    add_rows(Codec(option, threads), layout, messages, count, stride, Divisor(divisor), out,       \
             finite, threads);                                                                     \
  }                                                                                                \
  void name##_reduce(const uint8_t* messages, float* residual, uint8_t* out, const Piece* pieces,  \
                     const Copy* copies, int64_t num_pieces, int64_t num_copies,                   \
                     int64_t num_values, int64_t count, int64_t stride, int64_t option,            \
                     int64_t threads) {                                                            \
    const Layout layout{pieces, num_pieces, copies, num_copies, num_values};                       \
    reduce_rows(Codec(option, threads), layout, messages, count, stride, residual, out, threads);  \
  }
