"""Describes where a KV block's bytes are: regions (address, page, stride), and places in a slot.

A block is all bytes with one block id, over all regions. A slot holds those bytes contiguously, in
the order of the regions. Packed regions come first and take less space, and a pool comes last
(`packing/format.py`). Nothing here touches memory or a device.

Each tensor is cut into pieces, the contiguous runs of bytes in its block 0. Pieces that touch or
overlap within one block stride become one region, so that bytes shared by cache groups are copied
once. A layout in which two block ids share a byte is refused, because no copy of it could be exact.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kv_swap.errors import LayoutError
from kv_swap.packing.format import PACKED_TILE_BYTES, TILE_BYTES, align, pool_entries
from kv_swap.packing.format import Packing as Packing
from kv_swap.packing.format import packed_page_bytes as packed_page_bytes
from kv_swap.packing.format import packed_slot_bytes as packed_slot_bytes

if TYPE_CHECKING:
    import torch

PAGE_ALIGNMENT_BYTES = 16
"""Bulk copies and 16-byte vector copies need addresses and sizes that are multiples of this."""

_MAX_PIECES = 1 << 16
"""Maximum pieces of a tensor: far more than any model has, too few to slow down the start."""


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """One KV tensor as laid out by its engine.

    `address` is the address of element 0. Blocks are along `block_dim`, several per manager block
    if the kernel's blocks are smaller. `page_bytes` is the size of one manager block in this
    tensor, with padding and scales.
    """

    name: str
    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    itemsize: int
    block_dim: int
    page_bytes: int

    @classmethod
    def of(
        cls,
        name: str,
        tensor: torch.Tensor,
        num_blocks: int,
        block_dim: int = 0,
        page_bytes: int | None = None,
    ) -> TensorDescription:
        """Describe a torch tensor. Without `page_bytes`, its blocks have no padding."""
        itemsize = tensor.element_size()
        strides = tuple(stride * itemsize for stride in tensor.stride())
        if page_bytes is None:
            page_bytes = tensor.numel() * itemsize // num_blocks
        shape = tuple(tensor.shape)
        return cls(name, tensor.data_ptr(), shape, strides, itemsize, block_dim, page_bytes)


@dataclass(frozen=True, slots=True)
class Region:
    """A run of pages of `tensors`: the page of block `b` is at `address + b * block_stride_bytes`.

    With `packing`, a slot holds a page's whole tiles packed, followed by the raw remainder.
    """

    address: int
    page_bytes: int
    block_stride_bytes: int
    slot_offset_bytes: int
    tensors: frozenset[str] = field(default=frozenset(), compare=False)
    packing: Packing | None = None

    @property
    def num_tiles(self) -> int:
        """Number of packed tiles in a page; 0 in a raw region."""
        return 0 if self.packing is None else self.page_bytes // TILE_BYTES

    @property
    def slot_page_bytes(self) -> int:
        """Bytes of a page in a slot."""
        return self.page_bytes if self.packing is None else packed_page_bytes(self.page_bytes)

    @property
    def raw_part(self) -> Region | None:
        """The part that is copied raw: the region, the remainder after its tiles, or `None`."""
        if self.packing is None:
            return self
        tiles_bytes = self.num_tiles * TILE_BYTES
        if tiles_bytes == self.page_bytes:
            return None
        return replace(
            self,
            address=self.address + tiles_bytes,
            page_bytes=self.page_bytes - tiles_bytes,
            slot_offset_bytes=self.slot_offset_bytes + self.num_tiles * PACKED_TILE_BYTES,
            packing=None,
        )


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All regions of a KV cache, and the slots that hold their pages."""

    num_blocks: int
    regions: tuple[Region, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions in the KV cache."""
        return sum(region.page_bytes for region in self.regions)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot; equal to a block's, unless a region is packed."""
        if not self.num_tiles:
            return self.block_bytes
        packed = (r.page_bytes for r in self.regions if r.packing is not None)
        return packed_slot_bytes(packed, sum(r.page_bytes for r in self.regions if not r.packing))

    @property
    def num_tiles(self) -> int:
        """Number of packed tiles in a slot; 0 if no region is packed."""
        return sum(region.num_tiles for region in self.regions)

    @property
    def pool_offset_bytes(self) -> int:
        """Offset in a slot of the pool, which takes the rest of tiles that do not fit packed."""
        return align(max(r.slot_offset_bytes + r.slot_page_bytes for r in self.regions))

    @property
    def pool_entries(self) -> int:
        """Maximum number of raw tiles in a slot; a block with more does not fit."""
        return pool_entries(self.num_tiles)

    def packed(self, packings: Mapping[str, Packing]) -> KVLayout:
        """Return the layout with its bf16 regions packed; `packings` describes pages by tensor.

        A region is packed if `packings` has the same value for all its tensors and a page has at
        least one tile. Packed pages come first in a slot. The layout is unchanged if there is no
        such region, or if slots would not get smaller: a pool takes more than one tile saves.
        """
        regions = [replace(r, packing=_packing(r, packings)) for r in self.regions]
        offset = 0
        for wanted in (True, False):
            for index, region in enumerate(regions):
                if (region.packing is not None) is wanted:
                    regions[index] = replace(region, slot_offset_bytes=offset)
                    nbytes = region.slot_page_bytes
                    offset += align(nbytes) if wanted else nbytes
        layout = KVLayout(self.num_blocks, tuple(regions))
        return layout if layout.slot_bytes < self.slot_bytes else self

    @classmethod
    def from_tensors(cls, num_blocks: int, tensors: Iterable[TensorDescription]) -> KVLayout:
        """Derive the regions, in the order of the tensors, which the caller must keep alive.

        This order makes slots independent of addresses, so that a process with the same tensors
        elsewhere can read them. Raises `LayoutError` for a cache that cannot be copied exactly.
        """
        if num_blocks < 1:
            raise LayoutError(f"num_blocks is {num_blocks}, at least 1 is needed")
        pieces = [piece for tensor in tensors for piece in _pieces(num_blocks, tensor)]
        if not pieces:
            raise LayoutError("there are no KV tensors to describe")
        merged = sorted(_merge(pieces), key=lambda piece: piece.address)
        _refuse_shared_bytes(num_blocks, merged)
        starts = [piece.address for piece in merged]
        merged = list(dict.fromkeys(merged[bisect(starts, p.address) - 1] for p in pieces))
        regions: list[Region] = []
        offset = 0
        for piece in merged:
            _refuse_misalignment(piece)
            regions.append(Region(piece.address, piece.nbytes, piece.stride, offset, piece.names))
            offset += piece.nbytes
        return cls(num_blocks, tuple(regions))


def _packing(region: Region, packings: Mapping[str, Packing]) -> Packing | None:
    found = {packings.get(name) for name in region.tensors}
    return found.pop() if len(found) == 1 and region.page_bytes >= TILE_BYTES else None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Contiguous bytes of block 0; those of block `b` are `b * stride` bytes later."""

    names: frozenset[str]
    address: int
    nbytes: int
    stride: int
    whole: bool
    """True if these are whole pages of all its tensors."""

    @property
    def end(self) -> int:
        return self.address + self.nbytes


def _pieces(num_blocks: int, tensor: TensorDescription) -> Iterator[_Piece]:
    """Yield the pieces of one tensor, which have `page_bytes` bytes in total.

    A dimension whose stride exceeds the block stride (K before V, heads before blocks) yields one
    piece per index. So does a dimension inside the block stride whose gaps hold other tensors
    (layers inside heads): the span from first to last byte then exceeds `page_bytes`. Gaps within
    `page_bytes` belong to the tensor (padding, scales) and are copied with it.
    """
    name = tensor.name
    block_stride, dims = _inner_dims(num_blocks, tensor)
    split = [dim for dim in dims if dim[1] > block_stride]
    inner = [dim for dim in dims if dim[1] <= block_stride]
    while True:
        count = math.prod(size for size, _ in split)
        span = tensor.itemsize + sum((size - 1) * stride for size, stride in inner)
        if count * span <= tensor.page_bytes:
            break
        if not inner:
            raise LayoutError(
                f"{name}: page_bytes is {tensor.page_bytes}, but the data of one block take "
                f"{count * span} bytes"
            )
        split.append(inner.pop(0))
    if count > _MAX_PIECES:
        raise LayoutError(
            f"{name}: one block consists of {count} pieces of {span} bytes, the limit is "
            f"{_MAX_PIECES}; shape {tensor.shape}, strides {tensor.strides_bytes} bytes"
        )
    nbytes, remainder = divmod(tensor.page_bytes, count)
    if remainder:
        raise LayoutError(
            f"{name}: page_bytes is {tensor.page_bytes}, which {count} pieces of {span} data bytes "
            f"cannot share evenly"
        )
    if nbytes > block_stride:
        raise LayoutError(
            f"{name}: {nbytes} bytes of a page are more than the block stride of {block_stride} "
            f"bytes, so neighbouring blocks would overlap"
        )
    steps = (range(0, size * stride, stride) for size, stride in split)
    whole = count == 1 and nbytes % PAGE_ALIGNMENT_BYTES == 0
    for offsets in itertools.product(*steps):
        address = tensor.address + sum(offsets)
        yield _Piece(frozenset([name]), address, nbytes, block_stride, whole)


def _inner_dims(num_blocks: int, tensor: TensorDescription) -> tuple[int, list[tuple[int, int]]]:
    """Return a manager block's stride, and (size, stride) of the others, largest stride first."""
    name, shape, strides = tensor.name, tensor.shape, tensor.strides_bytes
    if len(shape) != len(strides) or not 0 <= tensor.block_dim < len(shape):
        raise LayoutError(
            f"{name}: block_dim {tensor.block_dim}, shape {shape} and strides {strides} do not fit "
            f"together"
        )
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if size < 1 or (size > 1 and stride < 1):
            raise LayoutError(
                f"{name}: dimension {dim} has size {size} and stride {stride} bytes; "
                f"sizes must be at least 1 and strides positive"
            )
    kernel_blocks, remainder = divmod(shape[tensor.block_dim], num_blocks)
    if remainder or kernel_blocks < 1:
        raise LayoutError(
            f"{name}: dimension {tensor.block_dim} has {shape[tensor.block_dim]} blocks, "
            f"which is not a multiple of the {num_blocks} blocks of the manager"
        )
    kernel_stride = strides[tensor.block_dim]
    dims = [dim for i, dim in enumerate(zip(shape, strides, strict=True)) if i != tensor.block_dim]
    # A manager block is `kernel_blocks` consecutive kernel blocks, an additional inner dimension.
    dims.append((kernel_blocks, kernel_stride))
    dims = [(size, stride) for size, stride in dims if size > 1]
    return kernel_stride * kernel_blocks, sorted(dims, key=lambda dim: -dim[1])


def _merge(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    """Join pieces that touch or overlap, as long as the union fits into one block stride.

    A larger union would reach into the next block; `_refuse_shared_bytes` refuses such overlaps.
    Pages of equal size that only touch stay separate: they are layers, and a load in waves may load
    one before another.
    """
    ordered = sorted(set(pieces), key=lambda piece: (piece.stride, piece.address))
    current = ordered[0]
    for piece in ordered[1:]:
        end = max(current.end, piece.end)
        whole = current.whole and piece.whole and current.nbytes == piece.nbytes
        reach = current.end - 1 if whole else current.end
        joins = piece.stride == current.stride and piece.address <= reach
        if joins and end - current.address <= piece.stride:
            names = current.names | piece.names
            current = _Piece(names, current.address, end - current.address, piece.stride, whole)
        else:
            yield current
            current = piece
    yield current


def _refuse_shared_bytes(num_blocks: int, pieces: Sequence[_Piece]) -> None:
    """Raise `LayoutError` if blocks of two pieces, sorted by address, share a byte."""
    for index, first in enumerate(pieces):
        first_end = first.end + (num_blocks - 1) * first.stride
        for second in pieces[index + 1 :]:
            if second.address >= first_end:
                break
            if first.stride == second.stride:
                # Block b of `second` overlaps block b + d of `first` if d strides are strictly
                # between these two. So any multiple of the stride between them is an overlap.
                low = second.address - first.end
                high = second.end - first.address
                shift = (low // first.stride + 1) * first.stride
                if shift >= high:
                    continue
            raise LayoutError(
                f"{min(first.names)} and {min(second.names)} overlap where no copy could be exact: "
                f"pages of {first.nbytes} and {second.nbytes} bytes, every {first.stride} and "
                f"{second.stride} bytes, {second.address - first.address} bytes apart, "
                f"{num_blocks} blocks"
            )


def _refuse_misalignment(piece: _Piece) -> None:
    sizes = {"address": piece.address, "page_bytes": piece.nbytes, "block stride": piece.stride}
    for what, value in sizes.items():
        if value % PAGE_ALIGNMENT_BYTES:
            raise LayoutError(
                f"{min(piece.names)}: {what} {value} is not a multiple of "
                f"{PAGE_ALIGNMENT_BYTES} bytes"
            )
