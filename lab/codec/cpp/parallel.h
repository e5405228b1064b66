// Divides work among threads: those of torch, if its OpenMP library is loaded.
//
// Between two operations torch's threads spin for milliseconds. Other threads would share the cores
// with them, and gain nothing. GOMP_parallel is what `#pragma omp parallel` calls (GNU's libgomp,
// and LLVM's and Intel's libraries too).

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

extern "C" __attribute__((weak)) void GOMP_parallel(void (*work)(void*), void* data,
                                                    unsigned threads, unsigned flags);

constexpr int64_t VALUES_PER_THREAD = 1 << 17;  // below this a thread costs more than it saves
constexpr int64_t PIECE = 1 << 16;              // values; a thread takes the next one when it is done

// Calls f() on `threads` threads, or on fewer.
template <class F>
void on_threads(int64_t threads, F f) {
  if (threads <= 1) return f();
  if (GOMP_parallel) {
    const auto call = [](void* work) { (*static_cast<F*>(work))(); };
    return GOMP_parallel(call, &f, static_cast<unsigned>(threads), 0);
  }
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; ++i) others.emplace_back(f);
  f();
  for (std::thread& other : others) other.join();
}

// Calls f(begin, end) for consecutive pieces of `count` items of `values` values each. Pieces do not
// depend on the number of threads.
template <class F>
void each_piece(int64_t count, int64_t values, int64_t threads, F f) {
  const int64_t size = std::max<int64_t>(PIECE / std::max<int64_t>(values, 1), 1);
  std::atomic<int64_t> next{0};
  on_threads(std::min(threads, count * values / VALUES_PER_THREAD), [&next, size, count, f] {
    for (int64_t begin; (begin = size * next++) < count;) f(begin, std::min(begin + size, count));
  });
}

// Calls f(item) for all items, which have `values` values in all, on up to `threads` threads.
template <class F>
void each_item(int64_t count, int64_t values, int64_t threads, F f) {
  std::atomic<int64_t> next{0};
  on_threads(std::min(threads, values / VALUES_PER_THREAD), [&next, count, f] {
    for (int64_t item; (item = next++) < count;) f(item);
  });
}
