// Input of every swap kernel: the list of a launch and the table of a layout.
//
// kv_swap/cuda/swap.py writes lists, kv_swap/cuda/tiles.py writes tables. There are no includes,
// because NVRTC compiles this on machines without a CUDA toolkit.
#pragma once

#ifndef KV_SWAP_MAX_PAIRS
#error "kv_swap/cuda/swap.py defines KV_SWAP_MAX_PAIRS"
#endif

namespace kv_swap {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 kWarpSize = 32;
constexpr int kMaxPairs = KV_SWAP_MAX_PAIRS;
static_assert(kMaxPairs % kWarpSize == 0, "a warp reads 32 pairs at a time, up to the list's end");

// Precedes a list's (block, slot) pairs in host memory. After room for the maximum number of pairs
// comes one status byte per pair; only a packing store writes them, and the host reads them once
// the store has ended.
struct alignas(16) ListHeader {
  int num_pairs;
  int unused[3];
};
static_assert(sizeof(ListHeader) == 16, "kv_swap/cuda/swap.py writes a header of 16 bytes");

// One run of a block's bytes. A slot is cut into tiles, and a tile into segments. Row t of the
// table holds the segments of tile t in the order of their slot offsets, padded with empty ones.
struct alignas(16) Segment {
  u64 page_address;  // in block 0
  u64 block_stride_bytes;
  u64 slot_offset_bytes;
  u32 num_bytes;
  u32 tile_bytes;  // of all segments of the tile; they are contiguous in the slot
};
static_assert(sizeof(Segment) == 32, "kv_swap/cuda/tiles.py writes segments of 32 bytes");

__device__ __forceinline__ u64 page_address(const Segment& segment, int block) {
  return segment.page_address + static_cast<u64>(block) * segment.block_stride_bytes;
}

// For host memory that changes between launches: bypasses caches.
__device__ __forceinline__ int read_num_pairs(const ListHeader* list) {
  return max(0, min(__ldcv(&list->num_pairs), kMaxPairs));
}

__device__ __forceinline__ int2 read_pair(const ListHeader* list, u32 index) {
  return __ldcv(reinterpret_cast<const int2*>(list + 1) + index);
}

// 1 means refused: the block does not fit its packed slot.
__device__ __forceinline__ void write_status(ListHeader* list, u32 index, u8 status) {
  u8* bytes = reinterpret_cast<u8*>(reinterpret_cast<int2*>(list + 1) + kMaxPairs);
  __stwt(bytes + index, status);
}

}  // namespace kv_swap
