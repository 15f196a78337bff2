// Swap kernels with 16-byte loads and stores, for devices without bulk copies (before sm_90).
//
// A tile is one segment of at most 4 KiB. A warp copies one tile of one pair at a time, so the work
// spreads evenly over all warps, both for few large pages and for many small ones. Warps share no
// state and run in no particular order. kv_swap/cuda/kernel_families.py chooses the grid.

#include "swap.cuh"

namespace {

using namespace kv_swap;

constexpr u32 kThreads = 1024;

// Vectors of 16 bytes that a lane holds at once. With 4 CTAs, 128 KiB are in flight to the host and
// 256 KiB from it, the least with which bulk copies filled an H200's link (PCIe Gen5 x16). More
// would only back up the memory system and slow concurrent compute.
constexpr int kStoreVectors = 2;
constexpr int kLoadVectors = 4;

static_assert(kMaxPairs * sizeof(int2) <= 48 * 1024, "the pairs lie in static shared memory");

// Copies with one warp. Source and destination never overlap: one is on the host.
template <int kVectors>
__device__ __forceinline__ void copy_tile(uint4* __restrict__ destination,
                                          const uint4* __restrict__ source, u32 num_vectors,
                                          u32 lane) {
  for (u32 first = lane; first < num_vectors; first += kWarpSize * kVectors) {
    uint4 held[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (first + i * kWarpSize < num_vectors) held[i] = source[first + i * kWarpSize];
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (first + i * kWarpSize < num_vectors) destination[first + i * kWarpSize] = held[i];
    }
  }
}

template <bool kStore>
__device__ __forceinline__ void swap_pages(const ListHeader* list, const Segment* segments,
                                           u32 num_tiles, unsigned char* arena, u64 slot_bytes) {
  // Many warps use each pair, so it is fetched over the bus once per CTA.
  __shared__ int2 pairs[kMaxPairs];
  const int num_pairs = read_num_pairs(list);
  for (int i = threadIdx.x; i < num_pairs; i += kThreads) pairs[i] = read_pair(list, i);
  __syncthreads();

  const u32 lane = threadIdx.x % kWarpSize;
  // Neighbouring units go to different CTAs, so that a short list still uses all of them.
  const u32 warp = threadIdx.x / kWarpSize * gridDim.x + blockIdx.x;
  const u32 num_warps = kThreads / kWarpSize * gridDim.x;
  const u64 num_units = static_cast<u64>(num_pairs) * num_tiles;
  for (u64 unit = warp; unit < num_units; unit += num_warps) {
    const int2 pair = pairs[unit / num_tiles];
    const Segment segment = segments[unit % num_tiles];
    uint4* page = reinterpret_cast<uint4*>(page_address(segment, pair.x));
    uint4* slot = reinterpret_cast<uint4*>(arena + static_cast<u64>(pair.y) * slot_bytes +
                                           segment.slot_offset_bytes);
    const u32 num_vectors = segment.num_bytes / sizeof(uint4);
    if constexpr (kStore) {
      copy_tile<kStoreVectors>(slot, page, num_vectors, lane);
    } else {
      copy_tile<kLoadVectors>(page, slot, num_vectors, lane);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    swap_store(const ListHeader* list, const Segment* segments, u32 num_tiles,
               u32 /*segments_per_tile*/, unsigned char* arena, u64 slot_bytes) {
  swap_pages<true>(list, segments, num_tiles, arena, slot_bytes);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    swap_load(const ListHeader* list, const Segment* segments, u32 num_tiles,
              u32 /*segments_per_tile*/, unsigned char* arena, u64 slot_bytes) {
  swap_pages<false>(list, segments, num_tiles, arena, slot_bytes);
}
