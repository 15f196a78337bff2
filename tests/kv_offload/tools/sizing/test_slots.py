"""What a slot holds, from the shape of a model and the settings of an engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kv_offload.errors import ConfigError
from kv_offload.tools.sizing.model import Model
from kv_offload.tools.sizing.slots import SlotSize, check_arguments, cut_into_groups, slot_size
from kv_offload.tools.sizing.states import State


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


def size(of: Model, ranks: int = 1, dtype: str = "auto", tokens: int = 16) -> SlotSize:
    engine: Any = {"tensor_parallel_size": ranks, "cache_dtype": dtype, "block_tokens": tokens}
    check_arguments(**engine)
    return slot_size(of, **engine)


@pytest.mark.parametrize(
    ("dtype", "token_bytes"),
    [("auto", 131072), ("float32", 262144), ("fp8", 65536), ("int8_per_token_head", 67584)],
)
def test_types_of_cache(dtype: str, token_bytes: int) -> None:
    """With a scale per token and head there are 8 bytes more for each of 32 layers and 8 heads."""
    assert size(model(), dtype=dtype).token_bytes == token_bytes


def test_ranks_divide_the_heads() -> None:
    one, four = size(model()), size(model(), ranks=4)
    assert four.slot_bytes == one.slot_bytes // 4
    assert four.token_bytes == one.token_bytes
    assert four.blocks_in(1 << 30) == one.blocks_in(1 << 30) == 512


def test_ranks_without_a_head_of_their_own_keep_copies() -> None:
    assert size(model(), ranks=16).token_bytes == 2 * size(model()).token_bytes


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
    assert not size(model()).keeps_ends_only


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
    assert mixed.slot_bytes == 2 * 48 * 2 * 96 * 2
    assert mixed.token_bytes * 48 == mixed.block_bytes == mixed.slot_bytes
    assert mixed.prompt_bytes == 3 * mixed.slot_bytes


def test_ranks_divide_states_but_copy_a_group_that_all_share() -> None:
    assert STATE.rank_bytes(4, 2) == 2 * (3 * (256 // 4 + 64) + 2 * 1024)
    with pytest.raises(ConfigError, match="is 3, and the states have 8 heads: give a divisor of 8"):
        STATE.rank_bytes(3, 2)
    with pytest.raises(ConfigError, match="states have 2 groups"):
        dataclasses.replace(STATE, groups=2).rank_bytes(4, 2)


def test_recurrent_states_may_have_a_type_of_their_own() -> None:
    wider = dataclasses.replace(STATE, recurrent_bytes=4)
    assert wider.rank_bytes(1, 2) - STATE.rank_bytes(1, 2) == 2 * 8 * 1024


def test_an_index_lies_beside_the_latent_head() -> None:
    indexed = size(model(kv_heads=1, head_size=576, latent=True, index_bytes=132), ranks=4)
    assert indexed.token_bytes == 32 * (576 * 2 + 132)


def test_chunks_take_a_slot_beside_full_attention() -> None:
    mixed = size(model(layers={"chunk": 36, "full": 12}))
    assert mixed.block_bytes == 4 * mixed.slot_bytes
    assert mixed.blocks_in(4 * mixed.slot_bytes) == 1
    assert mixed.blocks_in(4 * mixed.slot_bytes - 1) == 0


@pytest.mark.parametrize(
    ("layers", "groups", "group_layers"),
    [
        ({"full": 32}, {"full": 1}, 32),
        ({"window": 12, "full": 13}, {"window": 1, "full": 1}, 13),
        ({"window": 18, "full": 12}, {"window": 2, "full": 1}, 12),
        ({"chunk": 36, "full": 12}, {"chunk": 3, "full": 1}, 12),
    ],
)
def test_groups(layers: dict[str, int], groups: dict[str, int], group_layers: int) -> None:
    assert cut_into_groups(layers) == (groups, group_layers)


@pytest.mark.parametrize(
    ("of", "settings", "message"),
    [
        (model(), {"ranks": 0}, "--tensor-parallel-size is 0: give 1 or more"),
        (model(), {"tokens": -1}, "--block-size is -1: give 1 or more"),
        (model(), {"dtype": "int4"}, "--kv-cache-dtype is 'int4': give one of auto, bfloat16"),
        (model(), {"ranks": 3}, "--tensor-parallel-size is 3, and the model has 8 KV heads"),
        (LATENT, {"dtype": "fp8_per_token_head"}, "which vLLM does not have for latent attention"),
        (
            model(index_bytes=132),
            {"dtype": "fp8"},
            "sparse attention keeps then depends on the GPU",
        ),
        (model(cache_is_quantized=True), {}, "--kv-cache-dtype is auto, and the checkpoint has"),
    ],
)
def test_settings_that_do_not_fit(of: Model, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size(of, **settings)
