"""How vLLM divides a model's layers into cache groups, and the resulting slot size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kv_swap.packing.format import packed_slot_bytes

from kv_offload.errors import ConfigError
from kv_offload.tools.sizing.compressed import BLOCK_TOKENS, compressed_slots
from kv_offload.tools.sizing.model import Model

NUMBER_BITS = {
    **dict.fromkeys(("auto", "bfloat16", "float16"), 16),
    "float32": 32,
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head"), 8),
    "int8_per_token_head": 8,
    **dict.fromkeys(("int4_per_token_head", "nvfp4", "nvfp4_4over6"), 4),
}
"""Bits per number, by vLLM's `--kv-cache-dtype`.

`auto` is the model's data type: 16 bits, unless `--dtype float32` is given."""

PACKED_LATENT_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes per token and layer of DeepSeek's latents of 512 and 64 numbers, including scales."""

PACKED_LATENT_SIZE = 512 + 64

CACHE_DTYPES = (*NUMBER_BITS, *PACKED_LATENT_BYTES)
"""Cache types of known size. `turboquant_*` omits some layers; others are for AMD GPUs."""

ENDS = ("window", "state")
"""Kinds of layers that keep only the end of a prompt."""


@dataclass(frozen=True, slots=True)
class SlotSize:
    """The size of a slot on one rank, which holds one block of one cache group.

    vLLM keeps windows and states only where a prompt ends, unless a retention interval is set.
    """

    model: Model
    tensor_parallel_size: int
    cache_dtype: str
    """One of `CACHE_DTYPES`."""
    block_tokens: int
    """Tokens in a block, enough for an attention block to have room for a state."""
    groups: dict[str, int]
    """Number of cache groups by kind of layer."""
    group_layers: int
    """Layers in the largest group. Every slot has room for this many, whatever its group."""
    layer_bytes: int
    """Bytes per token of one attention layer on one rank, without its index."""
    state_bytes: int
    """Bytes of one layer's state on one rank; 0 if no layer has one."""
    slot_bytes: int
    """Bytes of a slot, as an engine with blocks of this many tokens logs them at startup."""
    end_slots: int
    """Maximum number of slots per rank that windows and states take at the end of one prompt."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's keys, or latents, in a block. Values take the same."""
        return self.layer_bytes * self.block_tokens // (1 if self.model.latent else 2)

    @property
    def may_pack(self) -> bool:
        """True if `pack_kv` packs pages that are large enough. Assumes a bfloat16 model."""
        is_bfloat16 = self.cache_dtype in ("auto", "bfloat16")
        return is_bfloat16 and not self.state_bytes and not self.model.ratios

    @property
    def packed_slot_bytes(self) -> int:
        """Bytes of a slot with `pack_kv`, given `may_pack`; pages that are too small stay raw."""
        pages = self.group_layers * (1 if self.model.latent else 2)
        return packed_slot_bytes(
            [self.page_bytes] * pages, self.slot_bytes - self.page_bytes * pages
        )

    @property
    def arenas(self) -> int:
        """Number of ranks with separate host memory; ranks with equal bytes share memory."""
        return 1 if self.model.latent else self.tensor_parallel_size

    @property
    def keeps_ends_only(self) -> bool:
        """True if all layers have windows, so that no group keeps a whole prompt."""
        return self.groups.keys() == {"window"}

    @property
    def block_slots(self) -> int:
        """Number of slots per rank that make up `block_bytes`."""
        ends = () if self.keeps_ends_only else ENDS
        return sum(count for kind, count in self.groups.items() if kind not in ends)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all ranks, without parts kept only at the end of a prompt."""
        return self.slot_bytes * self.block_slots * self.arenas

    @property
    def token_bytes(self) -> int:
        """Bytes per token, counted as in `block_bytes`."""
        return self.block_bytes // self.block_tokens

    @property
    def prompt_bytes(self) -> int:
        """Maximum bytes of windows and states at the end of one prompt, over all ranks."""
        return self.end_slots * self.slot_bytes * self.arenas

    def blocks_in(self, cpu_bytes: int, *, packed: bool = False) -> int:
        """Return how many blocks of `block_tokens` tokens fit into `cpu_bytes`, over all ranks."""
        slot_bytes = self.packed_slot_bytes if packed else self.slot_bytes
        return cpu_bytes // self.arenas // slot_bytes // self.block_slots


def slot_size(
    model: Model, *, tensor_parallel_size: int, cache_dtype: str, block_tokens: int
) -> SlotSize:
    """Return the size of a slot.

    Raises `ConfigError` if the cache type does not fit the model, or if its KV heads or states
    cannot be split over the ranks.
    """
    if model.ratios:
        return _compressed_size(model, tensor_parallel_size, cache_dtype)
    _check_cache_dtype(model, cache_dtype)
    groups, group_layers = cut_into_groups(model.layers)
    vectors = 1 if model.latent else 2 * _heads_per_rank(model.kv_heads, tensor_parallel_size)
    layer_bytes = vectors * vector_bytes(cache_dtype, model.head_size)
    state_bytes = 0
    if model.state is not None:
        # The cache type applies only to attention. A 32-bit model keeps 32-bit states.
        state_bytes = model.state.rank_bytes(
            tensor_parallel_size, 4 if cache_dtype == "float32" else 2
        )
        # As `_align_hybrid_block_size` in vLLM does.
        block_tokens *= -(-state_bytes // (block_tokens * layer_bytes))
    window_blocks = -(-(model.window_tokens - 1) // block_tokens)
    index_bytes = model.indexes * model.index_bytes
    return SlotSize(
        model=model,
        tensor_parallel_size=tensor_parallel_size,
        cache_dtype=cache_dtype,
        block_tokens=block_tokens,
        groups=groups,
        group_layers=group_layers,
        layer_bytes=layer_bytes,
        state_bytes=state_bytes,
        slot_bytes=(group_layers * layer_bytes + index_bytes) * block_tokens,
        end_slots=groups.get("window", 0) * window_blocks + groups.get("state", 0),
    )


def _compressed_size(model: Model, tensor_parallel_size: int, cache_dtype: str) -> SlotSize:
    if cache_dtype not in ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla"):
        raise ConfigError(
            f"--kv-cache-dtype is {cache_dtype!r}, whose size is not known for {model.model_type}: "
            "give fp8_ds_mla, its default, or start the engine: its log says how many bytes a slot "
            "takes"
        )
    slot_bytes, end_slots = compressed_slots(
        model.ratios, model.head_size, model.index_size, model.window_tokens
    )
    return SlotSize(
        model=model,
        tensor_parallel_size=tensor_parallel_size,
        cache_dtype="fp8_ds_mla",
        block_tokens=BLOCK_TOKENS,
        groups={"full": 1, "window": 1},
        group_layers=len(model.ratios),
        layer_bytes=0,
        state_bytes=0,
        slot_bytes=slot_bytes,
        end_slots=end_slots,
    )


def vector_bytes(cache_dtype: str, size: int) -> int:
    """Return the bytes of a key, value or latent of `size` numbers, with its scales."""
    if cache_dtype in PACKED_LATENT_BYTES:
        return PACKED_LATENT_BYTES[cache_dtype]
    return size * NUMBER_BITS[cache_dtype] // 8 + scale_bytes(cache_dtype, size)


def scale_bytes(cache_dtype: str, size: int) -> int:
    """Return the bytes of the scales stored with a vector of `size` numbers."""
    if cache_dtype.startswith("nvfp4"):
        return size // 16
    return 4 if cache_dtype.endswith("_per_token_head") else 0


def _check_cache_dtype(model: Model, cache_dtype: str) -> None:
    if cache_dtype in PACKED_LATENT_BYTES and (
        not model.latent or model.head_size != PACKED_LATENT_SIZE
    ):
        raise ConfigError(
            f"--kv-cache-dtype is {cache_dtype!r}, which is for latents of {PACKED_LATENT_SIZE} "
            "numbers: give another"
        )
    if cache_dtype == "auto" and model.cache_is_quantized:
        raise ConfigError(
            "--kv-cache-dtype is auto, and the checkpoint has a type of its own for the cache "
            "(kv_cache in its quantization): name it, for example --kv-cache-dtype fp8"
        )
    if model.index_bytes and NUMBER_BITS.get(cache_dtype) == 8:
        raise ConfigError(
            f"--kv-cache-dtype is {cache_dtype!r}: what sparse attention keeps then depends on the "
            "GPU. Give fp8_ds_mla or bfloat16, or start the engine: its log says how many bytes a "
            "slot takes"
        )
    if model.latent and scale_bytes(cache_dtype, model.head_size):
        raise ConfigError(
            f"--kv-cache-dtype is {cache_dtype!r}, which vLLM does not have for latent attention: "
            "give another"
        )


def _heads_per_rank(kv_heads: int, ranks: int) -> int:
    """Return the KV heads per rank; with fewer heads than ranks, ranks hold copies of a head."""
    if max(kv_heads, ranks) % min(kv_heads, ranks):
        raise ConfigError(
            f"--tensor-parallel-size is {ranks}, and the model has {kv_heads} KV heads: one must "
            "be a multiple of the other"
        )
    return max(1, kv_heads // ranks)


def cut_into_groups(layers: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return the number of cache groups that vLLM makes for each kind of layer, and their size.

    All groups have the size of the rarest kind, or of the most common kind if that has less than
    1.5 times as many layers (`_get_kv_cache_groups_uniform_page_size` in vLLM 0.32).
    """
    size = min(layers.values())
    if max(layers.values()) < size * 1.5:
        size = max(layers.values())
    return {kind: -(-count // size) for kind, count in layers.items()}, size
