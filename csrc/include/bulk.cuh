// Asynchronous copies: bulk copies between shared and global memory (sm_90 and later), small copies
// from global to shared memory, and the barriers that they need. Host memory is global memory here.
// All PTX is in this file; tests/transfer/cuda/on_host has a replacement for CPUs.
#pragma once

#include "swap.cuh"

namespace kv_swap {

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Waits for kThreads threads at one of a CTA's 16 barriers; __syncthreads uses number 0.
template <u32 kThreads>
__device__ __forceinline__ void sync_threads(u32 number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}

// A phase of the barrier ends after this many arrivals and all expected bytes.
__device__ __forceinline__ void init_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Makes initialised barriers visible to the copies that will complete on them.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Also arrives at the barrier.
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(num_bytes)
               : "memory");
}

__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "retry:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra retry;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void bulk_to_shared(u32 destination, u64 source, u32 num_bytes,
                                               u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(source), "r"(num_bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void bulk_from_shared(u64 destination, u32 source, u32 num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(num_bytes)
               : "memory");
}

__device__ __forceinline__ void commit_drain() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but this lane's last kPending groups have left shared memory.
template <int kPending>
__device__ __forceinline__ void wait_drained() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void wait_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Orders this thread's writes to shared memory before bulk copies issued after a barrier.
__device__ __forceinline__ void fence_for_bulk_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void fetch_16_bytes(u32 destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(destination),
               "l"(__cvta_generic_to_global(source))
               : "memory");
}

__device__ __forceinline__ void commit_fetch() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but this thread's last kPending groups of fetches have arrived.
template <int kPending>
__device__ __forceinline__ void wait_fetched() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace kv_swap
