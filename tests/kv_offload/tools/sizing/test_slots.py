"""What a slot holds, from the shape of a model and the settings of an engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kv_offload.errors import ConfigError
from kv_offload.tools.sizing.layers import State
from kv_offload.tools.sizing.model import Model
from kv_offload.tools.sizing.slots import SlotSize, slot_size


def model(**more: Any) -> Model:
    shape: dict[str, Any] = {
        "model_type": "llama",
        "layers": {"full": 32},
        "window_tokens": 1024,
        "kv_heads": 8,
        "head_size": 128,
        "latent": False,
        "cache_is_quantized": False,
    }
    return Model(**(shape | more))


LATENT = model(kv_heads=1, head_size=576, latent=True)


def size(of: Model, ranks: int = 1, dtype: str = "auto") -> SlotSize:
    return slot_size(of, tensor_parallel_size=ranks, cache_dtype=dtype, block_tokens=16)


@pytest.mark.parametrize(
    ("dtype", "token_bytes"),
    [("auto", 131072), ("float32", 262144), ("fp8", 65536), ("int8_per_token_head", 67584)],
)
def test_types_of_cache(dtype: str, token_bytes: int) -> None:
    """With a scale per token and head there are 8 bytes more for each of 32 layers and 8 heads."""
    assert size(model(), dtype=dtype).token_bytes == token_bytes


def test_ranks_divide_the_heads_and_without_one_of_their_own_keep_copies() -> None:
    one, four = size(model()), size(model(), ranks=4)
    assert four.slot_bytes == one.slot_bytes // 4
    assert four.token_bytes == one.token_bytes
    assert four.blocks_in(1 << 30) == one.blocks_in(1 << 30) == 512
    assert size(model(), ranks=16).token_bytes == 2 * one.token_bytes


def test_ranks_with_latent_attention_keep_their_bytes_once() -> None:
    one, four = size(LATENT), size(LATENT, ranks=4)
    assert (four.slot_bytes, four.token_bytes) == (one.slot_bytes, one.token_bytes)
    assert one.token_bytes == 32 * 576 * 2


def test_windows_of_a_mixed_model_are_kept_where_a_prompt_ends() -> None:
    mixed = size(model(layers={"window": 52, "full": 10}))
    assert (mixed.groups, mixed.group_layers) == ({"window": 6, "full": 1}, 10)
    assert mixed.block_bytes == mixed.slot_bytes
    assert mixed.prompt_bytes == 6 * (1024 // 16) * mixed.slot_bytes
    assert mixed.windowed_token_bytes == 7 * mixed.token_bytes


def test_of_windows_alone_a_prompt_keeps_its_end() -> None:
    windows = size(model(layers={"window": 32}))
    assert windows.keeps_ends_only
    assert windows.token_bytes == windows.windowed_token_bytes == size(model()).token_bytes
    assert windows.prompt_bytes == 1024 * windows.token_bytes


STATE = State(
    inner_channels=256,
    groups=1,
    group_channels=64,
    columns=3,
    heads=8,
    head_numbers=1024,
    recurrent_bytes=None,
)


def test_a_prompt_keeps_a_state_and_a_block_has_room_for_it() -> None:
    """6,144 numbers of a token are in 3 blocks of 16 tokens; the state has 9,152 numbers."""
    mixed = size(model(layers={"state": 6, "full": 2}, kv_heads=1, head_size=96, state=STATE))
    assert (mixed.groups, mixed.group_layers) == ({"state": 3, "full": 1}, 2)
    assert mixed.state_bytes == 2 * (3 * (256 + 64) + 8 * 1024)
    assert mixed.block_tokens == 3 * 16
    assert mixed.token_bytes * 48 == mixed.block_bytes == mixed.slot_bytes == 2 * 48 * 2 * 96 * 2
    assert mixed.prompt_bytes == 3 * mixed.slot_bytes


def test_ranks_divide_states_but_copy_a_group_that_all_share() -> None:
    assert STATE.rank_bytes(4, 2) == 2 * (3 * (256 // 4 + 64) + 2 * 1024)
    with pytest.raises(ConfigError, match="is 3, and the states have 8 heads: give a divisor of 8"):
        STATE.rank_bytes(3, 2)
    with pytest.raises(ConfigError, match="states have 2 groups"):
        dataclasses.replace(STATE, groups=2).rank_bytes(4, 2)


def test_chunks_take_a_slot_beside_full_attention() -> None:
    mixed = size(model(layers={"chunk": 36, "full": 12}))
    assert mixed.block_bytes == 4 * mixed.slot_bytes
    assert mixed.blocks_in(4 * mixed.slot_bytes) == 1
    assert mixed.blocks_in(4 * mixed.slot_bytes - 1) == 0


@pytest.mark.parametrize(
    ("of", "settings", "message"),
    [
        (model(), {"ranks": 3}, "--tensor-parallel-size is 3, and the model has 8 KV heads"),
        (LATENT, {"dtype": "fp8_per_token_head"}, "which vLLM does not have for latent attention"),
        (model(index_bytes=132), {"dtype": "fp8"}, "sparse attention keeps then depends on the"),
        (model(cache_is_quantized=True), {}, "--kv-cache-dtype is auto, and the checkpoint has"),
    ],
)
def test_settings_that_do_not_fit(of: Model, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size(of, **settings)
