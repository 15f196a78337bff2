"""Lossless packing of bf16 KV: the format of a packed slot, and a NumPy implementation.

`format` defines sizes, the header, and the values that share a base. `tiles` packs tiles, `slots`
packs whole slots, and `samples` counts escapes in packed slots. The kernels in
`csrc/swap_packed.cu` write the same bytes. Nothing here uses a device; the host engine copies with
it.
"""

from kv_swap.packing.format import FORMAT_VERSION

__all__ = ["FORMAT_VERSION"]
