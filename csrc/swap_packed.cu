// Swap kernels that losslessly pack tiles of 16 KiB of bf16 while copying, for sm_90 and later.
// kv_swap/packing/format.py specifies the format; kv_swap/packing/tiles.py writes the same bytes.
//
// A CTA has kGroups groups of 8 warps that share only the list of pairs. The 256 threads of a group
// transform one tile at a time together, 4 groups of 8 values per thread.
//
//   store  A group takes whole pairs and their tiles in order, so the values alone determine which
//          tiles get the pool's entries. Its warps pack into buffers. Two more warps do the rest,
//          so that no packing warp waits for the bus: the filler starts bulk copies into stages;
//          the drainer completes packed tiles with header and escapes, and starts bulk copies out
//          of buffers.
//   load   A group takes every n-th tile of all, unpacks it and writes the page itself. Its first
//          thread keeps bulk copies of the next tiles running.
//
// During the launch nothing else may write what these copies read, or read what they write:
//   - pages of the pairs' blocks, and their slots with the pools: their owner ensures it;
//   - the list in its entry of the ring: the host writes pairs before the launch, reads statuses
//     after its end, and only then reuses the entry. Each status has one thread that writes it;
//   - the tables of tiles and columns: they are written once, before the first launch. Tables of
//     waves are written on the stream of the launches that read them.
// In shared memory, a stage is refilled once all warps have its values, or once a bulk copy out of
// it has read it; a buffer is reused once its tail has been written and its drain has read it.

#include "bulk.cuh"
#include "packed.cuh"
#include "swap.cuh"

namespace {

using namespace kv_swap;

// A stage holds a tile and its columns, in this order.
struct StoreRing {
  static constexpr u32 kThreads = kGroups * (kGroupThreads + 2 * kWarpSize);
  static constexpr u32 kStages = KV_SWAP_STORE_STAGES;
  static constexpr u32 kStageBytes = kTileBytes + kColumnsBytes;
  static constexpr u32 kBuffers = KV_SWAP_STORE_BUFFERS;
  static constexpr u32 kGroupBytes = kStages * kStageBytes + kBuffers * kPackedTileBytes;
};
struct LoadRing {
  static constexpr u32 kThreads = kGroups * kGroupThreads;
  static constexpr u32 kStages = KV_SWAP_LOAD_STAGES;
  static constexpr u32 kStageBytes = kPackedTileBytes + kColumnsBytes;
  static constexpr u32 kGroupBytes = kStages * kStageBytes;
};

// A tile's escapes by warp, until they are put in order.
struct Escapes {
  uint2 exponents[kWarps][kMaxEscapes];
  u32 counts[kWarps];  // may exceed the room for escapes; then the tile is raw
};

// A buffer and its metadata, handed over from a store's warps to the drainer.
struct Packed {
  u32 greatest[kMaxColumns];  // magnitude of each column; zeros before a tile
  u32 zeros;                  // bit n: groups 32 n to 32 n + 31 have an exponent 0; 0 before a tile
  Escapes escapes;
};

// Describes the tile in a stage. The filler writes it, and the drainer reads it.
struct StoreWork {
  u64 slot_offset_bytes;
  u32 num_columns;
  u32 columns;
};

// State shared by a group that stores. Each barrier belongs to the stage or buffer with its index.
//
// One lane arrives for its warp, after __syncwarp; every thread that continues waits itself.
// compute-sanitizer's racecheck reports hazards between earlier accesses of a warp's other lanes
// and those after the wait, so tests/gpu/sanitize_run.py omits the store there.
struct StoreGroup {
  u64 filled[StoreRing::kStages];    // the tile has arrived
  u64 consumed[StoreRing::kStages];  // the filler may fill it again
  u64 packed[StoreRing::kBuffers];   // by all warps; the drainer has it
  u64 free[StoreRing::kBuffers];     // the warps may have it again
  StoreWork works[StoreRing::kStages];
  Packed handed[StoreRing::kBuffers];
};

// On a barrier without arrivals, waiting for the phase before the first one returns at once.
constexpr u32 kBeforeFirst = 1;

// Packs tiles with the 8 warps of a group.
__device__ __forceinline__ void pack_tiles(u32 group, u32 thread, u32 num_tiles, const u8* stages,
                                           u8* buffers, StoreGroup& shared) {
  using Ring = StoreRing;
  const u32 lane = thread % kWarpSize;
  const u32 warp = thread / kWarpSize;
  u32 stage = 0;
  u32 stage_parity = 0;
  u32 buffer = 0;
  u32 buffer_parity = kBeforeFirst;
  for (u32 tile = 0; tile < num_tiles; ++tile) {
    const u8* const in = stages + stage * Ring::kStageBytes;
    u8* const out = buffers + buffer * kPackedTileBytes;
    Packed& packed = shared.handed[buffer];
    wait_barrier(shared_address(&shared.free[buffer]), buffer_parity);
    wait_barrier(shared_address(&shared.filled[stage]), stage_parity);

    const u32 columns = reinterpret_cast<const u32*>(in + kTileBytes)[thread];
    uint4 words[kUnits];
    u32 magnitude[kUnits];
#pragma unroll
    for (u32 i = 0; i < kUnits; ++i) {
      words[i] = reinterpret_cast<const uint4*>(in)[i * kGroupThreads + thread];
      const u32 both = __vmaxu2(__vmaxu2(words[i].x & 0x7fff7fffu, words[i].y & 0x7fff7fffu),
                                __vmaxu2(words[i].z & 0x7fff7fffu, words[i].w & 0x7fff7fffu));
      magnitude[i] = max(both >> 16, both & 0xffff);
    }
    const bool same_column = columns == (columns & 0xff) * 0x01010101u;
    if (same_column) {
      atomicMax(packed.greatest + (columns & 0xff),
                max(max(magnitude[0], magnitude[1]), max(magnitude[2], magnitude[3])));
    } else {
#pragma unroll
      for (u32 i = 0; i < kUnits; ++i) {
        atomicMax(packed.greatest + column_of(columns, i), magnitude[i]);
      }
    }
    sync_group(group);

    u32 bases[kUnits];  // read before the first write to shared memory
    if (same_column) {
      bases[0] = base_of(packed.greatest[columns & 0xff]);
#pragma unroll
      for (u32 i = 1; i < kUnits; ++i) bases[i] = bases[0];
    } else {
#pragma unroll
      for (u32 i = 0; i < kUnits; ++i) bases[i] = base_of(packed.greatest[column_of(columns, i)]);
    }
    // Includes columns that the tile does not have: the drainer overwrites them.
    if (thread < kMaxColumns) {
      out[kMainBytes + 8 * kHeaderWords + thread] =
          static_cast<u8>(base_of(packed.greatest[thread]));
    }
    uint2 exponents[kUnits];
    u32 codes[kUnits];
    u32 outside[kUnits];
    u32 any_outside = 0;
    bool escapes = false;
#pragma unroll
    for (u32 i = 0; i < kUnits; ++i) {
      const Split split = split_values(words[i]);
      exponents[i] = split.exponents;
      reinterpret_cast<uint2*>(out)[i * kGroupThreads + thread] = split.mantissas;
      const uint2 own = above(split.exponents, bases[i]);
      codes[i] = join_codes(own);
      outside[i] = own.x | own.y;
      any_outside |= outside[i];
      escapes |= codes[i] == kEscapeCodes;
    }
    escapes |= (any_outside & kNoCode) != 0;
    u32 count = 0;
    // In typical KV, few groups have an exponent 0 or escape.
    if (__any_sync(~0u, escapes)) {
      u32 zeros = 0;
      escapes = false;
#pragma unroll
      for (u32 i = 0; i < kUnits; ++i) {
        if (__any_sync(~0u, has_zero(exponents[i]))) {
          const Codes own = codes_beside_zeros(exponents[i], bases[i]);
          codes[i] = own.joined;
          outside[i] = own.outside;
          zeros |= 1u << kWarps * i;
        }
        escapes |= (outside[i] & kNoCode) != 0 || codes[i] == kEscapeCodes;
      }
      if (zeros != 0 && lane == 0) atomicOr(&packed.zeros, zeros << warp);
      if (__any_sync(~0u, escapes)) {
#pragma unroll
        for (u32 i = 0; i < kUnits; ++i) {
          const bool own = (outside[i] & kNoCode) != 0 || codes[i] == kEscapeCodes;
          const u32 escaping = __ballot_sync(~0u, own);
          const u32 place = count + lanes_below(escaping, lane);
          if (own && place < kMaxEscapes) packed.escapes.exponents[warp][place] = exponents[i];
          if (own) codes[i] = kEscapeCodes;
          count += __popc(escaping);
        }
      }
    }
#pragma unroll
    for (u32 i = 0; i < kUnits; ++i) {
      reinterpret_cast<u32*>(out + kMantissaBytes)[i * kGroupThreads + thread] = codes[i];
    }
    if (lane == 0) packed.escapes.counts[warp] = count;
    fence_for_bulk_copies();
    __syncwarp();
    if (lane == 0) arrive(shared_address(&shared.packed[buffer]));
    if (++stage == Ring::kStages) {
      stage = 0;
      stage_parity ^= 1;
    }
    if (++buffer == Ring::kBuffers) {
      buffer = 0;
      buffer_parity ^= 1;
    }
  }
}

// One thread starts the bulk copies that fetch the tiles of a group's pairs.
__device__ __forceinline__ void fill_stages(const int2* pairs, u32 num_pairs, u32 first_pair,
                                            u32 pair_step, u32 num_tiles, TileFeed feed,
                                            const u8* columns_tables, u8* stages,
                                            StoreGroup& shared) {
  using Ring = StoreRing;
  feed.begin();
  u32 stage = 0;
  u32 parity = kBeforeFirst;
  for (u32 pair = first_pair; pair < num_pairs; pair += pair_step) {
    const u64 block = pairs[pair].x;
    for (u32 tile = 0; tile < num_tiles; ++tile) {
      const PackedTile row = feed.take();
      const u64 page = row.page_address + block * row.block_stride_bytes;
      const u32 filled = shared_address(&shared.filled[stage]);
      const u32 in = shared_address(stages + stage * Ring::kStageBytes);
      StoreWork& work = shared.works[stage];
      wait_barrier(shared_address(&shared.consumed[stage]), parity);
      // The columns of the last tile in this stage are still there.
      const bool other_columns = work.columns != row.columns;
      work = {row.slot_offset_bytes, row.num_columns, row.columns};
      expect_bytes(filled, other_columns ? kTileBytes + kColumnsBytes : kTileBytes);
      bulk_to_shared(in, page, kTileBytes, filled);
      if (other_columns) {
        const u64 columns = columns_address(columns_tables, row);
        bulk_to_shared(in + kTileBytes, columns, kColumnsBytes, filled);
      }
      if (++stage == Ring::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
  wait_fetched<0>();
}

// One warp writes a tile's header and escapes. A lane's strip is lane / 4; `before` counts the
// escapes of earlier strips, `count` those of this strip.
__device__ __forceinline__ void write_tail(u8* tail, u32 lane, const Escapes& escapes, u32 before,
                                           u32 count, u32 total, u32 with_zeros, u32 num_columns) {
  uint2* const words = reinterpret_cast<uint2*>(tail);
  const u32 first_escape = kHeaderWords + num_columns / 8;
  for (u32 word = first_escape + lane; word < kTailWords; word += kWarpSize) {
    words[word] = make_uint2(0, 0);
  }
  __syncwarp();
  const u32 strip = lane / 4;
  for (u32 place = lane % 4; place < count; place += 4) {
    words[first_escape + before + place] = escapes.exponents[strip][place];
  }
  if (lane % 4 == 0) tail[8 + strip] = static_cast<u8>(strip == 0 ? total : before);
  if (lane == 0) words[0] = make_uint2(kSignature | kKindPacked << 24, with_zeros);
}

__device__ __forceinline__ void write_raw_tail(u8* tail, u32 lane, u32 pool_entry) {
  const uint2 header = make_uint2(kSignature | kKindRaw << 24, pool_entry);
  for (u32 word = lane; word < kTailWords; word += kWarpSize) {
    reinterpret_cast<uint2*>(tail)[word] = word == 0 ? header : make_uint2(0, 0);
  }
}

// One warp completes the tiles of a group's pairs and starts the bulk copies to their slots.
__device__ __forceinline__ void drain_buffers(ListHeader* list, const int2* pairs, u32 num_pairs,
                                              u32 first_pair, u32 pair_step, u32 num_tiles,
                                              u32 lane, u64 arena, u64 slot_bytes, u32 pool_entries,
                                              const uint4* zeros, const u8* stages, u8* buffers,
                                              StoreGroup& shared) {
  using Ring = StoreRing;
  u32 stage = 0;
  u32 buffer = 0;
  u32 parity = 0;
  u32 drained = Ring::kBuffers;  // the buffer drained last, if any
  for (u32 pair = first_pair; pair < num_pairs; pair += pair_step) {
    const u64 slot = arena + static_cast<u64>(pairs[pair].y) * slot_bytes;
    const u64 pool = slot + slot_bytes - static_cast<u64>(pool_entries) * kPoolEntryBytes;
    u32 num_raw = 0;
    for (u32 tile = 0; tile < num_tiles; ++tile) {
      const u8* const in = stages + stage * Ring::kStageBytes;
      u8* const out = buffers + buffer * kPackedTileBytes;
      Packed& packed = shared.handed[buffer];
      const u32 consumed = shared_address(&shared.consumed[stage]);
      wait_barrier(shared_address(&shared.packed[buffer]), parity);
      const u64 target = slot + shared.works[stage].slot_offset_bytes;
      const u32 num_columns = shared.works[stage].num_columns;
      const u32 count = packed.escapes.counts[lane / 4];
      const u32 with_zeros = packed.zeros;
      u32 before = count;  // of this strip and earlier ones, then only of earlier ones
#pragma unroll
      for (u32 distance = 4; distance < kWarpSize; distance *= 2) {
        const u32 lower = __shfl_up_sync(~0u, before, distance);
        if (lane >= distance) before += lower;
      }
      const u32 total = __shfl_sync(~0u, before, kWarpSize - 1);
      before -= count;
      const bool fits = total <= kTailWords - kHeaderWords - num_columns / 8;
      __syncwarp();
      if (fits) {
        if (lane == 0) arrive(consumed);
        write_tail(out + kMainBytes, lane, packed.escapes, before, count, total, with_zeros,
                   num_columns);
      } else {
        write_raw_tail(out + kMainBytes, lane, num_raw);
      }
      for (u32 column = lane; column < kMaxColumns; column += kWarpSize) {
        packed.greatest[column] = 0;
      }
      if (lane == 0) packed.zeros = 0;
      fence_for_bulk_copies();
      __syncwarp();
      if (lane == 0) {
        if (fits) {
          bulk_from_shared(target, shared_address(out), kPackedTileBytes);
        } else {
          bulk_from_shared(target, shared_address(in), kMainBytes);
          bulk_from_shared(target + kMainBytes, shared_address(out + kMainBytes), kTailBytes);
          if (num_raw < pool_entries) {
            bulk_from_shared(pool + num_raw * kPoolEntryBytes, shared_address(in + kMainBytes),
                             kPoolEntryBytes);
          }
        }
        if (tile + 1 == num_tiles) {
          const u32 used = num_raw + (fits ? 0 : 1);
          for (u32 entry = used; entry < pool_entries; ++entry) {
            bulk_from_shared(pool + entry * kPoolEntryBytes, shared_address(zeros),
                             kPoolEntryBytes);
          }
          write_status(list, pair, used > pool_entries ? 1 : 0);
        }
        commit_drain();
        if (fits) {
          wait_drained<1>();
        } else {
          wait_drained<0>();  // the bulk copy reads the stage itself
          arrive(consumed);
        }
        if (drained < Ring::kBuffers) arrive(shared_address(&shared.free[drained]));
      }
      __syncwarp();
      drained = buffer;
      if (!fits) ++num_raw;
      if (++stage == Ring::kStages) stage = 0;
      if (++buffer == Ring::kBuffers) {
        buffer = 0;
        parity ^= 1;
      }
    }
  }
  // Shared memory must outlive the reads, and the launch must outlive the writes.
  if (lane == 0) wait_written();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(StoreRing::kThreads, 1)
    swap_store(ListHeader* list, const PackedTile* tiles, u32 num_tiles, u32 /*segments_per_tile*/,
               u64 arena, u64 slot_bytes, const u8* columns_tables, u32 pool_entries) {
  using Ring = StoreRing;
  static_assert(Ring::kBuffers >= 3, "one to pack into, one to end, one to drain");
  extern __shared__ __align__(128) u8 shared_bytes[];  // kGroups * Ring::kGroupBytes
  __shared__ __align__(128) uint4 zeros[kPoolEntryBytes / sizeof(uint4)];
  __shared__ int2 pairs[kMaxPairs];
  __shared__ TileFeed::Places places[kGroups];
  __shared__ StoreGroup groups[kGroups];

  // The packing warps come first, group by group, then the drainers, then the fillers.
  constexpr u32 kPackingThreads = kGroups * kGroupThreads;
  const bool packs = threadIdx.x < kPackingThreads;
  const u32 other_warp = (threadIdx.x - kPackingThreads) / kWarpSize;
  const u32 group = packs ? threadIdx.x / kGroupThreads : other_warp % kGroups;
  const bool fills = !packs && other_warp >= kGroups;
  const u32 lane = threadIdx.x % kWarpSize;
  const u32 first_pair = blockIdx.x * kGroups + group;
  const u32 pair_step = gridDim.x * kGroups;
  u8* const stages = shared_bytes + group * Ring::kGroupBytes;
  u8* const buffers = stages + Ring::kStages * Ring::kStageBytes;
  StoreGroup& shared = groups[group];

  const u32 num_pairs = read_pairs<Ring::kThreads>(list, pairs);
  for (u32 i = threadIdx.x; i < kPoolEntryBytes / sizeof(uint4); i += Ring::kThreads) {
    zeros[i] = make_uint4(0, 0, 0, 0);
  }
  if (fills) {
    for (u32 i = lane; i < Ring::kBuffers * kMaxColumns; i += kWarpSize) {
      shared.handed[i / kMaxColumns].greatest[i % kMaxColumns] = 0;
    }
    if (lane == 0) {
      for (Packed& packed : shared.handed) packed.zeros = 0;
      for (u64& barrier : shared.filled) init_barrier(shared_address(&barrier), 1);
      for (u64& barrier : shared.consumed) init_barrier(shared_address(&barrier), 1);
      for (u64& barrier : shared.packed) init_barrier(shared_address(&barrier), kWarps);
      for (u64& barrier : shared.free) init_barrier(shared_address(&barrier), 1);
      for (StoreWork& work : shared.works) work.columns = ~0u;
    }
  }
  publish_barriers();
  fence_for_bulk_copies();
  __syncthreads();

  if (packs) {
    const u32 num_own = first_pair < num_pairs ? (num_pairs - 1 - first_pair) / pair_step + 1 : 0;
    pack_tiles(group, threadIdx.x % kGroupThreads, num_own * num_tiles, stages, buffers, shared);
  } else if (fills) {
    const TileFeed feed(tiles, num_tiles, 0, 1, places[group]);
    if (lane == 0) {
      fill_stages(pairs, num_pairs, first_pair, pair_step, num_tiles, feed, columns_tables, stages,
                  shared);
    }
  } else {
    drain_buffers(list, pairs, num_pairs, first_pair, pair_step, num_tiles, lane, arena, slot_bytes,
                  pool_entries, zeros, stages, buffers, shared);
  }
}

extern "C" __global__ void __launch_bounds__(LoadRing::kThreads, 1)
    swap_load(const ListHeader* list, const PackedTile* tiles, u32 num_tiles,
              u32 /*segments_per_tile*/, u64 arena, u64 slot_bytes, const u8* columns_tables,
              u32 pool_entries) {
  using Ring = LoadRing;
  static_assert(Ring::kStages >= 2, "a barrier lies between filling a stage and reading its work");
  // Describes the tile in a stage to all threads of a group; written when the stage is filled.
  struct Work {
    u64 page_address;
    u64 slot_address;
    u32 num_columns;
    u32 columns;
  };
  extern __shared__ __align__(128) u8 shared_bytes[];  // kGroups * Ring::kGroupBytes
  __shared__ int2 pairs[kMaxPairs];
  __shared__ u64 barriers[kGroups][Ring::kStages];
  __shared__ TileFeed::Places places[kGroups];
  __shared__ Work works[kGroups][Ring::kStages];

  const u32 group = threadIdx.x / kGroupThreads;
  const u32 thread = threadIdx.x % kGroupThreads;
  const u32 lane = thread % kWarpSize;
  const u32 warp = thread / kWarpSize;
  const u32 first_tile = blockIdx.x * kGroups + group;
  const u32 tile_step = gridDim.x * kGroups;
  u8* const stages = shared_bytes + group * Ring::kGroupBytes;
  const u32 first_barrier = shared_address(barriers[group]);

  const u32 num_pairs = read_pairs<Ring::kThreads>(list, pairs);
  if (thread < Ring::kStages) {
    init_barrier(first_barrier + thread * sizeof(u64), 1);
    works[group][thread].columns = ~0u;
  }
  publish_barriers();
  __syncthreads();

  // The next tile to fill; only the first thread uses these.
  TileFeed feed(tiles, num_tiles, first_tile, tile_step, places[group]);
  u32 filled_pair = first_tile / num_tiles;
  u32 filled_tile = first_tile % num_tiles;
  const auto fill = [&](u32 stage) {
    if (filled_pair >= num_pairs) return;
    const PackedTile row = feed.take();
    const int2 pair = pairs[filled_pair];
    const u64 page = row.page_address + static_cast<u64>(pair.x) * row.block_stride_bytes;
    const u64 slot = arena + static_cast<u64>(pair.y) * slot_bytes;
    const u32 barrier = first_barrier + stage * sizeof(u64);
    const u32 in = shared_address(stages + stage * Ring::kStageBytes);
    Work& work = works[group][stage];
    // The columns of the last tile in this stage are still there.
    const bool other_columns = work.columns != row.columns;
    work = {page, slot, row.num_columns, row.columns};
    expect_bytes(barrier, other_columns ? kPackedTileBytes + kColumnsBytes : kPackedTileBytes);
    bulk_to_shared(in, slot + row.slot_offset_bytes, kPackedTileBytes, barrier);
    if (other_columns) {
      const u64 columns = columns_address(columns_tables, row);
      bulk_to_shared(in + kPackedTileBytes, columns, kColumnsBytes, barrier);
    }
    filled_tile += tile_step;
    while (filled_tile >= num_tiles) {
      filled_tile -= num_tiles;
      ++filled_pair;
    }
  };
  if (thread == 0) {
    feed.begin();
    for (u32 stage = 0; stage < Ring::kStages; ++stage) fill(stage);
  }
  sync_group(group);

  u32 stage = 0;
  u32 parity = 0;
  for (u32 tile = first_tile; tile < num_pairs * num_tiles; tile += tile_step) {
    const u8* const in = stages + stage * Ring::kStageBytes;
    const u8* const tail = in + kMainBytes;
    wait_barrier(first_barrier + stage * sizeof(u64), parity);
    // Written before the group's last barrier.
    const Work work = works[group][stage];
    uint4* const page = reinterpret_cast<uint4*>(work.page_address);

    const uint2 header = *reinterpret_cast<const uint2*>(tail);
    if (header.x >> 24 != kKindRaw) {
      const u32 columns = reinterpret_cast<const u32*>(in + kPackedTileBytes)[thread];
      uint2 mantissas[kUnits];
      u32 codes[kUnits];
#pragma unroll
      for (u32 i = 0; i < kUnits; ++i) {
        const u32 place = i * kGroupThreads + thread;
        mantissas[i] = reinterpret_cast<const uint2*>(in)[place];
        codes[i] = reinterpret_cast<const u32*>(in + kMantissaBytes)[place];
      }
      uint2 exponents[kUnits];
      u32 bases[kUnits];  // to add
      bool escaped = false;
#pragma unroll
      for (u32 i = 0; i < kUnits; ++i) {
        bases[i] = tail[8 * kHeaderWords + column_of(columns, i)];
        exponents[i] = split_codes(codes[i]);
        escaped |= codes[i] == kEscapeCodes;
      }
      const u32 zeros = header.y >> warp & kOnes;
      if (zeros != 0) {
#pragma unroll
        for (u32 i = 0; i < kUnits; ++i) {
          if ((zeros >> kWarps * i & 1) != 0) {
            exponents[i] = exponents_beside_zeros(exponents[i], bases[i]);
            bases[i] = 0;
          }
        }
      }
      if (__any_sync(~0u, escaped)) {
        u32 word = kHeaderWords + work.num_columns / 8;  // of the next escape
        if (warp != 0) word += tail[8 + warp];
#pragma unroll
        for (u32 i = 0; i < kUnits; ++i) {
          const u32 escaping = __ballot_sync(~0u, codes[i] == kEscapeCodes);
          if (codes[i] == kEscapeCodes) {
            // A slot with garbage must not cause accesses outside the tile.
            const u32 escape = min(word + lanes_below(escaping, lane), kTailWords - 1);
            exponents[i] = reinterpret_cast<const uint2*>(tail)[escape];
            bases[i] = 0;
          }
          word += __popc(escaping);
        }
      }
#pragma unroll
      for (u32 i = 0; i < kUnits; ++i) {
        page[i * kGroupThreads + thread] = join_values(exponents[i], mantissas[i], bases[i]);
      }
    } else {
      // Reads the rest of the tile directly from the pool over the bus, which is rare.
      const u32 entry = min(header.y, pool_entries - 1);
      const u64 pool =
          work.slot_address + slot_bytes - static_cast<u64>(pool_entries) * kPoolEntryBytes;
      const uint4 rest =
          __ldcv(reinterpret_cast<const uint4*>(pool + entry * kPoolEntryBytes) + thread);
      for (u32 place = thread; place < kMainBytes / sizeof(uint4); place += kGroupThreads) {
        page[place] = reinterpret_cast<const uint4*>(in)[place];
      }
      page[kMainBytes / sizeof(uint4) + thread] = rest;
    }
    sync_group(group);
    if (thread == 0) fill(stage);
    if (++stage == Ring::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  if (thread == 0) wait_fetched<0>();
}
