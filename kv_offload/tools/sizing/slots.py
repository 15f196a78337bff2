"""How vLLM cuts a model's layers into cache groups, and what a slot of host memory then holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kv_swap.packing.format import packed_slot_bytes

from kv_offload.errors import ConfigError
from kv_offload.tools.sizing.model import Model

CACHE_DTYPES = {
    **dict.fromkeys(("auto", "bfloat16", "float16"), 2),
    "float32": 4,
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head"), 1),
    "int8_per_token_head": 1,
}
"""Values of vLLM's `--kv-cache-dtype` that the plugin serves, and the bytes of a number.

`auto` is the type in which the model computes: 16 bits, unless `--dtype float32` is given."""

ENDS = ("window", "state")
"""Kinds of layers of which only the end of a prompt is kept."""

SCALE_BYTES = 4
"""Bytes of a key's scale, and of a value's, with the types `..._per_token_head`."""


@dataclass(frozen=True, slots=True)
class SlotSize:
    """The size of a slot of one rank, which holds a block of a cache group; slots that tokens need.

    vLLM keeps windows and states only where a prompt ends, unless a retention interval is set.
    """

    model: Model
    tensor_parallel_size: int
    cache_dtype: str
    """One of `CACHE_DTYPES`."""
    block_tokens: int
    """Tokens of a block. vLLM makes it so large that a block of attention has room for a state."""
    groups: dict[str, int]
    """How many cache groups there are of each kind of layer."""
    group_layers: int
    """Layers of the largest group. A slot has room for as many, whatever group it serves."""
    layer_bytes: int
    """Bytes that one layer of attention on one rank keeps for one token, less its index."""
    state_bytes: int
    """Bytes of the state of one layer on one rank; 0 where no layer has one."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, as the log of the start tells them for blocks of as many tokens."""
        index_bytes = self.model.indexes * self.model.index_bytes
        return (self.group_layers * self.layer_bytes + index_bytes) * self.block_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's keys in a block, or of its latents; the values take as many."""
        return self.layer_bytes * self.block_tokens // (1 if self.model.latent else 2)

    @property
    def may_pack(self) -> bool:
        """True if `pack_kv` packs pages that are large enough. The model computes in bfloat16."""
        return self.cache_dtype in ("auto", "bfloat16") and not self.state_bytes

    @property
    def packed_slot_bytes(self) -> int:
        """Bytes of a slot with `pack_kv`, if its pages may be packed and are large enough."""
        pages = self.group_layers * (1 if self.model.latent else 2)
        return packed_slot_bytes(
            [self.page_bytes] * pages, self.slot_bytes - self.page_bytes * pages
        )

    @property
    def arenas(self) -> int:
        """How many ranks have host memory of their own: those with equal bytes share theirs."""
        return 1 if self.model.latent else self.tensor_parallel_size

    @property
    def keeps_ends_only(self) -> bool:
        """True if all layers have windows, so that no group keeps all of a prompt."""
        return self.groups.keys() == {"window"}

    @property
    def block_slots(self) -> int:
        """The slots of a rank that make up `block_bytes`."""
        ends = () if self.keeps_ends_only else ENDS
        return sum(count for kind, count in self.groups.items() if kind not in ends)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, over all ranks, less what only the end of a prompt or window has."""
        return self.slot_bytes * self.block_slots * self.arenas

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, as `block_bytes` counts them."""
        return self.block_bytes // self.block_tokens

    @property
    def prompt_bytes(self) -> int:
        """Bytes of windows and states where one prompt ends, over all ranks, at most."""
        window_blocks = -(-(self.model.window_tokens - 1) // self.block_tokens)
        windows = self.groups.get("window", 0) * window_blocks
        return (windows + self.groups.get("state", 0)) * self.slot_bytes * self.arenas

    def blocks_in(self, cpu_bytes: int, *, packed: bool = False) -> int:
        """Return how many blocks of `block_tokens` fit into `cpu_bytes` of all ranks together."""
        slot_bytes = self.packed_slot_bytes if packed else self.slot_bytes
        return cpu_bytes // self.arenas // slot_bytes // self.block_slots


def slot_size(
    model: Model, *, tensor_parallel_size: int, cache_dtype: str, block_tokens: int
) -> SlotSize:
    """Return the size of a slot.

    Raises `ConfigError` for a type of cache that does not fit the model, and where its KV heads or
    states cannot be split over the ranks.
    """
    _check_cache_dtype(model, cache_dtype)
    groups, group_layers = cut_into_groups(model.layers)
    vectors = 1 if model.latent else 2 * _heads_per_rank(model.kv_heads, tensor_parallel_size)
    vector_bytes = model.head_size * CACHE_DTYPES[cache_dtype]
    if has_scales(cache_dtype):
        vector_bytes += SCALE_BYTES
    layer_bytes = vectors * vector_bytes
    state_bytes = 0
    if model.state is not None:
        # The cache's type is that of attention alone. A model of 32 bits keeps states of 32 bits.
        of_model = CACHE_DTYPES["float32" if cache_dtype == "float32" else "auto"]
        state_bytes = model.state.rank_bytes(tensor_parallel_size, of_model)
        # As `_align_hybrid_block_size` in vLLM does it.
        block_tokens *= -(-state_bytes // (block_tokens * layer_bytes))
    return SlotSize(
        model=model,
        tensor_parallel_size=tensor_parallel_size,
        cache_dtype=cache_dtype,
        block_tokens=block_tokens,
        groups=groups,
        group_layers=group_layers,
        layer_bytes=layer_bytes,
        state_bytes=state_bytes,
    )


def has_scales(cache_dtype: str) -> bool:
    """Return whether each key and each value has a scale of its own."""
    return cache_dtype.endswith("_per_token_head")


def _check_cache_dtype(model: Model, cache_dtype: str) -> None:
    if cache_dtype == "auto" and model.cache_is_quantized:
        raise ConfigError(
            "--kv-cache-dtype is auto, and the checkpoint has a type of its own for the cache "
            "(kv_cache in its quantization): name it, for example --kv-cache-dtype fp8"
        )
    if model.index_bytes and CACHE_DTYPES[cache_dtype] == 1:
        raise ConfigError(
            f"--kv-cache-dtype is {cache_dtype!r}: what sparse attention keeps then depends on the "
            "GPU. Give bfloat16, or start the engine: its log says how many bytes a slot takes"
        )
    if model.latent and has_scales(cache_dtype):
        raise ConfigError(
            f"--kv-cache-dtype is {cache_dtype!r}, which vLLM does not have for latent attention: "
            "give another"
        )


def _heads_per_rank(kv_heads: int, ranks: int) -> int:
    """Return the KV heads of a rank; with fewer heads than ranks several hold the same one."""
    if max(kv_heads, ranks) % min(kv_heads, ranks):
        raise ConfigError(
            f"--tensor-parallel-size is {ranks}, and the model has {kv_heads} KV heads: one must "
            "be a multiple of the other"
        )
    return max(1, kv_heads // ranks)


def cut_into_groups(layers: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return how many cache groups vLLM makes of so many layers of each kind, and their layers.

    It makes groups of equal size: of the rarest kind's layers, or of the commonest kind's where
    that is less than 1.5 times as many (`_get_kv_cache_groups_uniform_page_size` in vLLM 0.32).
    """
    size = min(layers.values())
    if max(layers.values()) < size * 1.5:
        size = max(layers.values())
    return {kind: -(-count // size) for kind, count in layers.items()}, size
