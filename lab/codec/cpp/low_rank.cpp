// Products of a matrix with factors of a few columns, at the speed of memory.
//
// Implements the definition in lab/exchange/powersgd.py. Each value of a result is summed in
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

// A matrix of a bucket: a row of Factors.table.
struct Matrix {
  int64_t start, rows, columns, rank, p, q;
};

// Calls f(matrix, rank as a constant) for matrices one after the other.
template <class F>
void each_matrix(const Matrix* matrices, int64_t count, F f) {
  for (int64_t i = 0; i < count; ++i)
    with_rank(matrices[i].rank, [&](auto r) { f(matrices[i], r); });
}

}  // namespace

extern "C" {

// residuals += gradients, unless they are null; P [rows, rank] = the sums [rows, columns] times Q.
// q: Q^T [rank, columns].
void low_rank_project(const float* gradients, float* residuals, const float* q, float* p,
                      const Matrix* matrices, int64_t count, int64_t threads) {
  each_matrix(matrices, count, [=](const Matrix& m, auto r) {
    each_row(m.rows, m.columns, threads, [=](int64_t row) {
      const int64_t place = m.start + row * m.columns;
      project_row<r>(gradients + place, residuals ? residuals + place : nullptr, q + m.q,
                     p + m.p + row * r, m.columns);
    });
  });
}

// Q^T = P^T M and, if told so, M -= P Q^T.
void low_rank_project_back(float* values, const float* p, float* q, const Matrix* matrices,
                           int64_t count, int64_t subtract, int64_t threads) {
  each_matrix(matrices, count, [=](const Matrix& m, auto r) {
    float *matrix = values + m.start, *right = q + m.q;
    const float* left = p + m.p;
    const int64_t columns = m.columns;
    each_block(m.rows, columns, threads, [=](int64_t begin, int64_t end) {
      project_back<r>(matrix, left, right, m.rows, columns, begin, end);
    });
    if (!subtract) return;
    each_row(m.rows, columns, threads, [=](int64_t row) {
      float* rest = matrix + row * columns;
      groups(columns, [=](int64_t i, int64_t count) {
        const Lanes sent = product<r>(left + row * r, right, columns, i, count);
        store(load(rest + i, count) - sent, rest + i, count);
      });
    });
  });
}

// out = P Q^T.
void low_rank_rebuild(const float* p, const float* q, float* out, const Matrix* matrices,
                      int64_t count, int64_t threads) {
  each_matrix(matrices, count, [=](const Matrix& m, auto r) {
    const int64_t columns = m.columns;
    const bool far = streams(out + m.start) && columns % W == 0;
    each_row(m.rows, columns, threads, [=](int64_t row) {
      float* values = out + m.start + row * columns;
      const float* left = p + m.p + row * r;
      groups(columns, [=](int64_t i, int64_t count) {
        const Lanes value = product<r>(left, q + m.q, columns, i, count);
        far ? stream(value, values + i, count) : store(value, values + i, count);
      });
    });
  });
}
}
