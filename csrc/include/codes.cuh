// The arithmetic that packs and unpacks a group of 8 values, as specified in
// kv_swap/packing/format.py.
//
// A word holds the exponents or codes of 4 values, one per byte: values 0 to 3, or 4 to 7.
#pragma once

#include "swap.cuh"

namespace kv_swap {

constexpr u32 kOnes = 0x01010101u;
constexpr u32 kGreatestCode = 15;
constexpr u32 kNoCode = 0xf0f0f0f0u;       // bits that codes do not have
constexpr u32 kEscapeCodes = 0x11111110u;  // of a group that escapes

struct Split {
  uint2 exponents;
  uint2 mantissas;  // with the signs
};

// Words rotated left by one bit have exponents in their odd bytes.
__device__ __forceinline__ Split split_values(uint4 words) {
  const u32 a = __funnelshift_l(words.x, words.x, 1);
  const u32 b = __funnelshift_l(words.y, words.y, 1);
  const u32 c = __funnelshift_l(words.z, words.z, 1);
  const u32 d = __funnelshift_l(words.w, words.w, 1);
  return {make_uint2(__byte_perm(a, b, 0x7531), __byte_perm(c, d, 0x7531)),
          make_uint2(__byte_perm(a, b, 0x6420), __byte_perm(c, d, 0x6420))};
}

// The inverse of split_values; adds `added` to all exponents.
__device__ __forceinline__ uint4 join_values(uint2 exponents, uint2 mantissas, u32 added) {
  const u32 a = __byte_perm(mantissas.x, exponents.x, 0x5140);
  const u32 b = __byte_perm(mantissas.x, exponents.x, 0x7362);
  const u32 c = __byte_perm(mantissas.y, exponents.y, 0x5140);
  const u32 d = __byte_perm(mantissas.y, exponents.y, 0x7362);
  const u32 both = added * 0x00800080u;
  return make_uint4(__funnelshift_r(a, a, 1) + both, __funnelshift_r(b, b, 1) + both,
                    __funnelshift_r(c, c, 1) + both, __funnelshift_r(d, d, 1) + both);
}

// A column's base, from its largest magnitude: 1 to 240.
__device__ __forceinline__ u32 base_of(u32 greatest) {
  return max(greatest >> 7, kGreatestCode + 1) - kGreatestCode;
}

// Exponents relative to the lowest one that has a code. If any is lower, some byte has bits of
// kNoCode: the lowest negative byte is at least -240, and no byte below it has borrowed from it.
__device__ __forceinline__ uint2 above(uint2 exponents, u32 least) {
  return make_uint2(exponents.x - least * kOnes, exponents.y - least * kOnes);
}

// The code of value j + 4 is in the upper half of the byte, that of value j in the lower half.
__device__ __forceinline__ u32 join_codes(uint2 codes) { return codes.x | codes.y << 4; }

__device__ __forceinline__ uint2 split_codes(u32 joined) {
  return make_uint2(joined & 0x0f0f0f0fu, joined >> 4 & 0x0f0f0f0fu);
}

// A word with bit 0x80 set in each byte that is not 0; other bits are noise.
__device__ __forceinline__ u32 nonzero_bytes(u32 bytes) {
  return ((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes;
}

__device__ __forceinline__ bool has_zero(uint2 exponents) {
  return (~(nonzero_bytes(exponents.x) & nonzero_bytes(exponents.y)) & 0x80808080u) != 0;
}

// Codes for 32 groups, some of which have an exponent 0: 0 for that exponent, the distance from the
// base for others. As in `above`, bits of kNoCode in `outside` mean that an exponent is not above
// its base.
struct Codes {
  u32 joined;
  u32 outside;
};

__device__ __forceinline__ Codes codes_beside_zeros(uint2 exponents, u32 base) {
  const u32 least = base + 1;
  const u32 x = nonzero_bytes(exponents.x) >> 7 & kOnes;
  const u32 y = nonzero_bytes(exponents.y) >> 7 & kOnes;
  const uint2 rest = make_uint2(exponents.x - x * least, exponents.y - y * least);
  return {join_codes(make_uint2(rest.x + x, rest.y + y)), rest.x | rest.y};
}

__device__ __forceinline__ uint2 exponents_beside_zeros(uint2 codes, u32 base) {
  return make_uint2(codes.x + ((codes.x + 0x0f0f0f0fu) >> 4 & kOnes) * base,
                    codes.y + ((codes.y + 0x0f0f0f0fu) >> 4 & kOnes) * base);
}

}  // namespace kv_swap
