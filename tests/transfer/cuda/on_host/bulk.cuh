// As csrc/include/bulk.cuh, on a CPU. Copies are made when they are issued, or, if `on_host::late`,
// as late as they may be: those that leave shared memory and those of 16 bytes once they are waited
// for, and others, the last that was issued first, when no thread comes further without them.
#pragma once

#include "swap.cuh"

thread_local __attribute__((aligned(128))) unsigned char shared_bytes[227 << 10];

namespace kv_swap {

// How far it lies behind the dynamic shared memory. The static lies beside this.
inline u32 shared_address(const void* pointer) {
  return static_cast<u32>(reinterpret_cast<u64>(pointer) - reinterpret_cast<u64>(shared_bytes));
}

inline u8* at_shared(u32 address) { return shared_bytes + static_cast<int>(address); }

template <u32 kThreads>
void sync_threads(u32 number) {
  on_host::meet(on_host::cta->barriers[number], kThreads);
}

struct Barrier {
  u8 arrivals;  // that end a phase
  u8 missing_arrivals;
  u8 parity;
  int missing_bytes;
};
static_assert(sizeof(Barrier) == sizeof(u64));

inline Barrier& at_barrier(u32 barrier) { return *reinterpret_cast<Barrier*>(at_shared(barrier)); }

inline void end_phase(Barrier& barrier) {
  on_host::cta->moved = true;
  if (barrier.missing_arrivals != 0 || barrier.missing_bytes != 0) return;
  barrier.missing_arrivals = barrier.arrivals;
  barrier.parity ^= 1;
}

inline void init_barrier(u32 barrier, u32 arrivals) {
  const u8 count = static_cast<u8>(arrivals);
  at_barrier(barrier) = {count, count, 0, 0};
}

inline void arrive(u32 barrier) {
  --at_barrier(barrier).missing_arrivals;
  end_phase(at_barrier(barrier));
}

inline void publish_barriers() {}

inline void expect_bytes(u32 barrier, u32 num_bytes) {
  at_barrier(barrier).missing_bytes += static_cast<int>(num_bytes);
  arrive(barrier);
}

inline void wait_barrier(u32 barrier, u32 parity) {
  on_host::wait_until([&] { return at_barrier(barrier).parity != parity; });
}

inline void bulk_to_shared(u32 destination, u64 source, u32 num_bytes, u32 barrier) {
  const auto copy = [=] {
    std::memcpy(at_shared(destination), reinterpret_cast<const void*>(source), num_bytes);
    at_barrier(barrier).missing_bytes -= static_cast<int>(num_bytes);
    end_phase(at_barrier(barrier));
  };
  if (on_host::late) {
    on_host::cta->late_copies.push_back(copy);
  } else {
    copy();
  }
}

inline void bulk_from_shared(u64 destination, u32 source, u32 num_bytes) {
  on_host::cta->current->drains.add(
      [=] { std::memcpy(reinterpret_cast<void*>(destination), at_shared(source), num_bytes); });
}

inline void commit_drain() { on_host::cta->current->drains.commit(); }

template <int kPending>
void wait_drained() {
  on_host::cta->current->drains.wait(kPending);
}

inline void wait_written() { on_host::cta->current->drains.wait(0); }

inline void fence_for_bulk_copies() {}

inline void fetch_16_bytes(u32 destination, const void* source) {
  on_host::cta->current->fetches.add([=] { std::memcpy(at_shared(destination), source, 16); });
}

inline void commit_fetch() { on_host::cta->current->fetches.commit(); }

template <int kPending>
void wait_fetched() {
  on_host::cta->current->fetches.wait(kPending);
}

}  // namespace kv_swap
