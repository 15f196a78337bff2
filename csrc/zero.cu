// Zeroes the pages of listed blocks. kv_swap/cuda/zero.py compiles, feeds and launches it.
//
// A list of block ids is read from page-locked memory, its length included, so a captured launch can
// be replayed with other blocks. The table holds runs of a block's bytes of at most kRunBytes each;
// a CTA zeroes one run of one block at a time, so a few large pages spread as well as many small.

namespace {

constexpr int kMaxBlocks = KV_SWAP_MAX_BLOCKS;
constexpr unsigned kThreads = KV_SWAP_THREADS;

// Filled by kv_swap/cuda/zero.py as four 64-bit words.
struct alignas(16) Run {
  unsigned long long address;  // in block 0
  unsigned long long block_stride_bytes;
  unsigned long long num_bytes;  // a multiple of 16
  unsigned long long unused;
};
static_assert(sizeof(Run) == 32, "kv_swap/cuda/zero.py writes runs of 32 bytes");

struct alignas(16) ListHeader {
  int num_blocks;
  int unused[3];
};
static_assert(sizeof(ListHeader) == 16, "kv_swap/cuda/launcher.py writes a header of 16 bytes");

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    zero_pages(const ListHeader* list, const Run* runs, unsigned num_runs) {
  // In host memory and written anew between launches: never from a cache.
  const int* blocks = reinterpret_cast<const int*>(list + 1);
  const int num_blocks = max(0, min(__ldcv(&list->num_blocks), kMaxBlocks));
  const unsigned long long num_units = static_cast<unsigned long long>(num_blocks) * num_runs;
  for (unsigned long long unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
    const Run run = runs[unit % num_runs];
    const int block = __ldcv(blocks + unit / num_runs);
    uint4* vectors = reinterpret_cast<uint4*>(
        run.address + static_cast<unsigned long long>(block) * run.block_stride_bytes);
    const unsigned num_vectors = static_cast<unsigned>(run.num_bytes / sizeof(uint4));
    for (unsigned i = threadIdx.x; i < num_vectors; i += kThreads) vectors[i] = make_uint4(0, 0, 0, 0);
  }
}
