// Signs and one magnitude for all values of a row, as lab/codec/codecs.py defines them.
//
// The magnitude is known only when all values have been read, so gradient and residual are read
// twice. Rows are as long as parameters, and divided among threads.

#include "rows.h"

namespace {

// Writes the sign bits of values begin ... end, and returns the sum of their magnitudes.
inline double signs(const Row& row, uint8_t* bits, int64_t begin, int64_t end) {
  Sum sum;
  groups(end - begin, [&](int64_t i, int64_t count) {
    const Lanes v = row.at(begin + i, count);
    put(v.sign_bits() & first(count), bits, begin + i, count);
    sum.add(v.magnitude());
  });
  return sum.total();
}

struct Signs {
  static constexpr bool LONG = true;
  static constexpr int64_t HEADER = sizeof(float);
  int64_t threads;

  Signs(int64_t, int64_t threads) : threads(threads) {}
  static int64_t width(int64_t columns) { return (columns + 7) / 8; }

  void encode(const Row& row, uint8_t* header, uint8_t* bits) const {
    std::vector<double> sums((row.columns + PIECE - 1) / PIECE);  // whose order depends on no thread
    double* const sum = sums.data();
    each_piece(row.columns, 1, threads, [=](int64_t begin, int64_t end) {
      sum[begin / PIECE] = signs(row, bits, begin, end);
    });
    double total = 0;
    for (double of_piece : sums) total += of_piece;
    const float magnitude = static_cast<float>(total / static_cast<double>(row.columns));
    std::memcpy(header, &magnitude, HEADER);
    if (!row.residual) return;
    const Lanes plus = Lanes::all(magnitude), minus = Lanes::all(-magnitude);
    each_piece(row.columns, 1, threads, [=](int64_t begin, int64_t end) {
      groups(end - begin, [=](int64_t i, int64_t count) {
        const Lanes v = row.at(begin + i, count);
        store(v - Lanes::choose(v.sign_bits(), plus, minus), row.residual + begin + i, count);
      });
    });
  }
};

// The sum of `count` messages' rows over a divisor; returns whether their magnitudes are finite.
bool add_row(const Signs& codec, const uint8_t* messages, int64_t header, int64_t payload,
             int64_t count, int64_t stride, Divisor divisor, float* out, int64_t columns) {
  std::vector<float> magnitudes(count);
  bool finite = true;
  for (int64_t m = 0; m < count; ++m) {
    std::memcpy(&magnitudes[m], messages + m * stride + header, Signs::HEADER);
    finite &= std::isfinite(magnitudes[m]);
  }
  const float* const magnitude = magnitudes.data();
  const bool far = streams(out);
  each_piece(columns, 1, codec.threads, [=](int64_t begin, int64_t end) {
    groups(end - begin, [=](int64_t i, int64_t n) {
      const auto of = [=](int64_t m) {
        const Lanes plus = Lanes::all(magnitude[m]), minus = Lanes::all(-magnitude[m]);
        return Lanes::choose(get(messages + m * stride + payload, begin + i, n), plus, minus);
      };
      Lanes sum = of(0);
      for (int64_t m = 1; m < count; ++m) sum = sum + of(m);
      sum = divisor.of(sum);
      far ? stream(sum, out + begin + i, n) : store(sum, out + begin + i, n);
    });
    Lanes::fence();
  });
  return finite;
}

}  // namespace

extern "C" {
ROW_CODEC(signs, Signs)
}
