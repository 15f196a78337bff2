"""What was computed once comes back from host memory, and the answers stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness import (
    BLOCK_TOKENS,
    engine,
    prompts_with_shared_prefix,
    random_tokens,
)

PROMPTS = prompts_with_shared_prefix()


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> dict[str, list[list[int]]]:
    """The answers of engines without the plugin."""
    answers = {}
    for kind in ("qwen3", "gemma3"):
        with engine(model_folder, kind) as plain:
            answers[kind] = plain.generate(PROMPTS)
    return answers


PLUGINS: list[dict[str, object]] = [
    {},
    {"eviction_policy": "arc"},
    {"store_blocks": "prompt"},
]


@pytest.mark.parametrize(
    ("kind", "plugin", "synchronous"),
    [
        *((kind, plugin, False) for kind in ("qwen3", "gemma3") for plugin in PLUGINS),
        # Loads of several groups, as gemma3 has them, are never synchronous.
        ("qwen3", {}, True),
    ],
)
def test_reloaded_prompts_give_the_same_tokens(
    model_folder: Path,
    expected: dict[str, list[list[int]]],
    kind: str,
    plugin: dict[str, object],
    synchronous: bool,
) -> None:
    with engine(model_folder, kind, plugin, synchronous_loads=synchronous) as offloading:
        assert offloading.generate(PROMPTS) == expected[kind]
        offloading.reset_gpu_cache()
        stored = offloading.blocks_stored()
        assert offloading.generate(PROMPTS) == expected[kind]
        assert offloading.blocks_loaded() > 0
        # All of a prompt but its last block, at most, came from host memory or from a neighbour.
        for prompt, cached in zip(PROMPTS, offloading.cached_tokens, strict=True):
            assert cached >= (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        offloading.settle()
        # The answers are the same, so they end in the blocks that are stored already.
        assert offloading.blocks_stored() == stored
        offloading.assert_nothing_left()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["step by step", "asynchronous steps"])
@pytest.mark.parametrize(
    ("kind", "synchronous"), [("qwen3", False), ("qwen3", True), ("gemma3", False)]
)
def test_prompts_that_end_with_a_block_come_back_whole(
    model_folder: Path,
    kind: str,
    synchronous: bool,
    asynchronous: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the last token is computed again, unless some layers read a window. With a control."""
    monkeypatch.setattr("kv_offload.scheduler.loads.WHOLE_SECONDS", float("inf"))
    prompts = [random_tokens(count * BLOCK_TOKENS, seed=count) for count in (2, 5, 9)]
    left = 1 if kind == "qwen3" else BLOCK_TOKENS
    with engine(model_folder, kind, async_scheduling=asynchronous) as plain:
        expected = [plain.generate([prompt])[0] for prompt in prompts]
    settings = {"synchronous_loads": synchronous, "async_scheduling": asynchronous}
    with engine(model_folder, kind, {}, **settings) as offloading:

        def answers() -> list[list[int]]:
            found = []
            for prompt in prompts:
                found += offloading.generate([prompt])
                cached.append(len(prompt) - offloading.cached_tokens[0])
            return found

        cached: list[int] = []
        assert answers() == expected
        offloading.reset_gpu_cache()
        stored = offloading.blocks_stored()
        cached.clear()
        assert answers() == expected
        # vLLM counts all tokens of an asynchronous load as cached, the last one included.
        allowed = {left} if synchronous or left > 1 else {0, left}
        assert set(cached) <= allowed
        if kind == "qwen3":
            assert offloading.blocks_loaded() == 2 + 5 + 9
        assert bool(offloading.totals["synchronous_loads"]) == synchronous
        offloading.settle()
        assert offloading.blocks_stored() == stored
        # Answered from the engine's own cache now: what was computed over the load is as good.
        assert answers() == expected
        offloading.reset_gpu_cache()
        offloading.slots[:] ^= 0x40
        assert all(a != b for a, b in zip(answers(), expected, strict=True))
        offloading.assert_nothing_left()


@pytest.mark.parametrize(
    ("kind", "synchronous"), [("qwen3", False), ("qwen3", True), ("gemma3", False)]
)
def test_corrupted_host_memory_changes_the_tokens(
    model_folder: Path, expected: dict[str, list[list[int]]], kind: str, synchronous: bool
) -> None:
    """The control of every comparison here: it must be able to fail."""
    with engine(model_folder, kind, {}, synchronous_loads=synchronous) as offloading:
        offloading.generate(PROMPTS)
        offloading.reset_gpu_cache()
        offloading.slots[:] ^= 0x40
        answers = offloading.generate(PROMPTS)
        assert offloading.blocks_loaded() > 0
        changed = [a != b for a, b in zip(answers, expected[kind], strict=True)]
        assert all(changed)


def test_the_loaded_bytes_are_the_stored_bytes(model_folder: Path) -> None:
    """Compares the KV cache itself: the blocks of a reloaded prompt hold what was computed."""
    prompt = random_tokens(8 * BLOCK_TOKENS + 1, seed=5)
    with engine(model_folder, "qwen3", {}) as offloading:
        offloading.add("first", prompt, max_tokens=1)
        offloading.step()
        computed = _blocks_of(offloading, prompt)
        offloading.run()
        offloading.reset_gpu_cache()
        for tensor in offloading.rank.transfer._state.keep_alive:
            tensor.fill_(float("nan"))
        offloading.add("second", prompt, max_tokens=1)
        offloading.run()
        assert offloading.blocks_loaded() == 8
        assert _blocks_of(offloading, prompt) == computed


def _blocks_of(offloading: object, prompt: list[int]) -> list[bytes]:
    """Read the blocks of a prompt that the engine's own prefix cache knows."""
    pool, rank = offloading.pool, offloading.rank  # type: ignore[attr-defined]
    by_key = {block.block_hash: block.block_id for block in pool.blocks if block.block_hash}
    ids = sorted(by_key.values())
    assert len(ids) == len(prompt) // BLOCK_TOKENS
    tensors = rank.transfer._state.keep_alive
    contents = [b"".join(tensor[i].numpy().tobytes() for tensor in tensors) for i in ids]
    return sorted(contents)
