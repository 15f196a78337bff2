// Used by packing and unpacking: the format of a tile, the table of tiles, and the table's reader.
//
// kv_swap/packing/format.py specifies the format and its constants; kv_swap/cuda/tiles.py writes
// the tables.
#pragma once

#include "bulk.cuh"
#include "codes.cuh"
#include "swap.cuh"

#ifndef KV_SWAP_PACKED_TILE_BYTES
#error "kv_swap/cuda/kernel_families.py defines KV_SWAP_PACKED_TILE_BYTES and the like"
#endif

namespace kv_swap {

constexpr u32 kTileBytes = 16384;
constexpr u32 kMantissaBytes = 8192;
constexpr u32 kMainBytes = 12288;  // with the codes; of a raw tile the part in its place
constexpr u32 kPoolEntryBytes = kTileBytes - kMainBytes;
constexpr u32 kPackedTileBytes = KV_SWAP_PACKED_TILE_BYTES;
constexpr u32 kTailBytes = kPackedTileBytes - kMainBytes;  // header, bases and escapes
constexpr u32 kTailWords = kTailBytes / 8;
constexpr u32 kHeaderWords = 2;  // of 8 bytes; an escape is one, and so are 8 bases
constexpr u32 kMaxColumns = KV_SWAP_MAX_COLUMNS;
constexpr u32 kColumnsBytes = kTileBytes / 16;  // a byte for each group of 8 values
constexpr u32 kMaxEscapes = kTailWords - kHeaderWords - 1;
constexpr u32 kKindPacked = 1;
constexpr u32 kKindRaw = 2;
constexpr u32 kSignature = KV_SWAP_PACKED_MAGIC | KV_SWAP_PACKED_VERSION << 16;
static_assert(kPackedTileBytes % 128 == 0, "tiles lie in slots as bulk copies want them");
static_assert(kHeaderWords + kMaxColumns / 8 < kTailWords, "escapes have room after the bases");

constexpr u32 kGroups = 2;
constexpr u32 kWarps = 8;  // that transform the tiles of a group; each has a strip of them
constexpr u32 kGroupThreads = kWarps * kWarpSize;
constexpr u32 kUnits = kTileBytes / 16 / kGroupThreads;  // groups of 8 values of a thread
static_assert(kUnits == 4, "a thread reads the columns of its values as one word");
static_assert(kPoolEntryBytes == 16 * kGroupThreads, "a thread loads 16 bytes of a pool's entry");

// A row of the table: a tile of a region's page.
struct alignas(16) PackedTile {
  u64 page_address;  // in block 0
  u64 block_stride_bytes;
  u64 slot_offset_bytes;
  u32 columns;  // index of the table of columns
  u32 num_columns;
};
static_assert(sizeof(PackedTile) == 32, "kv_swap/cuda/tiles.py writes rows of 32 bytes");

__device__ __forceinline__ u64 columns_address(const u8* tables, const PackedTile& tile) {
  return reinterpret_cast<u64>(tables) + static_cast<u64>(tile.columns) * kColumnsBytes;
}

__device__ __forceinline__ void sync_group(u32 group) { sync_threads<kGroupThreads>(group + 1); }

// Reads the rows of one group's tiles in order: every step-th row of the table, repeatedly.
//
// One thread uses it. Rows are fetched kFetched - 1 tiles ahead (see SegmentCursor in
// swap_bulk.cu). A place is overwritten only after its row has been taken.
class TileFeed {
 public:
  static constexpr u32 kFetched = 8;
  using Places = PackedTile[kFetched];  // in shared memory

  __device__ TileFeed(const PackedTile* table, u32 num_tiles, u32 first, u32 step, Places& places)
      : table_(table),
        num_tiles_(num_tiles),
        step_(step % num_tiles),
        tile_(first % num_tiles),
        places_(places) {}

  __device__ void begin() {
    for (u32 i = 0; i < kFetched - 1; ++i) fetch();
  }

  __device__ PackedTile take() {
    wait_fetched<kFetched - 2>();
    const PackedTile row = places_[taken_++ % kFetched];
    fetch();
    return row;
  }

 private:
  __device__ void fetch() {
    const u8* source = reinterpret_cast<const u8*>(table_ + tile_);
    const u32 place = shared_address(&places_[fetched_++ % kFetched]);
    fetch_16_bytes(place, source);
    fetch_16_bytes(place + 16, source + 16);
    commit_fetch();
    tile_ += step_;
    if (tile_ >= num_tiles_) tile_ -= num_tiles_;
  }

  const PackedTile* table_;
  u32 num_tiles_;
  u32 step_;
  u32 tile_;
  u32 fetched_ = 0;
  u32 taken_ = 0;
  Places& places_;
};

// A list's pairs, fetched over the bus once per CTA. __syncthreads publishes them.
template <u32 kThreads>
__device__ __forceinline__ u32 read_pairs(const ListHeader* list, int2 (&pairs)[kMaxPairs]) {
  // Each thread's first pair arrives in the same round trip as the count; pairs past the count are
  // unused.
  const int2 first = read_pair(list, threadIdx.x);
  const u32 num_pairs = read_num_pairs(list);
  pairs[threadIdx.x] = first;
  for (u32 i = threadIdx.x + kThreads; i < num_pairs; i += kThreads) pairs[i] = read_pair(list, i);
  return num_pairs;
}

// One byte for each of a thread's 4 groups of values.
__device__ __forceinline__ u32 column_of(u32 columns, u32 unit) {
  return columns >> 8 * unit & 0xff;
}

__device__ __forceinline__ u32 lanes_below(u32 mask, u32 lane) {
  return __popc(mask & ((1u << lane) - 1));
}

}  // namespace kv_swap
