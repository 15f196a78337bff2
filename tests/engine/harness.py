"""A real engine in this process, with or without the plugin, and access to its parts."""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from kv_offload.engines.vllm.locate import connectors_in, worker_of_process
from kv_offload.tools.tier.read import read_folder
from tests.support.inputs import BLOCK_TOKENS, Tokens, random_tokens, transfer_config
from tests.support.loads import set_synchronous_loads
from tests.support.processes import shut_down
from tests.support.small_models import write_draft_head, write_model
from tests.support.totals import counted_stats
from tests.support.waiting import wait_until

PATIENCE_SECONDS = 120
"""Time without progress after which an engine counts as stuck."""


def _tensors_of(layer: Any) -> list[Any]:
    """Return a model layer's KV tensors; one with states has several views of its page."""
    cache = getattr(layer, "kv_cache", [])
    return [*cache] if isinstance(cache, (list, tuple)) else [cache]


def prompts_with_shared_prefix(
    shared: int = 300, tails: Sequence[int] = (21, 25, 40, 85), seed: int = 0
) -> list[Tokens]:
    """Return prompts that share a prefix and have different ends."""
    prefix = random_tokens(shared, seed)
    return [prefix + random_tokens(tail, 1000 * seed + i + 1) for i, tail in enumerate(tails)]


def full_blocks(prompts: Sequence[Tokens]) -> int:
    """Return the number of different blocks in prompts that requests may load.

    The last token of a prompt is always computed, so a block that ends with it does not count.
    """
    return len(
        {
            tuple(prompt[:end])
            for prompt in prompts
            for end in range(BLOCK_TOKENS, len(prompt), BLOCK_TOKENS)
        }
    )


def patiently(max_steps: int) -> Iterator[int]:
    """Yield the numbers of at least `max_steps` steps, and of more within `PATIENCE_SECONDS`.

    Steps that wait for copies take no time, and on a busy machine the copying thread may not run
    during many of them.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    for step in itertools.count():
        if step >= max_steps and time.monotonic() >= until:
            return
        yield step


class Engine:
    """One in-process vLLM engine."""

    def __init__(self, llm: LLM, totals: Counter[str]) -> None:
        self.llm = llm
        self.totals = totals
        self.preemptions = 0
        preempt = self.scheduler._preempt_request

        def count_and_preempt(*arguments: Any, **more: Any) -> Any:
            self.preemptions += 1
            return preempt(*arguments, **more)

        self.scheduler._preempt_request = count_and_preempt

    # -- running ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Tokens],
        max_tokens: int = 8,
        **more: Any,
    ) -> list[Tokens]:
        """Answer prompts greedily, with `more` in each; return the new tokens of each."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt), **more} for prompt in prompts],
            greedy(max_tokens),
            use_tqdm=False,
        )
        self.cached_tokens = [output.num_cached_tokens for output in outputs]
        return [list(output.outputs[0].token_ids) for output in outputs]

    def generate_each(
        self, prompts: Sequence[Tokens], max_tokens: int = 8, **more: Any
    ) -> list[Tokens]:
        """Answer prompts one by one, so that all engines compute the same batches."""
        answers, cached_tokens = [], []
        for prompt in prompts:
            answers += self.generate([prompt], max_tokens, **more)
            cached_tokens += self.cached_tokens
        self.cached_tokens = cached_tokens
        return answers

    def reload(
        self,
        prompts: Sequence[Tokens],
        max_tokens: int = 8,
        *,
        one_by_one: bool = False,
        corrupted: bool = False,
        **more: Any,
    ) -> list[Tokens]:
        """Answer prompts that only host memory has; blocks must be loaded.

        With `corrupted`, host memory is corrupted first: the control of every comparison.
        """
        self.forget()
        if corrupted:
            self.slots[:] ^= 0x40
        generate = self.generate_each if one_by_one else self.generate
        answers = generate(prompts, max_tokens, **more)
        assert self.blocks_loaded() > 0
        return answers

    def forget(self) -> None:
        """Drop the prompts everywhere but in host memory, and reset the totals."""
        self.reset_gpu_cache()
        self.totals.clear()
        for tensor in self.kv_tensors:
            tensor.fill_(50.0)

    def forget_host_memory(self) -> None:
        """Drop the prompts everywhere but in the tier below host memory."""
        self.settle()
        self.forget()
        self.offload.manager.reset()
        self.slots[:] = 0x55

    def add(
        self,
        request_id: str,
        prompt: Tokens,
        max_tokens: int = 8,
        priority: int = 0,
        **sampling: Any,
    ) -> None:
        """Queue a request for `step`."""
        self.llm.llm_engine.add_request(
            request_id,
            {"prompt_token_ids": list(prompt)},
            greedy(max_tokens, **sampling),
            priority=priority,
        )

    def step(self) -> dict[str, Any]:
        """Run one engine step; return the outputs of requests that finished, by request id."""
        outputs = self.llm.llm_engine.step()
        return {output.request_id: output for output in outputs if output.finished}

    def run(self, max_steps: int = 2000) -> dict[str, Any]:
        """Step until no requests are left."""
        finished: dict[str, Any] = {}
        for _ in patiently(max_steps):
            if not self.llm.llm_engine.has_unfinished_requests():
                return finished
            finished.update(self.step())
        raise AssertionError(f"requests still run after {max_steps} steps")

    def abort(self, *request_ids: str) -> None:
        """Abort requests, as when a client disconnects."""
        self.llm.llm_engine.abort_request(list(request_ids))

    def settle(self, max_steps: int = 2000) -> None:
        """Step an idle engine until no store or load is left, as the engine's own loop does."""
        for _ in patiently(max_steps):
            if not self.scheduler.has_requests():
                return
            self.core.step_fn()
        raise AssertionError("the engine does not come to rest")

    # -- parts -----------------------------------------------------------------------------

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def offload(self) -> Any:
        return next(connectors_in(self.scheduler.connector)).offload_scheduler

    @property
    def rank(self) -> Any:
        return worker_of_process()

    @property
    def kv_tensors(self) -> list[Any]:
        """Every tensor that the engine registered."""
        return list(self.rank.transfer._state.keep_alive)

    @property
    def slots(self) -> np.ndarray:
        """The arena as `(slots, bytes)`."""
        return self.rank.transfer._state.arena.view()

    def watch_kv_tensors(self) -> dict[str, weakref.ref[Any]]:
        """Return weak references to the KV tensors in the model's layers, by layer."""
        layers = self.core.vllm_config.compilation_config.static_forward_context
        watched = {
            f"{name}, {index}": weakref.ref(tensor)
            for name, layer in layers.items()
            for index, tensor in enumerate(_tensors_of(layer))
        }
        assert watched
        return watched

    @property
    def block_bytes(self) -> int:
        return int(self.rank.transfer.layout.block_bytes)

    def blocks_loaded(self) -> int:
        return int(self.totals["loaded_bytes"]) // self.block_bytes

    def blocks_stored(self) -> int:
        return int(self.totals["stored_bytes"]) // self.block_bytes

    def reset_gpu_cache(self) -> None:
        """Reset the engine's own prefix cache, so that only host memory can serve a prefix."""
        assert self.llm.reset_prefix_cache() is True
        # From draining; the engine would ask only at the end of a step.
        stats = self.rank.take_stats()
        self.totals.update(stats.data if stats is not None else {})

    def assert_nothing_left(self) -> None:
        """Assert that no pin, job, reader or writer is left once the engine is idle."""
        assert self.rank.transfer.wait(120)
        self.generate([random_tokens(3, seed=0)], max_tokens=1)  # a step, to apply the last reports
        self.settle()
        assert not self.offload.in_flight.pinned_blocks
        gauges = self.offload.gauges()
        assert (gauges["pinned_blocks"], gauges["running_loads"]) == (0, 0)
        self.offload.check_integrity()
        assert not self.offload._requests
        assert self.rank.transfer.in_flight == 0
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        self.offload.manager.check_integrity()
        self.offload.manager.reset()
        assert self.offload.manager.slots_in_use == 0


def noted_blocks(folder: Path) -> int:
    """Return how many blocks a disk's index has, which is what a killed engine leaves."""
    return sum(replica.used_slots for replica in read_folder(folder))


def wait_until_noted(running: Engine, folder: str | Path) -> None:
    """Wait until the index has everything that an engine has written."""
    written = running.offload.gauges()["tier_slots_in_use"]
    assert written > 0
    wait_until(lambda: noted_blocks(Path(folder)) == written)


def corrupt_arenas(folder: Path) -> None:
    """Change all bytes of a host pool's arenas, without their owners noticing."""
    for path in folder.glob("kv-offload-*/chat/seat-*/rank-*"):
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        np.frombuffer(memory, np.uint8)[:] ^= 0x40


class Drafts:
    """Counts the drafts that the model checks and accepts."""

    def __init__(self, running: Engine) -> None:
        self.checked = self.accepted = 0
        make = running.scheduler.make_spec_decoding_stats

        def count(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **more: Any) -> Any:
            self.checked += num_draft_tokens
            self.accepted += num_accepted_tokens
            return make(stats, num_draft_tokens, num_accepted_tokens, **more)

        running.scheduler.make_spec_decoding_stats = count

    def take(self) -> tuple[int, int]:
        """Return the drafts checked and accepted since the last call."""
        counts = self.checked, self.accepted
        self.checked = self.accepted = 0
        return counts


def draft_head(models: Path) -> dict[str, Any]:
    """Return vLLM's configuration of a head that drafts three tokens at a time for `llama`."""
    head = write_draft_head(write_model("llama", models / "llama"), models / "eagle")
    return {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **more
    )


def engine_settings(models: Path, kind: str, **more: Any) -> dict[str, Any]:
    """Return `LLM`'s arguments for a small model, which is written if it does not exist."""
    return {
        "model": str(write_model(kind, models / kind)),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": 64 << 20,
        "num_gpu_blocks_override": 400,
        "max_model_len": 2048,
        "dtype": "float32",
        "seed": 0,
        **more,
    }


@contextlib.contextmanager
def engine(
    models: Path,
    kind: str = "qwen3",
    plugin: dict[str, Any] | None = None,
    *,
    blocks: int = 400,
    synchronous_loads: bool = False,
    left_over: bool = False,
    **arguments: Any,
) -> Iterator[Engine]:
    """Start an engine, with the plugin if it is configured, and shut it down at the end.

    Either all its loads are synchronous, as far as its model allows, or none is. `left_over` says
    that the connector of an earlier engine still exists.
    """
    if plugin is not None:
        arguments.setdefault("kv_transfer_config", transfer_config(plugin))
    settings = engine_settings(models, kind, num_gpu_blocks_override=blocks, **arguments)
    is_left = has_kv_transfer_group()
    assert is_left == left_over, "one process holds one engine with a connector at a time"
    with counted_stats() as totals:
        running = Engine(LLM(**settings), totals)
        if plugin is not None:
            set_synchronous_loads(running.offload, synchronous_loads)
            running.offload.watch.load_rate.learn(float("inf"))
        try:
            yield running
        finally:
            shut_down(running.llm)
            del running.llm
            gc.collect()


@contextlib.contextmanager
def offloading(
    models: Path, kind: str = "qwen3", plugin: dict[str, Any] | None = None, **arguments: Any
) -> Iterator[Engine]:
    """Start an engine with the plugin, and check that nothing is left if the test passes."""
    with engine(models, kind, plugin or {}, **arguments) as running:
        yield running
        running.assert_nothing_left()


_answers: dict[str, list[Tokens]] = {}


def plain_answers(
    models: Path,
    prompts: Sequence[Tokens],
    kind: str = "qwen3",
    *,
    one_by_one: bool = False,
    **arguments: Any,
) -> list[Tokens]:
    """Return the answers of an engine without the plugin, started once per set of arguments.

    Not to be called while an engine with the plugin exists.
    """
    asked = repr((models, prompts, kind, one_by_one, arguments))
    if asked not in _answers:
        with engine(models, kind, **arguments) as plain:
            generate = plain.generate_each if one_by_one else plain.generate
            _answers[asked] = generate(prompts)
    return _answers[asked]


def all_differ(answers: Sequence[Tokens], others: Sequence[Tokens]) -> bool:
    return all(answer != other for answer, other in zip(answers, others, strict=True))


def refusal(models: Path, error: type[Exception], kind: str = "qwen3", **arguments: Any) -> str:
    """Start an engine that must fail to start with this error; return its message."""
    with pytest.raises(error) as caught, engine(models, kind, **arguments):
        pass
    ensure_kv_transfer_shutdown()  # from a rank that was ready before
    cleanup_dist_env_and_memory()  # so that the next engine does not find these groups of ranks
    return str(caught.value)
