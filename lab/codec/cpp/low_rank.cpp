// Products of a matrix with factors of a few columns, at the speed of memory.
//
// Implements the definition in lab/codec/low_rank.py. Each value of a result is summed in
// an order that does not depend on the number of threads; `rebuild` rounds alike at each level.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "loops.h"
#include "parallel.h"

namespace {

constexpr int64_t MOST_COLUMNS = 2048;  // of a block, whose part of q then stays in the first cache
constexpr int AT_ONCE = 8;              // rows, for each of which q need not be read again

inline float total(Lanes x) {
  float values[W];
  x.store(values);
  float sum = 0;
  for (float value : values) sum += value;
  return sum;
}

// One row: residual += gradient, unless that is null, and p[j] = the sum times row j of q.
template <int R>
void project_row(const float* gradient, float* residual, const float* q, float* p,
                 int64_t columns) {
  Lanes sums[R];
  for (Lanes& sum : sums) sum = Lanes::all(0);
  groups(columns, [&](int64_t i, int64_t count) {
    Lanes v = load(gradient + i, count);
    if (residual) {
      v = load(residual + i, count) + v;
      store(v, residual + i, count);
    }
    for (int j = 0; j < R; ++j) sums[j] = sums[j] + v * load(q + j * columns + i, count);
  });
  for (int j = 0; j < R; ++j) p[j] = total(sums[j]);
}

// p[0] times row 0 of q, and so on: values i ... i + count of the sum.
template <int R>
inline Lanes product(const float* p, const float* q, int64_t columns, int64_t i, int64_t count) {
  Lanes sum = Lanes::all(p[0]) * load(q + i, count);
  for (int j = 1; j < R; ++j) sum = sum + Lanes::all(p[j]) * load(q + j * columns + i, count);
  return sum;
}

// Adds N rows' share to columns begin ... end of q = p^T matrix.
template <int R, int N>
inline void add_rows(const float* rows, const float* p, float* q, int64_t columns, int64_t begin,
                     int64_t end) {
  groups(end - begin, [=](int64_t i, int64_t count) {
    Lanes values[N];
    for (int n = 0; n < N; ++n) values[n] = load(rows + n * columns + begin + i, count);
    for (int j = 0; j < R; ++j) {
      float* place = q + j * columns + begin + i;
      Lanes sum = Lanes::all(p[j]) * values[0];  // apart: long sums lose precision
      for (int n = 1; n < N; ++n) sum = sum + Lanes::all(p[n * R + j]) * values[n];
      store(load(place, count) + sum, place, count);
    }
  });
}

template <int R>
void project_back(const float* matrix, const float* p, float* q, int64_t rows, int64_t columns,
                  int64_t begin, int64_t end) {
  for (int j = 0; j < R; ++j) std::memset(q + j * columns + begin, 0, (end - begin) * sizeof(float));
  int64_t row = 0;
  for (; row + AT_ONCE <= rows; row += AT_ONCE)
    add_rows<R, AT_ONCE>(matrix + row * columns, p + row * R, q, columns, begin, end);
  for (; row < rows; ++row)
    add_rows<R, 1>(matrix + row * columns, p + row * R, q, columns, begin, end);
}

// Calls f(row) for all rows, on up to `threads` threads.
template <class F>
void each_row(int64_t rows, int64_t columns, int64_t threads, F f) {
  each_piece(rows, columns, threads, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
    Lanes::fence();
  });
}

// Calls f(begin, end) for blocks of columns.
template <class F>
void each_block(int64_t rows, int64_t columns, int64_t threads, F f) {
  const int64_t share = (columns / std::max<int64_t>(threads, 1) + W) / W * W;
  const int64_t size = std::min(share, MOST_COLUMNS);
  each_piece((columns + size - 1) / size, rows * size, threads, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) f(b * size, std::min((b + 1) * size, columns));
  });
}

// Calls f with the rank as a constant.
template <class F>
void with_rank(int64_t rank, F f) {
  switch (rank) {
    case 1: return f(std::integral_constant<int, 1>());
    case 2: return f(std::integral_constant<int, 2>());
    case 3: return f(std::integral_constant<int, 3>());
    case 4: return f(std::integral_constant<int, 4>());
  }
}

}  // namespace

extern "C" {

// residual += gradient, unless that is null; p [rows, rank] = the sum [rows, columns] times q^T.
// q: [rank, columns].
void low_rank_project(const float* gradient, float* residual, const float* q, float* p,
                      int64_t rows, int64_t columns, int64_t rank, int64_t threads) {
  with_rank(rank, [=](auto r) {
    each_row(rows, columns, threads, [=](int64_t row) {
      float* kept = residual ? residual + row * columns : nullptr;
      project_row<r>(gradient + row * columns, kept, q, p + row * r, columns);
    });
  });
}

// q = p^T matrix, and, if told so, matrix -= p q.
void low_rank_project_back(float* matrix, const float* p, float* q, int64_t rows, int64_t columns,
                           int64_t rank, int64_t subtract, int64_t threads) {
  with_rank(rank, [=](auto r) {
    each_block(rows, columns, threads, [=](int64_t begin, int64_t end) {
      project_back<r>(matrix, p, q, rows, columns, begin, end);
    });
    if (!subtract) return;
    each_row(rows, columns, threads, [=](int64_t row) {
      float* values = matrix + row * columns;
      groups(columns, [=](int64_t i, int64_t count) {
        const Lanes rest = load(values + i, count) - product<r>(p + row * r, q, columns, i, count);
        store(rest, values + i, count);
      });
    });
  });
}

// out [rows, columns] = p q.
void low_rank_rebuild(const float* p, const float* q, float* out, int64_t rows, int64_t columns,
                      int64_t rank, int64_t threads) {
  const bool far = streams(out) && columns % W == 0;
  with_rank(rank, [=](auto r) {
    each_row(rows, columns, threads, [=](int64_t row) {
      float* values = out + row * columns;
      groups(columns, [=](int64_t i, int64_t count) {
        const Lanes value = product<r>(p + row * r, q, columns, i, count);
        far ? stream(value, values + i, count) : store(value, values + i, count);
      });
    });
  });
}
}
