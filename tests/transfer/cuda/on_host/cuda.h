// What the kernels need of CUDA, on a CPU: a CTA's threads are fibers of one thread, by turns.
//
// They give way wherever they wait, and go on forwards and backwards by turns. Shared memory is
// this thread's own. The CTAs of a launch run one after the other.
#pragma once

// Some compilers define it, as Ubuntu's. The C library then aborts at a jump to another stack.
#undef _FORTIFY_SOURCE

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local
#define threadIdx (on_host::cta->current->index)
#define blockIdx (on_host::cta->index)
#define gridDim (on_host::cta->count)

using std::max;
using std::min;

struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace on_host {

struct Index {
  unsigned x;
};

inline bool late = false;  // whether copies are made as late as they may be

using Copy = std::function<void()>;

// Copies of a thread, which it waits for by groups.
class Groups {
 public:
  void add(Copy copy) {
    if (late) {
      groups_.back().push_back(std::move(copy));
    } else {
      copy();
    }
  }

  void commit() { groups_.emplace_back(); }

  // Makes all copies but those of the last groups that were committed.
  void wait(size_t pending) {
    while (groups_.size() - 1 > pending) {
      for (const Copy& copy : groups_.front()) copy();
      groups_.pop_front();
    }
  }

  bool is_empty() const { return groups_.size() == 1 && groups_.front().empty(); }

 private:
  std::deque<std::vector<Copy>> groups_{1};
};

struct Fiber {
  Index index;
  ucontext_t start;
  jmp_buf place;  // jumps are ten times as fast as swapcontext, which calls the kernel
  std::unique_ptr<char[]> stack;
  Groups drains, fetches;
  bool started = false;
  bool ended = false;
};

struct Meeting {
  unsigned arrived = 0;
  unsigned number = 0;  // of those that have ended
};

struct Warp {
  Meeting meeting;
  unsigned long long values[2][32];  // of this meeting and of the last
};

struct Cta {
  Index index, count;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Meeting barriers[16];
  Fiber* current = nullptr;
  jmp_buf scheduler;
  std::function<void()> kernel;
  std::vector<Copy> late_copies;  // to shared memory
  bool moved = false;  // whether any fiber came further in this round
};

inline Cta* cta = nullptr;

inline void give_way() {
  if (_setjmp(cta->current->place) == 0) _longjmp(cta->scheduler, 1);
}

inline void go_on(Fiber& fiber) {
  cta->current = &fiber;
  if (_setjmp(cta->scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

template <typename Condition>
void wait_until(Condition condition) {
  while (!condition()) give_way();
  cta->moved = true;
}

inline void meet(Meeting& meeting, unsigned count) {
  const unsigned number = meeting.number;
  cta->moved = true;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.number;
  }
  wait_until([&] { return meeting.number != number; });
}

// What the lanes of a warp have brought.
inline const unsigned long long* exchange(unsigned long long value) {
  const unsigned thread = cta->current->index.x;
  Warp& warp = cta->warps[thread / 32];
  unsigned long long* values = warp.values[warp.meeting.number % 2];
  values[thread % 32] = value;
  meet(warp.meeting, 32);
  return values;
}

inline void begin() {
  cta->kernel();
  cta->current->ended = true;
  cta->moved = true;
  give_way();
}

// Returns false if all threads wait for each other, or if one ends with copies under way.
inline bool launch(unsigned ctas, unsigned threads, std::function<void()> kernel) {
  for (unsigned index = 0; index < ctas; ++index) {
    Cta own;
    cta = &own;
    own.index = {index};
    own.count = {ctas};
    own.kernel = kernel;
    own.fibers.resize(threads);
    own.warps.resize(threads / 32);
    for (unsigned i = 0; i < threads; ++i) {
      constexpr size_t kStackBytes = 32 << 10;
      Fiber& fiber = own.fibers[i];
      fiber.index = {i};
      fiber.stack.reset(new char[kStackBytes]);
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = fiber.stack.get();
      fiber.start.uc_stack.ss_size = kStackBytes;
      makecontext(&fiber.start, begin, 0);
    }
    bool backwards = false;
    do {
      own.moved = false;
      for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = own.fibers[backwards ? threads - 1 - i : i];
        if (!fiber.ended) go_on(fiber);
      }
      backwards = !backwards;
      if (!own.moved && !own.late_copies.empty()) {
        const Copy copy = std::move(own.late_copies.back());
        own.late_copies.pop_back();
        copy();
      }
    } while (own.moved);
    const auto ended = [](const Fiber& fiber) {
      return fiber.ended && fiber.drains.is_empty() && fiber.fetches.is_empty();
    };
    if (!std::all_of(own.fibers.begin(), own.fibers.end(), ended)) return false;
  }
  return true;
}

}  // namespace on_host

inline void __syncthreads() {
  on_host::meet(on_host::cta->barriers[0], on_host::cta->fibers.size());
}
inline void __syncwarp() { on_host::exchange(0); }
inline unsigned __ballot_sync(unsigned, bool value) {
  const unsigned long long* values = on_host::exchange(value);
  unsigned mask = 0;
  for (unsigned lane = 0; lane < 32; ++lane) mask |= static_cast<unsigned>(values[lane]) << lane;
  return mask;
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
template <typename T>
T __shfl_sync(unsigned, T value, unsigned lane) {
  return static_cast<T>(on_host::exchange(value)[lane]);
}
inline unsigned __shfl_up_sync(unsigned, unsigned value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return on_host::exchange(value)[lane >= distance ? lane - distance : lane];
}
inline void atomicMax(unsigned* place, unsigned value) { *place = max(*place, value); }
inline void atomicOr(unsigned* place, unsigned bits) { *place |= bits; }
inline unsigned __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return high << shift | low >> (32 - shift);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return low >> shift | high << (32 - shift);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selectors) {
  const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    result |= (bytes >> 8 * (selectors >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return result;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff);
}
template <typename T>
T __ldcv(const T* place) {
  return *place;
}
template <typename T>
void __stwt(T* place, T value) {
  *place = value;
}
