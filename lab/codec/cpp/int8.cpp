// A byte for each value.

#include "levels.h"

namespace {

struct Bytes {
  static constexpr float LARGEST = 255;
  static int64_t width(int64_t columns) { return columns; }
  static void put(const uint8_t* bytes, uint8_t* payload, int64_t i, int64_t count) {
    std::memcpy(payload + i, bytes, count);
  }
  static void get(const uint8_t* payload, uint8_t* bytes, int64_t i, int64_t count) {
    std::memcpy(bytes, payload + i, count);
  }
};

}  // namespace

extern "C" {
ROW_CODEC(int8, Levels<Bytes>)
}
