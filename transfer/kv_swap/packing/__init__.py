"""bf16 KV packed without loss: the format of a packed slot, and a NumPy packer and unpacker of it.

`format` has sizes and the header, `columns` says which values share a base, `tiles` packs tiles and
`slots` whole slots; `samples` counts escapes in packed slots. The kernels of `csrc/swap_packed.cu`
write the same bytes. Nothing here knows a device; the host engine copies with it.
"""

from kv_swap.packing.format import FORMAT_VERSION

__all__ = ["FORMAT_VERSION"]
