// Signs and one magnitude for all values, fused with the residual.
//
// Implements the definition in lab/codec/signs/reference.py. The magnitude is known only when all
// values have been read, so gradient and residual are read twice.

#include <cstdint>
#include <vector>

#include "loops.h"
#include "parallel.h"

namespace {

inline Lanes value(const float* gradient, const float* residual, int64_t i, int64_t count) {
  const Lanes g = load(gradient + i, count);
  return residual ? load(residual + i, count) + g : g;
}

// Writes the sign bits of values begin ... end, and returns the sum of their magnitudes.
inline double signs(const float* gradient, const float* residual, uint8_t* bits, int64_t begin,
                    int64_t end) {
  Sum sum;
  groups(end - begin, [&](int64_t i, int64_t count) {
    const Lanes v = value(gradient, residual, begin + i, count);
    put(v.sign_bits() & first(count), bits, begin + i, count);
    sum.add(v.magnitude());
  });
  return sum.total();
}

}  // namespace

extern "C" {

// gradient: [count]; bits: [(count + 7) / 8], 1 for negative values. The residual, unless null, is
// added to the gradient and replaced by the error.
void signs_encode(const float* gradient, float* residual, float* magnitude, uint8_t* bits,
                  int64_t count, int64_t threads) {
  std::vector<double> sums((count + PIECE - 1) / PIECE);  // their order does not depend on threads
  double* const sum = sums.data();
  each_piece(count, 1, threads, [=](int64_t begin, int64_t end) {
    sum[begin / PIECE] = signs(gradient, residual, bits, begin, end);
  });
  double total = 0;
  for (double of_piece : sums) total += of_piece;
  *magnitude = static_cast<float>(total / static_cast<double>(count));
  if (!residual) return;
  const Lanes plus = Lanes::all(*magnitude), minus = Lanes::all(-*magnitude);
  each_piece(count, 1, threads, [=](int64_t begin, int64_t end) {
    groups(end - begin, [=](int64_t i, int64_t number) {
      const Lanes v = value(gradient, residual, begin + i, number);
      store(v - Lanes::choose(v.sign_bits(), plus, minus), residual + begin + i, number);
    });
  });
}

// Sums the values of `ranks` ranks in rank order into out [count]; bits are stride bytes apart.
void signs_decode(const float* magnitudes, const uint8_t* bits, float* out, int64_t ranks,
                  int64_t stride, int64_t count, int64_t threads) {
  const bool far = streams(out);
  each_piece(count, 1, threads, [=](int64_t begin, int64_t end) {
    groups(end - begin, [=](int64_t i, int64_t number) {
      const auto of_rank = [=](int64_t rank) {
        const Lanes plus = Lanes::all(magnitudes[rank]), minus = Lanes::all(-magnitudes[rank]);
        return Lanes::choose(get(bits + rank * stride, begin + i, number), plus, minus);
      };
      Lanes sum = of_rank(0);
      for (int64_t rank = 1; rank < ranks; ++rank) sum = sum + of_rank(rank);
      far ? stream(sum, out + begin + i, number) : store(sum, out + begin + i, number);
    });
    Lanes::fence();
  });
}
}
