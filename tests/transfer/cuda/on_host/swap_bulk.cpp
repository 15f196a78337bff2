// The kernels of bulk copies, compiled for a CPU: tests/transfer/cuda/test_bulk_on_host.py.

namespace {
thread_local __attribute__((aligned(128))) unsigned char tiles[227 << 10];  // dynamic shared memory
}

#include "swap_bulk.cu"

// Returns 0, or 1 if the threads of a CTA wait for each other, or do not wait for their copies.
extern "C" int launch(int late, int stores, u32 ctas, u32 threads, ListHeader* list,
                      const Segment* segments, u32 num_tiles, u32 segments_per_tile, u64 arena,
                      u64 slot_bytes) {
  on_host::late = late;
  const bool ended = on_host::launch(ctas, threads, [&] {
    if (stores) {
      swap_store(list, segments, num_tiles, segments_per_tile, arena, slot_bytes);
    } else {
      swap_load(list, segments, num_tiles, segments_per_tile, arena, slot_bytes);
    }
  });
  return ended ? 0 : 1;
}
