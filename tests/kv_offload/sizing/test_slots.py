"""What a slot holds, from the shape of a model and the settings of an engine."""

from __future__ import annotations

from typing import Any

import pytest

from kv_offload.errors import ConfigError
from kv_offload.sizing.model import Model
from kv_offload.sizing.slots import SlotSize, check_arguments, cut_into_groups, slot_size


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


def test_windows_alone_are_all_that_a_token_takes() -> None:
    windows = size(model(layers={"window": 32}))
    assert windows.token_bytes == windows.windowed_token_bytes == size(model()).token_bytes
    assert windows.prompt_bytes == 0


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
        (model(cache_is_quantized=True), {}, "--kv-cache-dtype is auto, and the checkpoint has"),
    ],
)
def test_settings_that_do_not_fit(of: Model, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size(of, **settings)
