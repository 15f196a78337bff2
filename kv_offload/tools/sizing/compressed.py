"""The slots of DeepSeek V4, whose latents cover several tokens, as vLLM 0.32 and 0.33 plan them.

Every layer has a window of latents. Most also keep a latent of every 4 or 128 tokens, with an index
where it is 4, and for some tokens what is not compressed yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 256
"""Tokens of a block of latents, the block size of vLLM's backends for this model."""

LATENT_BYTES = 584
"""Bytes of a latent with `fp8_ds_mla`: 448 numbers of 8 bits, 64 of 16 bits, and 8 scales."""

WINDOW_BLOCK_TOKENS = 64
PENDING_BLOCK_TOKENS = {4: 4, 128: 8}
"""Tokens of a block of what is not compressed yet, by the tokens that a latent covers."""

ALIGNMENT = 576
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Bucket:
    """Layers of one kind, which vLLM puts into one cache group or divides among several."""

    block_tokens: int
    window_tokens: int
    """0 where all tokens are kept."""
    pages: dict[int, int]
    """By the bytes of a page, how many layers there are."""

    @property
    def is_balanced(self) -> bool:
        """True if there are equally many layers of each size: vLLM then divides them."""
        return len(set(self.pages.values())) == 1

    @property
    def repeats(self) -> int:
        """Layers of the most frequent size."""
        return max(self.pages.values())


def compressed_slots(
    ratios: Sequence[int], head_size: int, index_size: int, window_tokens: int
) -> tuple[int, int]:
    """Return the bytes of a slot, and the slots that the end of a prompt takes besides its blocks.

    `ratios` has for each layer how many tokens a latent covers: 4, 128, or 0 without such latents.
    It is 4 in some layers.
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
        # A key and its score of each token; with 4 also those of the latent before.
        sides = 2 if ratio == 4 else 1
        sizes = [head_size, index_size] if ratio == 4 else [head_size]
        numbers = [tokens * 2 * sides * size for size in sizes]
        pages = {_page(number * FLOAT32_BYTES): count for number in numbers}
        yield Bucket(tokens, sides * ratio, pages)


def _page(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def _fewest_padding(counts: list[int], least: int) -> int:
    """Return the size of a group that fills up fewest places; the largest of several."""
    sizes = range(least, max(*counts, least) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))
