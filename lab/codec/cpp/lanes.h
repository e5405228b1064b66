// Registers of float32 values and sums of them, for the instructions that the compiler may use.
//
// `Lanes` holds `width` values; a mask has a bit for each, the first value's lowest. `min` and `max`
// return `o` where either value is NaN. `to_bytes` truncates values from 0 to 255.99. `Sum` adds up
// lanes as double, so that a total does not depend on the width of registers.

#pragma once

#include <cstdint>
#include <cstring>

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
  Lanes operator*(Lanes o) const { return {_mm512_mul_ps(v, o.v)}; }
  Lanes operator/(Lanes o) const { return {_mm512_div_ps(v, o.v)}; }
  Lanes min(Lanes o) const { return {_mm512_min_ps(v, o.v)}; }
  Lanes max(Lanes o) const { return {_mm512_max_ps(v, o.v)}; }
  Lanes magnitude() const { return {_mm512_abs_ps(v)}; }
  uint32_t at_least(Lanes o) const { return _mm512_cmp_ps_mask(v, o.v, _CMP_GE_OQ); }
  uint32_t below(Lanes o) const { return _mm512_cmp_ps_mask(v, o.v, _CMP_LT_OQ); }
  uint32_t sign_bits() const { return _mm512_movepi32_mask(_mm512_castps_si512(v)); }
  static Lanes from_bytes(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))};
  }
  void to_bytes(uint8_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(v)));
  }
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
  Lanes operator*(Lanes o) const { return {_mm256_mul_ps(v, o.v)}; }
  Lanes operator/(Lanes o) const { return {_mm256_div_ps(v, o.v)}; }
  Lanes min(Lanes o) const { return {_mm256_min_ps(v, o.v)}; }
  Lanes max(Lanes o) const { return {_mm256_max_ps(v, o.v)}; }
  Lanes magnitude() const { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v)}; }
  uint32_t at_least(Lanes o) const {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(v, o.v, _CMP_GE_OQ)));
  }
  uint32_t below(Lanes o) const {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(v, o.v, _CMP_LT_OQ)));
  }
  uint32_t sign_bits() const { return static_cast<uint32_t>(_mm256_movemask_ps(v)); }
  static Lanes from_bytes(const uint8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))};
  }
  void to_bytes(uint8_t* p) const {
    const __m256i whole = _mm256_cvttps_epi32(v);
    const __m128i pairs =
        _mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(pairs, pairs));
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

#else  // pairs of the compiler's own 16-byte vectors, which every processor has

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
  Lanes operator*(Lanes o) const { return {low * o.low, high * o.high}; }
  Lanes operator/(Lanes o) const { return {low / o.low, high / o.high}; }
  Lanes min(Lanes o) const {
    return {low < o.low ? low : o.low, high < o.high ? high : o.high};
  }
  Lanes max(Lanes o) const {
    return {low > o.low ? low : o.low, high > o.high ? high : o.high};
  }
  Lanes magnitude() const { return {low < 0 ? -low : low, high < 0 ? -high : high}; }
  uint32_t at_least(Lanes o) const { return mask(low >= o.low, high >= o.high); }
  uint32_t below(Lanes o) const { return mask(low < o.low, high < o.high); }
  uint32_t sign_bits() const {
    return mask(reinterpret_cast<Ints>(low) < 0, reinterpret_cast<Ints>(high) < 0);
  }
  static uint32_t mask(Ints first, Ints second) {
    const Ints set = (first & places[0]) | (second & places[1]);
    return static_cast<uint32_t>(set[0] | set[1] | set[2] | set[3]);
  }
  static Lanes from_bytes(const uint8_t* p) {
    float values[width];
    for (int64_t i = 0; i < width; ++i) values[i] = p[i];
    return load(values);
  }
  void to_bytes(uint8_t* p) const {
    float values[width];
    store(values);
    for (int64_t i = 0; i < width; ++i) p[i] = static_cast<uint8_t>(static_cast<int32_t>(values[i]));
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
