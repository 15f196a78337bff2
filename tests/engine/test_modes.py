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
    Engine,
    Tokens,
    engine,
    greedy,
    prompts_with_shared_prefix,
    random_tokens,
)

PROMPTS = prompts_with_shared_prefix()
REPEATING = random_tokens(40, seed=31) * 6
"""A text that an n-gram drafter continues with what it has seen."""


def reload(running: Engine) -> None:
    """Forget what the engine has itself, so that host memory must serve."""
    running.settle()
    running.reset_gpu_cache()
    running.totals.clear()


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
    with engine(model_folder) as plain:
        (expected,) = plain.generate([REPEATING], max_tokens=80)
        follow_up = [*REPEATING, *expected, 7]
        (expected_after,) = plain.generate([follow_up])
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
    with engine(model_folder, plugin={}, speculative_config=drafts) as ours:
        steps = count_steps(ours)
        assert ours.generate([REPEATING], max_tokens=80) == [expected]
        assert steps["drafts"] > 20
        reload(ours)
        assert ours.generate([follow_up]) == [expected_after]
        # The last token that was sampled was never an input.
        computed = len(REPEATING) + len(expected) - 1
        assert ours.blocks_loaded() == computed // BLOCK_TOKENS
        reload(ours)
        ours.slots[:] ^= 0x40
        assert ours.generate([follow_up]) != [expected_after]
        ours.assert_nothing_left()


def count_steps(running: Engine) -> dict[str, int]:
    """Count the draft tokens that the scheduler has the model check from now on."""
    counted = {"drafts": 0}
    schedule = running.scheduler.schedule

    def counting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        counted["drafts"] += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        return output

    running.scheduler.schedule = counting
    return counted


# -- what may be shared ------------------------------------------------------------------------


def test_salts_share_nothing(model_folder: Path) -> None:
    prompt = random_tokens(200, seed=32)

    def ask(running: Engine, salt: str) -> int:
        (output,) = running.llm.generate(
            [{"prompt_token_ids": prompt, "cache_salt": salt}], greedy(4), use_tqdm=False
        )
        answers.append(list(output.outputs[0].token_ids))
        return int(output.num_cached_tokens)

    answers: list[Tokens] = []
    with engine(model_folder, plugin={}) as ours:
        assert ask(ours, "one") == 0
        reload(ours)
        assert ask(ours, "two") == 0
        assert ours.blocks_loaded() == 0
        reload(ours)
        assert ask(ours, "one") == 192
        assert ours.blocks_loaded() == 6
        assert answers[0] == answers[1] == answers[2]
        ours.assert_nothing_left()


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
    prompt = random_tokens(200, seed=33)
    adapter = LoRARequest("adapter", 1, str(write_adapter(tmp_path / "adapter")))

    def ask(running: Engine, lora: LoRARequest | None) -> tuple[Tokens, int]:
        (output,) = running.llm.generate(
            [{"prompt_token_ids": prompt}], greedy(8), use_tqdm=False, lora_request=lora
        )
        return list(output.outputs[0].token_ids), int(output.num_cached_tokens)

    lora = {"enable_lora": True, "max_lora_rank": 8}
    with engine(model_folder, **lora) as plain:
        expected = {name: ask(plain, name and adapter)[0] for name in (None, "adapter")}
    assert expected[None] != expected["adapter"]
    with engine(model_folder, plugin={}, **lora) as ours:
        assert ask(ours, None) == (expected[None], 0)
        reload(ours)
        assert ask(ours, adapter) == (expected["adapter"], 0)
        for name in (None, "adapter"):
            reload(ours)
            assert ask(ours, name and adapter) == (expected[name], 192)
            assert ours.blocks_loaded() == 6
        reload(ours)
        ours.slots[:] ^= 0x40
        assert ask(ours, adapter)[0] != expected["adapter"]
        ours.assert_nothing_left()


# -- scheduling --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"async_scheduling": False},
        {"async_scheduling": True},
        {"scheduling_policy": "priority"},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048},
    ],
    ids=["synchronous", "asynchronous", "priority", "whole prompts"],
)
def test_ways_of_scheduling(model_folder: Path, arguments: dict[str, Any]) -> None:
    with engine(model_folder) as plain:
        expected = plain.generate(PROMPTS)
    with engine(model_folder, plugin={}, **arguments) as ours:
        assert ours.generate(PROMPTS) == expected
        reload(ours)
        assert ours.generate(PROMPTS) == expected
        assert ours.blocks_loaded() > 0
        ours.assert_nothing_left()


def test_an_urgent_request_takes_blocks_of_one_that_stores(model_folder: Path) -> None:
    """The one that came first is preempted; both answers stay right."""
    slow, urgent = random_tokens(230, seed=34), random_tokens(230, seed=35)
    with engine(model_folder) as plain:
        expected = [plain.generate([prompt], max_tokens=130)[0] for prompt in (slow, urgent)]
    arguments = {"scheduling_policy": "priority", "blocks": 17, "max_model_len": 480}
    with engine(model_folder, plugin={}, **arguments) as ours:
        add(ours, "slow", slow, 130, priority=5)
        for _ in range(6):
            ours.step()
        add(ours, "urgent", urgent, 130, priority=0)
        preemptions = 0
        finished: dict[str, Any] = {}
        while ours.llm.llm_engine.has_unfinished_requests():
            finished.update(ours.step())
            running = ours.scheduler.requests.values()
            preemptions = max([preemptions, *(r.num_preemptions for r in running)])
        assert preemptions > 0
        tokens = [list(finished[name].outputs[0].token_ids) for name in ("slow", "urgent")]
        assert tokens == expected
        assert ours.blocks_loaded() > 0, "the preempted request came back from host memory"
        ours.assert_nothing_left()


def add(running: Engine, name: str, prompt: Tokens, max_tokens: int, priority: int) -> None:
    running.llm.llm_engine.add_request(
        name, {"prompt_token_ids": prompt}, greedy(max_tokens), priority=priority
    )
