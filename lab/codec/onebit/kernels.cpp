// One bit per value and two reconstruction values per row, fused with the residual.
//
// Implements the definition in lab/codec/onebit/reference.py; lab/codec/build.py compiles it for
// this processor. A row is read from memory once: later passes find it in the cache. Sums
// are double, so that they do not depend on the width of registers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#include <immintrin.h>

struct Lanes {
  static constexpr int64_t width = 16;
  __m512 v;
  static Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Lanes all(float x) { return {_mm512_set1_ps(x)}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void stream(float* p) const { _mm512_stream_ps(p, v); }
  static void fence() { _mm_sfence(); }
  Lanes operator+(Lanes o) const { return {_mm512_add_ps(v, o.v)}; }
  Lanes operator-(Lanes o) const { return {_mm512_sub_ps(v, o.v)}; }
  Lanes magnitude() const { return {_mm512_abs_ps(v)}; }
  uint32_t at_least(Lanes o) const { return _mm512_cmp_ps_mask(v, o.v, _CMP_GE_OQ); }
  static Lanes choose(uint32_t bits, Lanes zero, Lanes one) {
    return {_mm512_mask_blend_ps(static_cast<__mmask16>(bits), zero.v, one.v)};
  }
};

struct Sum {
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
  void add(Lanes x) {
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(x.v)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1)));
  }
  double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(low, high)); }
};

#elif defined(__AVX2__)
#include <immintrin.h>

struct Lanes {
  static constexpr int64_t width = 8;
  __m256 v;
  static Lanes load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Lanes all(float x) { return {_mm256_set1_ps(x)}; }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void stream(float* p) const { _mm256_stream_ps(p, v); }
  static void fence() { _mm_sfence(); }
  Lanes operator+(Lanes o) const { return {_mm256_add_ps(v, o.v)}; }
  Lanes operator-(Lanes o) const { return {_mm256_sub_ps(v, o.v)}; }
  Lanes magnitude() const { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v)}; }
  uint32_t at_least(Lanes o) const {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(v, o.v, _CMP_GE_OQ)));
  }
  static Lanes choose(uint32_t bits, Lanes zero, Lanes one) {
    const __m256i place = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), place);
    return {_mm256_blendv_ps(zero.v, one.v, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, place)))};
  }
};

struct Sum {
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  void add(Lanes x) {
    low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(x.v)));
    high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(x.v, 1)));
  }
  double total() const {
    double parts[4];
    _mm256_storeu_pd(parts, _mm256_add_pd(low, high));
    return parts[0] + parts[1] + parts[2] + parts[3];
  }
};

#else  // pairs of the compiler's 16-byte vectors, which every processor has

struct Lanes {
  static constexpr int64_t width = 8;
  typedef float Floats __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));
  static constexpr Ints places[2] = {{1, 2, 4, 8}, {16, 32, 64, 128}};
  Floats low, high;
  static Lanes load(const float* p) {
    Lanes out;
    std::memcpy(&out, p, sizeof out);
    return out;
  }
  static Lanes all(float x) { return {Floats{} + x, Floats{} + x}; }
  void store(float* p) const { std::memcpy(p, this, sizeof *this); }
  void stream(float* p) const { store(p); }
  static void fence() {}
  Lanes operator+(Lanes o) const { return {low + o.low, high + o.high}; }
  Lanes operator-(Lanes o) const { return {low - o.low, high - o.high}; }
  Lanes magnitude() const { return {low < 0 ? -low : low, high < 0 ? -high : high}; }
  uint32_t at_least(Lanes o) const {
    const Ints set = ((low >= o.low) & places[0]) | ((high >= o.high) & places[1]);
    return static_cast<uint32_t>(set[0] | set[1] | set[2] | set[3]);
  }
  static Lanes choose(uint32_t bits, Lanes zero, Lanes one) {
    const Ints all = Ints{} + static_cast<int32_t>(bits);
    return {(all & places[0]) == places[0] ? one.low : zero.low,
            (all & places[1]) == places[1] ? one.high : zero.high};
  }
};

struct Sum {
  typedef double Doubles __attribute__((vector_size(16)));
  Doubles parts[4] = {};
  void add(Lanes x) {
    parts[0] += Doubles{x.low[0], x.low[1]};
    parts[1] += Doubles{x.low[2], x.low[3]};
    parts[2] += Doubles{x.high[0], x.high[1]};
    parts[3] += Doubles{x.high[2], x.high[3]};
  }
  double total() const {
    const Doubles sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    return sum[0] + sum[1];
  }
};

#endif

namespace {

constexpr int64_t W = Lanes::width;
constexpr int64_t VALUES_PER_THREAD = 1 << 17;  // below this a thread costs more than it saves

// Calls f(first, count) for groups of W values, and for the remainder.
template <class F>
inline void groups(int64_t columns, F f) {
  int64_t i = 0;
  for (; i + W <= columns; i += W) f(i, W);
  if (i < columns) f(i, columns - i);
}

// The first `count` values, and zeros after them.
inline Lanes load(const float* p, int64_t count) {
  if (count == W) return Lanes::load(p);
  float padded[W] = {};
  std::memcpy(padded, p, count * sizeof(float));
  return Lanes::load(padded);
}

inline void store(Lanes x, float* p, int64_t count) {
  if (count == W) return x.store(p);
  float padded[W];
  x.store(padded);
  std::memcpy(p, padded, count * sizeof(float));
}

inline uint32_t first(int64_t count) { return (1u << count) - 1; }

inline void put(uint32_t mask, uint8_t* bits, int64_t i, int64_t count) {
  for (int64_t byte = 0; byte < (count + 7) / 8; ++byte)
    bits[i / 8 + byte] = static_cast<uint8_t>(mask >> 8 * byte);
}

inline uint32_t get(const uint8_t* bits, int64_t i, int64_t count) {
  uint32_t mask = 0;
  for (int64_t byte = 0; byte < (count + 7) / 8; ++byte)
    mask |= static_cast<uint32_t>(bits[i / 8 + byte]) << 8 * byte;
  return mask;
}

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

// Like replace, but bypasses the cache: memory is not read before it is written.
inline void replace_far(const float* scales, const uint8_t* bits, float* out, int64_t columns) {
  if (reinterpret_cast<uintptr_t>(out) % sizeof(Lanes)) return replace(scales, bits, out, columns);
  decoded(scales, bits, columns, [=](int64_t i, int64_t count, Lanes value) {
    if (count == W) return value.stream(out + i);
    store(value, out + i, count);
  });
  Lanes::fence();
}

// Calls f(row) for all rows, on up to `threads` threads.
template <class F>
void each_row(int64_t rows, int64_t columns, int64_t threads, F f) {
  threads = std::min({threads, rows, rows * columns / VALUES_PER_THREAD});
  threads = std::max<int64_t>(threads, 1);
  const auto share = [=](int64_t part) {
    for (int64_t row = rows * part / threads; row < rows * (part + 1) / threads; ++row) f(row);
  };
  std::vector<std::thread> others;
  for (int64_t part = 1; part < threads; ++part) others.emplace_back(share, part);
  share(0);
  for (std::thread& other : others) other.join();
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
void onebit_reduce(const float* scales, const uint8_t* bits, int64_t ranks, int64_t scales_stride,
                   int64_t bits_stride, float* residual, float* out_scales, uint8_t* out_bits,
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
