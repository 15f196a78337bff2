// Copies pages between a KV cache on the device and slots in page-locked host memory.
//
// A list of (block, slot) pairs is read from host memory, its length included, so a captured launch
// can be replayed with another list. A slot is cut into chunks of at most 4 KiB, described by a table
// on the device; a warp copies one chunk of one pair at a time, so few large pages and many small
// ones spread over all warps alike. There is no shared state between warps, and no order.
//
// transfer/swap.py compiles, feeds and launches this file, without a CUDA toolkit: no includes.

#ifndef KV_OFFLOAD_MAX_PAIRS
#error "transfer/swap.py defines KV_OFFLOAD_MAX_PAIRS"
#endif

namespace {

constexpr unsigned kThreads = 1024;
constexpr unsigned kWarpSize = 32;
constexpr int kMaxPairs = KV_OFFLOAD_MAX_PAIRS;

// Vectors of 16 bytes that a lane holds at once. With 4 CTAs that is 128 KiB in flight towards the
// host and 256 KiB from it, the least with which bulk copies filled the link of an H200 (PCIe Gen5
// x16). More only backs up the memory system and slows the compute beside it.
constexpr int kStoreVectors = 2;
constexpr int kLoadVectors = 4;

// One run of a block's bytes. Filled by transfer/swap.py as four 64-bit words.
struct alignas(16) Chunk {
  unsigned long long page_address;  // of block 0
  unsigned long long block_stride_bytes;
  unsigned long long slot_offset_bytes;
  unsigned long long num_vectors;
};
static_assert(sizeof(Chunk) == 32, "transfer/swap.py writes chunks of 32 bytes");

// Precedes the pairs of a list.
struct alignas(16) ListHeader {
  int num_pairs;
  int unused[3];
};
static_assert(sizeof(ListHeader) == 16, "transfer/swap.py writes a header of 16 bytes");
static_assert(kMaxPairs * sizeof(int2) <= 48 * 1024, "the pairs lie in static shared memory");

// Copies with one warp. Source and destination never overlap: one is on the host.
template <int kVectors>
__device__ __forceinline__ void copy_chunk(uint4* __restrict__ destination,
                                           const uint4* __restrict__ source,
                                           unsigned long long num_vectors, unsigned lane) {
  for (unsigned long long first = lane; first < num_vectors; first += kWarpSize * kVectors) {
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
__device__ __forceinline__ void swap_pages(const ListHeader* list, const Chunk* chunks,
                                           unsigned num_chunks, unsigned char* arena,
                                           unsigned long long slot_bytes) {
  // Every pair is used by many warps: fetched over the bus once a CTA, uncached, since the host
  // writes other pairs to the same place before the next launch.
  __shared__ int2 pairs[kMaxPairs];
  const int num_pairs = min(__ldcv(&list->num_pairs), kMaxPairs);
  const int2* listed = reinterpret_cast<const int2*>(list + 1);
  for (int i = threadIdx.x; i < num_pairs; i += kThreads) pairs[i] = __ldcv(listed + i);
  __syncthreads();
  if (num_pairs <= 0) return;

  const unsigned lane = threadIdx.x % kWarpSize;
  // Neighbouring units go to different CTAs, so that a short list still uses all of them.
  const unsigned warp = threadIdx.x / kWarpSize * gridDim.x + blockIdx.x;
  const unsigned num_warps = kThreads / kWarpSize * gridDim.x;
  const unsigned long long num_units = static_cast<unsigned long long>(num_pairs) * num_chunks;
  for (unsigned long long unit = warp; unit < num_units; unit += num_warps) {
    const int2 pair = pairs[unit / num_chunks];
    const Chunk chunk = chunks[unit % num_chunks];
    uint4* page = reinterpret_cast<uint4*>(
        chunk.page_address + static_cast<unsigned long long>(pair.x) * chunk.block_stride_bytes);
    uint4* slot = reinterpret_cast<uint4*>(
        arena + static_cast<unsigned long long>(pair.y) * slot_bytes + chunk.slot_offset_bytes);
    if constexpr (kStore) {
      copy_chunk<kStoreVectors>(slot, page, chunk.num_vectors, lane);
    } else {
      copy_chunk<kLoadVectors>(page, slot, chunk.num_vectors, lane);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    swap_store(const ListHeader* list, const Chunk* chunks, unsigned num_chunks,
               unsigned char* arena, unsigned long long slot_bytes) {
  swap_pages<true>(list, chunks, num_chunks, arena, slot_bytes);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    swap_load(const ListHeader* list, const Chunk* chunks, unsigned num_chunks,
              unsigned char* arena, unsigned long long slot_bytes) {
  swap_pages<false>(list, chunks, num_chunks, arena, slot_bytes);
}
