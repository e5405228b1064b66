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

// A magnitude that 1.25 times the wanted values reach, and a few; 0 if the sample is too small.
float threshold(const Row& row, int64_t wanted) {
  const int64_t lines = std::max(row.columns / (LINE * LINES_APART), FEWEST_LINES);
  const int64_t apart = std::max(row.columns / lines, LINE);
  std::vector<float> sample;
  sample.reserve(lines * LINE);
  for (int64_t first = 0; first + LINE <= row.columns; first += apart)
    for (int64_t i = first; i < first + LINE; ++i)
      sample.push_back(row.residual ? row.residual[i] + row.values[i] : row.values[i]);
  const int64_t size = static_cast<int64_t>(sample.size());
  const int64_t rank = 5 * wanted * size / (4 * row.columns) + 5;
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
void collect(const Row& row, float least, int64_t most, int64_t threads, Found& found) {
  found.pieces.resize((row.columns + PIECE - 1) / PIECE);
  const Lanes limit = Lanes::all(least);
  each_piece(row.columns, 1, threads, [=, &found](int64_t begin, int64_t end) {
    std::vector<Candidate>& piece = found.pieces[begin / PIECE];
    groups(end - begin, [&](int64_t i, int64_t number) {
      const int64_t at = begin + i;
      const Lanes v = row.at(at, number);
      if (row.residual) store(v, row.residual + at, number);
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

struct TopK {
  static constexpr bool LONG = true;
  static constexpr int64_t HEADER = 0;
  double ratio;
  int64_t threads;

  // `share` is a float64, bit by bit.
  TopK(int64_t share, int64_t threads) : threads(threads) {
    std::memcpy(&ratio, &share, sizeof ratio);
  }
  int64_t sent(int64_t columns) const {
    return static_cast<int64_t>(std::ceil(ratio * static_cast<double>(columns)));
  }
  int64_t width(int64_t columns) const { return 8 * sent(columns); }

  // Takes the values of largest magnitude out of gradient + residual. They leave zeros in the
  // residual, unless that is null. Of equal magnitudes the first are taken.
  void encode(const Row& row, uint8_t*, uint8_t* payload) const {
    const int64_t wanted = sent(row.columns);
    int32_t* indices = reinterpret_cast<int32_t*>(payload);
    float* values = reinterpret_cast<float*>(indices + wanted);
    Found found;
    const int64_t most = 16 * (wanted * PIECE / row.columns + LINE);
    collect(row, threshold(row, wanted), most, threads, found);
    const float* sum = row.residual ? row.residual : row.values;
    Place last{};
    const auto take = [&](float value, int64_t index) {
      const uint32_t key = key_of(value);
      if (key < last.key || (key == last.key && last.equals-- <= 0)) return;
      *values++ = value;
      *indices++ = static_cast<int32_t>(index);
      if (row.residual) row.residual[index] = 0;
    };
    if (found.complete && found.count() >= wanted) {
      last = find(wanted, [&](auto f) { found.each([&](float v, int64_t) { f(v); }); });
      found.each(take);
    } else {  // the sample was not like the rest
      last = find(wanted, [&](auto f) { std::for_each(sum, sum + row.columns, f); });
      for (int64_t i = 0; i < row.columns; ++i) take(sum[i], i);
    }
  }
};

// The sum of `count` messages' rows over a divisor; returns whether all values are finite.
bool add_row(const TopK& codec, const uint8_t* messages, int64_t, int64_t payload, int64_t count,
             int64_t stride, Divisor divisor, float* out, int64_t columns) {
  const int64_t sent = codec.sent(columns);
  std::atomic<bool> finite{true};
  each_piece(columns, 1, codec.threads, [=, &finite](int64_t begin, int64_t end) {
    std::memset(out + begin, 0, (end - begin) * sizeof(float));
    float probe = 0;
    for (int64_t m = 0; m < count; ++m) {
      const int32_t* indices = reinterpret_cast<const int32_t*>(messages + m * stride + payload);
      const float* values = reinterpret_cast<const float*>(indices + sent);
      int64_t i = std::lower_bound(indices, indices + sent, begin) - indices;
      for (; i < sent && indices[i] < end; ++i) {
        out[indices[i]] += values[i];
        probe += values[i] - values[i];
      }
    }
    if (!(probe == 0)) finite = false;
    if (!divisor.is_one)
      groups(end - begin, [=](int64_t i, int64_t n) {
        store(divisor.of(load(out + begin + i, n)), out + begin + i, n);
      });
  });
  return finite;
}

}  // namespace

extern "C" {
ROW_CODEC(topk, TopK)
}
