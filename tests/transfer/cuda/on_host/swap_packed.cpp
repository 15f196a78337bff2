// The kernels that pack, compiled for a CPU: tests/transfer/cuda/test_packed_on_host.py.

#include "swap_packed.cu"

// Returns 0, or 1 if the threads of a CTA wait for each other, or do not wait for their copies.
extern "C" int launch(int late, int stores, u32 ctas, u32 threads, ListHeader* list,
                      const PackedTile* tiles, u32 num_tiles, u64 arena, u64 slot_bytes,
                      const u8* columns, u32 pool_entries) {
  on_host::late = late;
  const bool ended = on_host::launch(ctas, threads, [&] {
    if (stores) {
      swap_store(list, tiles, num_tiles, 1, arena, slot_bytes, columns, pool_entries);
    } else {
      swap_load(list, tiles, num_tiles, 1, arena, slot_bytes, columns, pool_entries);
    }
  });
  return ended ? 0 : 1;
}
