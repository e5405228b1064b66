// Half a byte for each value, the first of two in the lower half.

#include "levels.h"

namespace {

struct Halves {
  static constexpr float LARGEST = 15;
  static int64_t width(int64_t columns) { return (columns + 1) / 2; }
  static void put(const uint8_t* bytes, uint8_t* payload, int64_t i, int64_t count) {
    uint8_t* const out = payload + i / 2;  // groups begin at even places
    for (int64_t k = 0; k < count / 2; ++k)
      out[k] = static_cast<uint8_t>(bytes[2 * k] | bytes[2 * k + 1] << 4);
    if (count % 2) out[count / 2] = bytes[count - 1];
  }
  static void get(const uint8_t* payload, uint8_t* bytes, int64_t i, int64_t count) {
    const uint8_t* const in = payload + i / 2;
    for (int64_t k = 0; k < count / 2; ++k) {
      bytes[2 * k] = in[k] & 15;
      bytes[2 * k + 1] = in[k] >> 4;
    }
    if (count % 2) bytes[count - 1] = in[count / 2] & 15;
  }
};

}  // namespace

extern "C" {
ROW_CODEC(int4, Levels<Halves>)
}
