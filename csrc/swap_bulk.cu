// Swap kernels with bulk copies through shared memory, for sm_90 and later.
//
// A tile is up to 32 segments that are contiguous in the slot. The host side of a tile is one bulk
// copy; the device side is one per segment, each issued by one lane. So pages smaller than a tile
// cost the link nothing. One warp per CTA drives a ring of stages:
//
//   fill(stage)   source -> shared memory, completes on the stage's mbarrier
//   drain(stage)  shared memory -> destination, a bulk group per lane
//
// Fills run up to kStages - kDrains tiles ahead, while kDrains tiles are being drained. This bounds
// the bytes in flight to what the link needs; more would back up the memory system and slow down
// concurrent compute. kv_swap/cuda/kernel_families.py chooses the numbers.

#include "bulk.cuh"
#include "swap.cuh"

namespace {

using namespace kv_swap;

struct StoreRing {
  static constexpr int kStages = KV_SWAP_STORE_STAGES;
  static constexpr int kDrains = KV_SWAP_DRAINS;
  static constexpr u32 kTileBytes = KV_SWAP_STORE_TILE_BYTES;
};
struct LoadRing {
  static constexpr int kStages = KV_SWAP_LOAD_STAGES;
  static constexpr int kDrains = KV_SWAP_DRAINS;
  static constexpr u32 kTileBytes = KV_SWAP_LOAD_TILE_BYTES;
};

// The tiles of one CTA, in the order of the pairs: every gridDim.x-th of all tiles of all pairs.
// Lane i holds pair 32 * batch + i; meanwhile the next batch is fetched over the bus.
class TileCursor {
 public:
  __device__ TileCursor(const ListHeader* list, u32 num_tiles, u32 lane)
      : list_(list), num_tiles_(num_tiles), lane_(lane) {
    // One round trip for all three reads; pairs past the count are never used.
    num_pairs_ = read_num_pairs(list);
    held_ = read_batch(0);
    ahead_ = read_batch(1);
    step(blockIdx.x);
  }

  __device__ bool valid() const { return pair_ < num_pairs_; }
  __device__ int block() const { return __shfl_sync(~0u, held_.x, pair_ % kWarpSize); }
  __device__ int slot() const { return __shfl_sync(~0u, held_.y, pair_ % kWarpSize); }
  __device__ void next() { step(gridDim.x); }

 private:
  __device__ int2 read_batch(u32 batch) const {
    const u32 index = batch * kWarpSize + lane_;
    return index < kMaxPairs ? read_pair(list_, index) : make_int2(0, 0);
  }

  __device__ void step(u32 tiles) {
    tile_ += tiles;
    while (tile_ >= num_tiles_) {
      tile_ -= num_tiles_;
      if (++pair_ % kWarpSize == 0) {
        held_ = ahead_;
        ahead_ = read_batch(pair_ / kWarpSize + 1);
      }
    }
  }

  const ListHeader* list_;
  u32 num_tiles_;
  u32 lane_;
  u32 tile_ = 0;
  int pair_ = 0;
  int num_pairs_;
  int2 held_;
  int2 ahead_;
};

// The segments of one CTA's tiles, in the order of the tiles: lane i has segment i of each.
//
// Segments are fetched kFetched - 1 tiles ahead. Compute evicts the table from the L2, so segments
// fetched only one tile ahead would arrive after the tile: loads next to decodes moved 32 GB/s
// instead of 51. A place is overwritten only after its segment has been taken.
class SegmentCursor {
 public:
  static constexpr u32 kFetched = 8;
  using Places = Segment[kFetched][kWarpSize];  // in shared memory, one column per lane

  __device__ SegmentCursor(const Segment* table, u32 num_tiles, u32 segments_per_tile, u32 lane,
                           Places& places)
      : table_(table),
        num_tiles_(num_tiles),
        segments_per_tile_(segments_per_tile),
        lane_(lane),
        tile_(blockIdx.x % num_tiles),
        places_(places) {
    for (u32 i = 0; i < kFetched - 1; ++i) fetch();
  }

  // Segments past those of the tile have no bytes.
  __device__ Segment take() {
    wait_fetched<kFetched - 2>();
    Segment segment{};
    if (lane_ < segments_per_tile_) segment = places_[taken_ % kFetched][lane_];
    ++taken_;
    fetch();
    return segment;
  }

  __device__ void finish() { wait_fetched<0>(); }

 private:
  __device__ void fetch() {
    if (lane_ < segments_per_tile_) {
      const Segment* source = table_ + static_cast<u64>(tile_) * segments_per_tile_ + lane_;
      const u32 place = shared_address(&places_[fetched_ % kFetched][lane_]);
      fetch_16_bytes(place, source);
      fetch_16_bytes(place + 16, reinterpret_cast<const unsigned char*>(source) + 16);
    }
    commit_fetch();  // one group per tile, on every lane
    ++fetched_;
    tile_ = (tile_ + gridDim.x) % num_tiles_;
  }

  const Segment* table_;
  u32 num_tiles_;
  u32 segments_per_tile_;
  u32 lane_;
  u32 tile_;
  u32 fetched_ = 0;
  u32 taken_ = 0;
  Places& places_;
};

// A lane's share of draining a stage; none if num_bytes is 0.
struct alignas(16) Drain {
  u64 destination;
  u32 offset_bytes;
  u32 num_bytes;
};

template <typename Ring, bool kStore>
__device__ __forceinline__ void swap_tiles(const ListHeader* list, const Segment* segments,
                                           u32 num_tiles, u32 segments_per_tile, u64 arena,
                                           u64 slot_bytes) {
  constexpr int kStages = Ring::kStages;
  static_assert(0 < Ring::kDrains && Ring::kDrains < kStages, "a stage to fill, one to drain");
  static_assert(Ring::kTileBytes % 128 == 0, "stages stay aligned for bulk copies");
  extern __shared__ __align__(128) unsigned char tiles[];  // kStages * kTileBytes
  __shared__ u64 barriers[kStages];
  __shared__ Drain drains[kStages][kWarpSize];
  __shared__ SegmentCursor::Places places;

  const u32 lane = threadIdx.x;
  const u32 first_stage = shared_address(tiles);
  const u32 first_barrier = shared_address(barriers);
  if (lane < kStages) init_barrier(first_barrier + lane * sizeof(u64), 1);
  publish_barriers();

  SegmentCursor next_segments(segments, num_tiles, segments_per_tile, lane, places);
  TileCursor cursor(list, num_tiles, lane);
  __syncwarp();

  // All lanes take part, and all must have drained the stage before.
  const auto fill = [&](int stage) {
    const u32 stage_address = first_stage + stage * Ring::kTileBytes;
    const u32 barrier = first_barrier + stage * sizeof(u64);
    const Segment segment = next_segments.take();
    const u64 page = page_address(segment, cursor.block());
    const u64 tile_offset = __shfl_sync(~0u, segment.slot_offset_bytes, 0);
    const u32 offset = static_cast<u32>(segment.slot_offset_bytes - tile_offset);
    const u64 host = arena + static_cast<u64>(cursor.slot()) * slot_bytes + tile_offset;
    Drain& drain = drains[stage][lane];
    if (lane == 0) expect_bytes(barrier, segment.tile_bytes);
    __syncwarp();
    if constexpr (kStore) {
      if (segment.num_bytes != 0) {
        bulk_to_shared(stage_address + offset, page, segment.num_bytes, barrier);
      }
      drain = {host, 0, lane == 0 ? segment.tile_bytes : 0};
    } else {
      if (lane == 0) bulk_to_shared(stage_address, host, segment.tile_bytes, barrier);
      drain = {page, offset, segment.num_bytes};
    }
    cursor.next();
  };

  int num_filled = 0;  // stages filled but not drained yet, or being drained
  for (; num_filled < kStages && cursor.valid(); ++num_filled) fill(num_filled);

  int stage = 0;     // to drain next
  int refill = 0;    // drained longest ago
  int draining = 0;  // stages, from refill, whose drains may still read shared memory
  u32 parity = 0;
  for (; num_filled > draining;) {
    wait_barrier(first_barrier + stage * sizeof(u64), parity);
    const Drain drain = drains[stage][lane];
    if (drain.num_bytes != 0) {
      bulk_from_shared(drain.destination,
                       first_stage + stage * Ring::kTileBytes + drain.offset_bytes,
                       drain.num_bytes);
    }
    commit_drain();
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
    if (++draining > Ring::kDrains) {
      wait_drained<Ring::kDrains>();
      __syncwarp();
      --draining;
      if (cursor.valid()) {
        fill(refill);
      } else {
        --num_filled;
      }
      if (++refill == kStages) refill = 0;
    }
  }
  // Shared memory must outlive the reads and fetches, and the launch must outlive the writes.
  next_segments.finish();
  wait_written();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kWarpSize)
    swap_store(const ListHeader* list, const Segment* segments, u32 num_tiles,
               u32 segments_per_tile, u64 arena, u64 slot_bytes) {
  swap_tiles<StoreRing, true>(list, segments, num_tiles, segments_per_tile, arena, slot_bytes);
}

extern "C" __global__ void __launch_bounds__(kWarpSize)
    swap_load(const ListHeader* list, const Segment* segments, u32 num_tiles, u32 segments_per_tile,
              u64 arena, u64 slot_bytes) {
  swap_tiles<LoadRing, false>(list, segments, num_tiles, segments_per_tile, arena, slot_bytes);
}
