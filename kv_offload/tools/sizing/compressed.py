"""The slots of DeepSeek V4, whose latents cover several tokens, as vLLM 0.32 and 0.33 plan them.

Every layer has a window of latents. Most layers also keep one latent per 4 or 128 tokens (for 4,
also an index), and the tokens from which the next latent is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 256
"""Tokens in a block of latents: vLLM's block size for this model."""

LATENT_BYTES = 584
"""Bytes of a latent with `fp8_ds_mla`: 448 numbers of 8 bits, 64 of 16 bits, and 8 scales."""

WINDOW_BLOCK_TOKENS = 64
PENDING_BLOCK_TOKENS = {4: 4, 128: 8}
"""Tokens in a block of uncompressed tokens, by the number of tokens that a latent covers."""

ALIGNMENT = 576
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Bucket:
    """Layers of one kind, which vLLM puts into one cache group or splits among several."""

    block_tokens: int
    window_tokens: int
    """0 if all tokens are kept."""
    pages: dict[int, int]
    """Number of layers by page size in bytes."""

    @property
    def is_balanced(self) -> bool:
        """True if each page size has the same number of layers: vLLM then splits them."""
        return len(set(self.pages.values())) == 1

    @property
    def repeats(self) -> int:
        """Number of layers with the most frequent page size."""
        return max(self.pages.values())


def compressed_slots(
    ratios: Sequence[int], head_size: int, index_size: int, window_tokens: int
) -> tuple[int, int]:
    """Return the bytes of a slot, and the extra slots that the end of a prompt takes.

    `ratios` is the number of tokens that a latent covers in each layer: 4, 128, or 0 if the layer
    has no such latents. At least one layer must have 4.
    """
    buckets = [*_buckets(ratios, head_size, index_size, window_tokens)]
    balanced = [bucket for bucket in buckets if bucket.is_balanced]
    least = max(bucket.repeats for bucket in balanced if len(bucket.pages) > 1)
    repeats = _fewest_padding([bucket.repeats for bucket in balanced], least)
    slot_bytes = end_slots = 0
    for bucket in buckets:
        groups = -(-bucket.repeats // repeats) if bucket.is_balanced else 1
        group_bytes = sum(page * -(-layers // groups) for page, layers in bucket.pages.items())
        slot_bytes = max(slot_bytes, group_bytes)
        if bucket.window_tokens:
            end_slots += groups * -(-(bucket.window_tokens - 1) // bucket.block_tokens)
    return slot_bytes, end_slots


def _buckets(
    ratios: Sequence[int], head_size: int, index_size: int, window_tokens: int
) -> Iterator[Bucket]:
    pages = {_page(WINDOW_BLOCK_TOKENS * LATENT_BYTES): len(ratios)}
    yield Bucket(WINDOW_BLOCK_TOKENS, window_tokens, pages)
    layers = {ratio: ratios.count(ratio) for ratio in PENDING_BLOCK_TOKENS if ratio in ratios}
    pages = {_page(BLOCK_TOKENS // ratio * LATENT_BYTES): count for ratio, count in layers.items()}
    index_bytes = index_size + index_size // 128 * FLOAT32_BYTES
    pages[_page(BLOCK_TOKENS // 4 * index_bytes)] = layers[4]
    yield Bucket(BLOCK_TOKENS, 0, pages)
    for ratio, count in layers.items():
        tokens = PENDING_BLOCK_TOKENS[ratio]
        # A key and its score per token; with a ratio of 4, also those for the previous latent.
        sides = 2 if ratio == 4 else 1
        sizes = [head_size, index_size] if ratio == 4 else [head_size]
        numbers = [tokens * 2 * sides * size for size in sizes]
        pages = {_page(number * FLOAT32_BYTES): count for number in numbers}
        # At the end of a prompt, a latent of one side is complete and its tokens are not needed.
        yield Bucket(tokens, ratio * sides if sides > 1 else 1, pages)


def _page(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def _fewest_padding(counts: list[int], least: int) -> int:
    """Return the group size that needs the least padding; the largest if several tie."""
    sizes = range(least, max(*counts, least) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))
