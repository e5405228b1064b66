// The values of largest magnitude, taken out of gradient + residual in one pass over memory.
//
// lab/codec/codecs.py defines them. A sample gives a threshold that somewhat more values than
// wanted exceed; the pass that adds the residual collects these, and the largest are selected among
// them (Lin et al., Deep Gradient Compression, 2018, section 3).

#include "rows.h"

namespace {

constexpr int64_t LINE = 16;  // values of a cache line, which a sample takes whole
constexpr int64_t LINES_APART = 100, FEWEST_LINES = 256;

struct Candidate {
  float value;
  int32_t index;
};

// Magnitudes as integers of the same order; NaN comes after infinity.
inline uint32_t key_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x7fffffffu;
}

struct Place {
  uint32_t key;
  int64_t equals;  // how many of the values with this key are wanted
};

// The rank-th largest key, by a histogram of eleven bits at a time. each(f) calls f(value) for all.
template <class Each>
Place find(int64_t rank, Each each) {
  uint32_t known = 0, mask = 0;
  for (const int shift : {20, 10, 0}) {
    constexpr uint32_t digits = 2047;
    int64_t counts[digits + 1] = {};
    each([&](float value) {
      const uint32_t key = key_of(value);
      if ((key & mask) == known) ++counts[(key & ~mask) >> shift];
    });
    uint32_t digit = digits;
    for (; counts[digit] < rank; --digit) rank -= counts[digit];
    known |= digit << shift;
    mask |= digits << shift;
  }
  return {known, rank};
}

struct Values {
  const float* gradient;
  float* residual;  // or null
  int64_t count;

  float at(int64_t i) const { return residual ? residual[i] + gradient[i] : gradient[i]; }
};

// A magnitude that 1.25 times the wanted values reach, and a few; 0 if the sample is too small.
float threshold(const Values& p, int64_t wanted) {
  const int64_t lines = std::max(p.count / (LINE * LINES_APART), FEWEST_LINES);
  const int64_t apart = std::max(p.count / lines, LINE);
  std::vector<float> sample;
  sample.reserve(lines * LINE);
  for (int64_t first = 0; first + LINE <= p.count; first += apart)
    for (int64_t i = first; i < first + LINE; ++i) sample.push_back(p.at(i));
  const int64_t size = static_cast<int64_t>(sample.size());
  const int64_t rank = 5 * wanted * size / (4 * p.count) + 5;
  if (rank > size) return 0;
  const uint32_t key = find(rank, [&](auto f) { for (float v : sample) f(v); }).key;
  float least;
  std::memcpy(&least, &key, sizeof least);
  return least;
}

// The candidates of each piece, in order.
struct Found {
  std::vector<std::vector<Candidate>> pieces;
  std::atomic<bool> complete{true};  // no piece had to give up

  template <class F>
  void each(F f) const {
    for (const auto& piece : pieces)
      for (const Candidate& c : piece) f(c.value, c.index);
  }
  int64_t count() const {
    int64_t total = 0;
    for (const auto& piece : pieces) total += static_cast<int64_t>(piece.size());
    return total;
  }
};

// Adds the gradient to the residual, unless that is null, and collects magnitudes from `least` on.
void collect(const Values& p, float least, int64_t most, int64_t threads, Found& found) {
  found.pieces.resize((p.count + PIECE - 1) / PIECE);
  const Lanes limit = Lanes::all(least);
  each_piece(p.count, 1, threads, [=, &found](int64_t begin, int64_t end) {
    std::vector<Candidate>& piece = found.pieces[begin / PIECE];
    groups(end - begin, [&](int64_t i, int64_t number) {
      const int64_t at = begin + i;
      Lanes v = load(p.gradient + at, number);
      if (p.residual) {
        v = load(p.residual + at, number) + v;
        store(v, p.residual + at, number);
      }
      uint32_t large = ~v.magnitude().below(limit) & first(number);  // NaN too
      if (!large) return;
      if (static_cast<int64_t>(piece.size()) > most) {
        found.complete = false;
        return;
      }
      float values[W];
      v.store(values);
      for (; large; large &= large - 1) {
        const int lane = __builtin_ctz(large);
        piece.push_back({values[lane], static_cast<int32_t>(at + lane)});
      }
    });
  });
}

// How many of a row's values are sent: `share` is a float64, bit by bit.
inline int64_t sent_of(int64_t columns, int64_t share) {
  double ratio;
  std::memcpy(&ratio, &share, sizeof ratio);
  return static_cast<int64_t>(std::ceil(ratio * static_cast<double>(columns)));
}

// Takes the `wanted` values of largest magnitude out of gradient + residual. They leave zeros in the
// residual, unless that is null. Of equal magnitudes the first are taken.
void encode(const Values& p, int32_t* indices, int64_t wanted, int64_t threads) {
  float* values = reinterpret_cast<float*>(indices + wanted);
  Found found;
  const int64_t most = 16 * (wanted * PIECE / p.count + LINE);
  collect(p, threshold(p, wanted), most, threads, found);
  const float* sum = p.residual ? p.residual : p.gradient;
  Place last{};
  const auto take = [&](float value, int64_t index) {
    const uint32_t key = key_of(value);
    if (key < last.key || (key == last.key && last.equals-- <= 0)) return;
    *values++ = value;
    *indices++ = static_cast<int32_t>(index);
    if (p.residual) p.residual[index] = 0;
  };
  if (found.complete && found.count() >= wanted) {
    last = find(wanted, [&](auto f) { found.each([&](float v, int64_t) { f(v); }); });
    found.each(take);
  } else {  // the sample was not like the rest
    last = find(wanted, [&](auto f) { std::for_each(sum, sum + p.count, f); });
    for (int64_t i = 0; i < p.count; ++i) take(sum[i], i);
  }
}

// The sum of `count` messages' rows over a divisor; returns whether all values are finite.
bool add_up(const uint8_t* payload, int64_t count, int64_t stride, Divisor divisor, float* out,
            int64_t columns, int64_t sent, int64_t threads) {
  std::atomic<bool> finite{true};
  each_piece(columns, 1, threads, [=, &finite](int64_t begin, int64_t end) {
    std::memset(out + begin, 0, (end - begin) * sizeof(float));
    const auto each = [=](auto f) {
      for (int64_t m = 0; m < count; ++m) {
        const int32_t* indices = reinterpret_cast<const int32_t*>(payload + m * stride);
        const float* values = reinterpret_cast<const float*>(indices + sent);
        int64_t i = std::lower_bound(indices, indices + sent, begin) - indices;
        for (; i < sent && indices[i] < end; ++i) f(m, indices[i], values[i]);
      }
    };
    float probe = 0;
    each([&](int64_t, int32_t at, float value) {
      out[at] += value;
      probe += value - value;
    });
    if (!(probe == 0)) finite = false;
    if (!divisor.is_one)
      groups(end - begin, [=](int64_t i, int64_t n) {
        store(divisor.of(load(out + begin + i, n)), out + begin + i, n);
      });
  });
  return finite;
}

template <class F>
void each_long_row(const Piece* pieces, int64_t num_pieces, int64_t share, F f) {
  for (int64_t i = 0; i < num_pieces; ++i) {
    const Piece p = pieces[i];
    const int64_t sent = sent_of(p.columns, share);
    for (int64_t r = 0; r < p.rows; ++r)
      f(p.start + r * p.columns, p.payload + r * 8 * sent, p.columns, sent);
  }
}

}  // namespace

extern "C" {

void topk_encode(const float* values, float* residual, uint8_t* message, const Piece* pieces,
                 const Copy* copies, int64_t num_pieces, int64_t num_copies, int64_t,
                 int64_t share, int64_t threads) {
  each_long_row(pieces, num_pieces, share,
                [=](int64_t at, int64_t payload, int64_t columns, int64_t sent) {
                  const Values p{values + at, residual ? residual + at : nullptr, columns};
                  encode(p, reinterpret_cast<int32_t*>(message + payload), sent, threads);
                });
  copy_values(copies, num_copies, values, message);
}

void topk_add_up(const uint8_t* messages, float* out, uint8_t* finite, const Piece* pieces,
                 const Copy* copies, int64_t num_pieces, int64_t num_copies, int64_t, int64_t count,
                 int64_t stride, int64_t divisor, int64_t share, int64_t threads) {
  bool all = add_copies(copies, num_copies, messages, count, stride, Divisor(divisor), out);
  each_long_row(pieces, num_pieces, share,
                [=, &all](int64_t at, int64_t payload, int64_t columns, int64_t sent) {
                  all &= add_up(messages + payload, count, stride, Divisor(divisor), out + at,
                                columns, sent, threads);
                });
  *finite = all;
}

void topk_reduce(const uint8_t* messages, float* residual, uint8_t* out, const Piece* pieces,
                 const Copy* copies, int64_t num_pieces, int64_t num_copies, int64_t, int64_t count,
                 int64_t stride, int64_t share, int64_t threads) {
  std::vector<float> sum;
  each_long_row(pieces, num_pieces, share,
                [=, &sum](int64_t at, int64_t payload, int64_t columns, int64_t sent) {
                  sum.resize(columns);
                  add_up(messages + payload, count, stride, Divisor(1), sum.data(), columns, sent,
                         threads);
                  const Values p{sum.data(), residual ? residual + at : nullptr, columns};
                  encode(p, reinterpret_cast<int32_t*>(out + payload), sent, threads);
                });
  sum_copies(copies, num_copies, messages, count, stride, out);
}
}
