"""Modes of the engine that change what is computed, or what may be shared."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from tests.engine.harness import (
    BLOCK_TOKENS,
    Drafts,
    all_differ,
    engine,
    offloading,
    plain_answers,
    prompts_with_shared_prefix,
    random_tokens,
    transfer_config,
)

PROMPTS = prompts_with_shared_prefix()
REPEATING = random_tokens(40, seed=31) * 6
"""A text that an n-gram drafter continues with what it has seen."""


# -- drafts from the text ----------------------------------------------------------------------


@pytest.fixture
def interpreted_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's n-gram drafter run as plain Python: the CPU environment has no numba."""

    def decorate(*args: Any, **_options: Any) -> Any:
        return args[0] if args and callable(args[0]) else lambda function: function

    numba = types.ModuleType("numba")
    names = {"jit": decorate, "njit": decorate, "prange": range}
    vars(numba).update(names, get_num_threads=lambda: 1, set_num_threads=lambda _: None)
    monkeypatch.setitem(sys.modules, "numba", numba)
    monkeypatch.delitem(sys.modules, "vllm.v1.spec_decode.ngram_proposer", raising=False)


@pytest.mark.usefixtures("interpreted_numba")
def test_drafts_from_the_text(model_folder: Path) -> None:
    """Blocks that were decoded with drafts, accepted and rejected, are stored and served again."""
    (expected,) = plain_answers(model_folder, [REPEATING], max_tokens=80)
    follow_up = [*REPEATING, *expected, 7]
    expected_after = plain_answers(model_folder, [follow_up])
    config = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
    with offloading(model_folder, speculative_config=config) as ours:
        drafts = Drafts(ours)
        assert ours.generate([REPEATING], max_tokens=80) == [expected]
        checked, accepted = drafts.take()
        assert checked > 20
        assert 0 < accepted < checked
        assert ours.reload([follow_up]) == expected_after
        # The last token that was sampled was never an input.
        computed = len(REPEATING) + len(expected) - 1
        assert ours.blocks_loaded() == computed // BLOCK_TOKENS
        assert ours.reload([follow_up], corrupted=True) != expected_after


# -- what may be shared ------------------------------------------------------------------------


def test_salts_share_nothing(model_folder: Path) -> None:
    prompts = [random_tokens(200, seed=32)]
    with offloading(model_folder) as ours:
        answers = ours.generate(prompts, cache_salt="one")
        assert ours.cached_tokens == [0]
        ours.forget()
        assert ours.generate(prompts, cache_salt="two") == answers
        assert ours.cached_tokens == [0]
        assert ours.blocks_loaded() == 0
        assert ours.reload(prompts, cache_salt="one") == answers
        assert ours.cached_tokens == [192]
        assert ours.blocks_loaded() == 6


def write_adapter(folder: Path) -> Path:
    """Write an adapter of random weights for the queries and values of the Qwen3 model."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for layer in range(2):
        for name, out in (("q_proj", 128), ("v_proj", 64)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(8, 128, generator=generator)
            weights[f"{prefix}.lora_B.weight"] = torch.randn(out, 8, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_an_adapter_shares_nothing_with_its_base(model_folder: Path, tmp_path: Path) -> None:
    prompts = [random_tokens(200, seed=33)]
    adapter = LoRARequest("adapter", 1, str(write_adapter(tmp_path / "adapter")))
    lora = {"enable_lora": True, "max_lora_rank": 8}
    with engine(model_folder, **lora) as plain:
        of_base = plain.generate(prompts)
        of_adapter = plain.generate(prompts, lora_request=adapter)
    assert of_base != of_adapter
    with offloading(model_folder, **lora) as ours:
        assert ours.generate(prompts) == of_base
        assert ours.cached_tokens == [0]
        ours.forget()
        assert ours.generate(prompts, lora_request=adapter) == of_adapter
        assert ours.cached_tokens == [0]
        for request, expected in ((None, of_base), (adapter, of_adapter)):
            assert ours.reload(prompts, lora_request=request) == expected
            assert ours.cached_tokens == [192]
            assert ours.blocks_loaded() == 6
        assert ours.reload(prompts, lora_request=adapter, corrupted=True) != of_adapter


# -- scheduling --------------------------------------------------------------------------------


PRODUCER = {**transfer_config({}), "kv_role": "kv_producer"}


@pytest.mark.parametrize(
    "arguments",
    [
        {"async_scheduling": False},
        {"async_scheduling": True},
        {"scheduling_policy": "priority"},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048},
        {"kv_transfer_config": PRODUCER},
    ],
    ids=["synchronous", "asynchronous", "priority", "whole prompts", "kv_producer"],
)
def test_ways_of_scheduling(model_folder: Path, arguments: dict[str, Any]) -> None:
    """And the role in which vLLM accepts no embeddings. With a control."""
    expected = plain_answers(model_folder, PROMPTS)
    with offloading(model_folder, **arguments) as ours:
        assert ours.generate(PROMPTS) == expected
        assert ours.reload(PROMPTS) == expected
        assert all_differ(ours.reload(PROMPTS, corrupted=True), expected)


def test_an_urgent_request_takes_blocks_of_one_that_stores(model_folder: Path) -> None:
    """The one that came first is preempted; both answers stay right."""
    prompts = [random_tokens(230, seed=seed) for seed in (34, 35)]
    expected = plain_answers(model_folder, prompts, max_tokens=130, one_by_one=True)
    arguments = {"scheduling_policy": "priority", "blocks": 17, "max_model_len": 480}
    with offloading(model_folder, **arguments) as ours:
        ours.add("slow", prompts[0], 130, priority=5)
        for _ in range(6):
            ours.step()
        ours.add("urgent", prompts[1], 130, priority=0)
        finished = ours.run()
        assert ours.preemptions > 0
        tokens = [list(finished[name].outputs[0].token_ids) for name in ("slow", "urgent")]
        assert tokens == expected
        assert ours.blocks_loaded() > 0, "the preempted request came back from host memory"
