// Random values, taken out of gradient + residual in one pass over memory.
//
// Implements the definition in lab/exchange/randomk.py: places are drawn again where they are
// needed, so that nobody keeps them.

#include <atomic>
#include <cstdint>
#include <limits>

#include "loops.h"
#include "parallel.h"

namespace {

// The output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
inline uint64_t mix(uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

struct Draw {
  int64_t count, wanted;
  uint64_t seed;

  int64_t edge(int64_t range) const { return range * count / wanted; }

  // Calls f(range, place) for ranges begin ... end.
  template <class F>
  void each(int64_t begin, int64_t end, F f) const {
    const int64_t width = count / wanted, rest = count % wanted;
    int64_t low = edge(begin), fraction = begin * count % wanted;
    for (int64_t range = begin; range < end; ++range) {
      fraction += rest;
      const bool wider = fraction >= wanted;
      fraction -= wider ? wanted : 0;
      const int64_t high = low + width + wider;
      const uint64_t drawn = mix(seed + static_cast<uint64_t>(range) * 0x9e3779b97f4a7c15u) >> 32;
      f(range, low + static_cast<int64_t>(drawn * static_cast<uint64_t>(high - low) >> 32));
      low = high;
    }
  }

  // Calls f(begin, end) for pieces of the ranges.
  template <class F>
  void each_piece(int64_t threads, F f) const {
    if (wanted) ::each_piece(wanted, count / wanted, threads, f);
  }
};

// Adds the gradient to the residual, and returns whether all sums are finite.
inline bool add(const float* gradient, float* residual, int64_t begin, int64_t end) {
  Lanes probe = Lanes::all(0);
  groups(end - begin, [&](int64_t i, int64_t count) {
    Lanes v = load(gradient + begin + i, count);
    if (residual) {
      v = load(residual + begin + i, count) + v;
      store(v, residual + begin + i, count);
    }
    probe = probe + (v - v);
  });
  return probe.at_least(Lanes::all(0)) == first(W);
}

// A parameter of a bucket: a row of Draws.table.
struct Parameter {
  int64_t start, count, place, wanted, seed;

  Draw draw() const { return {count, wanted, static_cast<uint64_t>(seed)}; }
};

}  // namespace

extern "C" {

// Takes `wanted` values of each parameter out of gradients + residuals. They leave zeros in the
// residuals, unless these are null. `probe` becomes NaN if a value is not finite.
void randomk_encode(const float* gradients, float* residuals, float* message, float* probe,
                    const Parameter* parameters, int64_t number, int64_t threads) {
  std::atomic<bool> finite{true};
  for (const Parameter* p = parameters; p < parameters + number; ++p) {
    const Draw draw = p->draw();
    const float* gradient = gradients + p->start;
    float *residual = residuals ? residuals + p->start : nullptr, *sent = message + p->place;
    const float* sum = residual ? residual : gradient;
    draw.each_piece(threads, [=, &finite](int64_t begin, int64_t end) {
      if (!add(gradient, residual, draw.edge(begin), draw.edge(end))) finite = false;
      draw.each(begin, end, [=](int64_t range, int64_t place) {
        sent[range] = sum[place];
        if (residual) residual[place] = 0;
      });
    });
  }
  if (!finite) *probe = std::numeric_limits<float>::quiet_NaN();
}

// Fills the parameters in `out` with the values at their places, and zeros elsewhere.
void randomk_decode(const float* message, float* out, const Parameter* parameters, int64_t number,
                    int64_t threads) {
  for (const Parameter* p = parameters; p < parameters + number; ++p) {
    const Draw draw = p->draw();
    const float* sent = message + p->place;
    float* values = out + p->start;
    draw.each_piece(threads, [=](int64_t begin, int64_t end) {
      std::memset(values + draw.edge(begin), 0,
                  (draw.edge(end) - draw.edge(begin)) * sizeof(float));
      draw.each(begin, end, [=](int64_t range, int64_t place) { values[place] = sent[range]; });
    });
  }
}
}
