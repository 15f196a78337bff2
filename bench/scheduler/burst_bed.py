"""A burst of requests for vLLM's scheduler, while a few others decode and no copy ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from kv_swap.tiers.record import PAGE_BYTES
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from bench.scheduler.bed import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    block_name,
    make_request,
    make_scheduler,
    sampled,
)
from kv_offload.messages import TierCapacity, WorkerCapacity
from kv_offload.tiers.directory import Question
from tests.support.loads import set_synchronous_loads

Where = Literal["vLLM alone", "asks again", "host memory", "disk", "remote"]
"""Where the prefixes are. `asks again` is a connector that only answers "ask again"."""

TAIL_TOKENS = 40
DECODES = 8
SHARED_PREFIX = 1 << 20
"""The number of a shared prefix; separate prefixes have smaller numbers."""
TAILS = 1 << 40
"""Tails have larger numbers."""


class FullDirectory:
    """A store's directory that reports at once that the store has all prefixes, but no tails."""

    def __init__(self, *_: object) -> None:
        """Accept the arguments of a directory."""

    def ask(self, question: Question) -> None:
        question.found = [int.from_bytes(name[-32:-8], "big") < TAILS for name in question.names]
        question.answered = time.monotonic()

    def close(self, timeout_seconds: float) -> None:
        """Do nothing: there is no thread."""


class BurstBed:
    """A decoding engine with the prefixes of a burst in the place `where`."""

    def __init__(self, where: Where, requests: int, blocks: int, folder: Path, equal: bool) -> None:
        self.blocks = blocks
        self._equal = equal
        self._where = where
        slots = 4 * blocks if equal else 2 * requests * blocks
        plugin: dict[str, Any] = {
            "cpu_bytes": f"{slots * BLOCK_BYTES}B",
            "eviction_policy": "lru",
            "load_or_recompute": "always_load",
        }
        if where == "disk":
            disk_bytes = f"{(slots + 32) * 2 * PAGE_BYTES}B"
            plugin["disk"] = {"path": str(folder), "bytes": disk_bytes, "keep_on_restart": False}
        elif where == "remote":
            plugin |= {"remote": {"kind": "mooncake", "address": "127.0.0.1:1", "bytes": 0}}
        self.scheduler: Scheduler = make_scheduler(
            65536,
            blocks * BLOCK_TOKENS + 4096,
            plugin,
            max_num_batched_tokens=2048,
            max_num_seqs=256,
            **({"transfer_config": lambda _: None} if where == "vLLM alone" else {}),
        )
        self._requests: dict[str, Request] = {}
        if where != "vLLM alone":
            below = TierCapacity(slots, "bench")
            tiers = {str(where): below} if where in ("disk", "remote") else {}
            capacity = WorkerCapacity(0, slots, slots, tiers=tiers)
            offload = self.scheduler.connector.offload_scheduler
            offload.take_capacities([capacity])
            set_synchronous_loads(offload, False)
        if where == "asks again":
            self.scheduler.connector.get_num_new_matched_tokens = self._ask_again
        for index in range(DECODES):
            self.add(f"decode-{index}", -1, 0, TAIL_TOKENS, 1 << 20)
        for _ in range(16):
            self.step()

    @staticmethod
    def _ask_again(request: Request, _: int) -> tuple[int | None, bool]:
        return (None, False) if request.request_id.startswith("burst") else (0, False)

    def add(self, name: str, prefix: int, blocks: int, tail: int, max_tokens: int) -> Request:
        """Queue a request with `blocks` blocks of a prefix and a unique tail."""
        own, shared = TAILS + len(self._requests), self._names(prefix, blocks)
        request = make_request(
            name,
            lambda index: shared[index] if index < blocks else block_name(own, index),
            blocks * BLOCK_TOKENS + tail,
            max_tokens,
        )
        self._requests[name] = request
        self.scheduler.add_request(request)
        return request

    @property
    def waiting(self) -> int:
        """Number of requests that are not running."""
        return len(self.scheduler.requests) - len(self.scheduler.running)

    def close(self) -> None:
        """Stop the connector's threads."""
        if self._where != "vLLM alone":
            self.scheduler.connector.shutdown()

    def burst(self, requests: int) -> None:
        """Store the prefixes, then queue the requests."""
        equal = self._equal
        for prefix in [SHARED_PREFIX] if equal else range(requests):
            self._keep(self._names(prefix, self.blocks))
        for index in range(requests):
            prefix = SHARED_PREFIX if equal else index
            self.add(f"burst-{index}", prefix, self.blocks, TAIL_TOKENS, 2)

    @lru_cache(maxsize=1)  # noqa: B019 - the cache lives as long as the bed
    def _names(self, prefix: int, blocks: int) -> list[bytes]:
        return [block_name(prefix, index) for index in range(blocks)]

    def _keep(self, keys: list[bytes]) -> None:
        if self._where == "host memory":
            manager = self.scheduler.connector.offload_scheduler.manager
        elif self._where == "disk":
            manager = self.scheduler.connector.offload_scheduler.tiers.tiers["disk"].manager
        else:
            return
        manager.complete_store(manager.prepare_store(keys))

    def step(self) -> float:
        """Schedule a step and return its CPU seconds; deliver a token for each decode."""
        began = time.process_time()
        output = self.scheduler.schedule()
        seconds = time.process_time() - began
        self.scheduler.update_from_output(output, sampled(output, self._requests))
        return seconds


@contextmanager
def full_store() -> Iterator[None]:
    """Make engines built in this context use a store that has everything."""
    with (
        mock.patch.dict("os.environ", PYTHONHASHSEED="0"),
        mock.patch("kv_offload.engines.vllm.start.tiers.RemoteDirectory", FullDirectory),
    ):
        yield
