"""Kinds of KV cache beside full attention and windows, as far as the CPU engine computes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kv_offload.engines.vllm.versions import reports_failed_requests, vllm_version
from tests.engine.harness import Engine, Tokens, engine, prompts_with_shared_prefix

PROMPTS = prompts_with_shared_prefix(shared=500, tails=(21, 25, 40, 85), seed=3)


@dataclass(frozen=True)
class Kind:
    """A small model, and how it is started."""

    model: str
    arguments: dict[str, Any] = field(default_factory=dict)


NEWER = reports_failed_requests(vllm_version())
KINDS = [
    pytest.param(Kind("llama4"), id="chunks"),
    pytest.param(
        Kind("qwen3_next", {"dtype": "bfloat16", "enable_prefix_caching": True}),
        id="gated delta nets",
        marks=pytest.mark.skipif(not NEWER, reason="this vLLM's CPU kernels refuse its states"),
    ),
    pytest.param(
        Kind("falcon_h1", {"enable_prefix_caching": True}),
        id="Mamba 2",
        marks=pytest.mark.skipif(NEWER, reason="this vLLM's CPU kernels fail on it"),
    ),
]


def answers(running: Engine) -> list[Tokens]:
    """Answer prompt by prompt, so that every engine computes the same batches."""
    return [running.generate([prompt])[0] for prompt in PROMPTS]


def least_cached(running: Engine, block_tokens: int) -> list[tuple[int, int]]:
    """Answer prompt by prompt; return how many tokens were cached, and how many in whole blocks."""
    found = []
    for prompt in PROMPTS:
        running.generate([prompt])
        found.append((running.cached_tokens[0], (len(prompt) - 1) // block_tokens * block_tokens))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_reloaded_prompts_give_the_same_tokens(model_folder: Path, kind: Kind) -> None:
    """Compares with an engine without the plugin, and ends with corrupted host memory."""
    with engine(model_folder, kind.model, **kind.arguments) as plain:
        # vLLM makes blocks as large as a state, whose type depends on the processor.
        block_tokens = plain.scheduler.cache_config.block_size
        # Its second answers compute what ours do when they load the prompts' whole blocks.
        expected = [answers(plain), answers(plain)]
    with engine(model_folder, kind.model, {}, **kind.arguments) as offloading:
        computed = answers(offloading)
        offloading.reset_gpu_cache()
        stored = offloading.blocks_stored()
        for tensor in keep_alive(offloading):
            tensor.fill_(1.5)  # nothing may be served from the engine's own memory
        reloaded = answers(offloading)
        assert [computed, reloaded] == expected
        assert offloading.blocks_loaded() > 0
        offloading.settle()
        # The same tokens end in the same blocks, which are known.
        assert offloading.blocks_stored() == stored
        offloading.reset_gpu_cache()
        assert all(cached == whole > 0 for cached, whole in least_cached(offloading, block_tokens))

        offloading.reset_gpu_cache()
        offloading.slots[:] ^= 0x40
        corrupted = answers(offloading)
        assert all(a != b for a, b in zip(corrupted, reloaded, strict=True))
        offloading.assert_nothing_left()


def keep_alive(offloading: Engine) -> list[Any]:
    """Return every tensor that the engine registered; a layer with states has several."""
    tensors = []
    for one in offloading.rank.transfer._state.keep_alive:
        tensors += one if isinstance(one, (list, tuple)) else [one]
    return tensors
