"""vLLM's own scheduler with this connector and thousands of blocks, without model or copies.

Requests, scheduler, block pool and connector are real. As there is no model, all tokens are equal
and hashes are made up; copies end one step after they are submitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from bench.hook_clock import ConnectorClock
from kv_offload.messages import (
    OffloadMetadata,
    OffloadWorkerMetadata,
    Outcome,
    RankReport,
    WorkerCapacity,
)
from tests.support.configurations import make_tensor, make_vllm_config

BLOCK_TOKENS = 16
BLOCK_BYTES = 2 * BLOCK_TOKENS * 4
PROMPT_CHUNK_TOKENS = 8192
"""Prompt tokens per step in addition to decodes, similar to vLLM's default on an H200."""
SPARE_BLOCKS = 65536
"""GPU blocks beyond those of the running requests, for new requests and pinned stores."""
TOKEN = 7


def block_name(prefix: int, index: int) -> bytes:
    """Return a made-up block hash as long as vLLM's."""
    return prefix.to_bytes(24, "big") + index.to_bytes(8, "big")


def make_scheduler(
    blocks: int, longest_request: int, plugin: dict[str, Any], **limits: Any
) -> Scheduler:
    """Return vLLM's scheduler with this connector, full attention and `num_blocks` GPU blocks."""
    config = make_vllm_config(plugin, max_model_len=4096, **limits)
    # Longer than the small model's configuration allows, but nothing is computed here.
    config.model_config.max_model_len = longest_request
    config.cache_config.block_size = BLOCK_TOKENS
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    kv_cache_config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[make_tensor(blocks * BLOCK_BYTES, ["layer.0"], BLOCK_BYTES)],
        kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)],
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
        log_stats=True,
    )


def make_request(
    request_id: str, name: Callable[[int], bytes], prompt_tokens: int, max_tokens: int
) -> Request:
    """Return a request whose block hashes are `name(index)`."""

    def name_blocks(request: Request) -> list[Any]:
        return [
            name(index)
            for index in range(len(request.block_hashes), request.num_tokens // BLOCK_TOKENS)
        ]

    return Request(
        request_id,
        [TOKEN] * prompt_tokens,
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        block_hasher=name_blocks,
    )


def sampled(output: Any, requests: dict[str, Request], **more: Any) -> ModelRunnerOutput:
    """Return the result of a step: a token for each request whose prompt has been computed."""
    ids = list(output.num_scheduled_tokens)
    # `schedule` has counted this step's tokens as computed.
    ended = [requests[one].num_computed_tokens >= requests[one].num_tokens for one in ids]
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[[TOKEN] if done else [] for done in ended],
        **more,
    )


@dataclass(frozen=True)
class StepCost:
    """Seconds inside the connector's hooks in one step."""

    by_hook: Counter[str]
    scheduled_tokens: int
    stored_blocks: int
    loaded_blocks: int

    @property
    def seconds(self) -> float:
        return self.by_hook.total()


class SchedulerBed:
    """`running` decoding requests of `prompt_tokens` each, and a full host cache of `slots`.

    `plugin` has additional options.
    """

    def __init__(
        self,
        running: int,
        prompt_tokens: int,
        slots: int,
        longest_prompt: int,
        plugin: dict[str, Any] | None = None,
    ) -> None:
        self.decode_tokens = 64 + 16384 * running // 256
        """An upper bound of the tokens sampled per request in preparation and measurement."""
        longest = max(longest_prompt, prompt_tokens + self.decode_tokens) + BLOCK_TOKENS
        blocks_each = (prompt_tokens + self.decode_tokens) // BLOCK_TOKENS + 1
        blocks = running * blocks_each + SPARE_BLOCKS
        self.scheduler = make_scheduler(
            blocks,
            longest,
            {"cpu_bytes": f"{slots * BLOCK_BYTES}B", **(plugin or {})},
            max_num_batched_tokens=running * max(prompt_tokens, PROMPT_CHUNK_TOKENS),
            max_num_seqs=running + 1,
        )
        self.connector.offload_scheduler.take_capacities([WorkerCapacity(0, slots, slots)])
        self.clock = ConnectorClock()
        self.clock.put_on(self.connector)
        self._prefixes = 0
        self._requests: dict[str, Request] = {}
        self._submitted: OffloadMetadata | None = None
        self._start_running(running, prompt_tokens)
        self._fill(slots, longest_prompt)

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def manager(self) -> Any:
        return self.connector.offload_scheduler.manager

    # -- preparation ---------------------------------------------------------------------------

    def _start_running(self, running: int, prompt_tokens: int) -> None:
        """Compute all prompts in one step, and decode until their blocks are stored.

        Prompts differ in length, so that every step completes about the same number of blocks.
        """
        for index in range(running):
            shorter = index % BLOCK_TOKENS
            self.add(f"running-{index}", self.new_prefix(), prompt_tokens - shorter, 1 << 30)
        self.step()
        assert len(self.scheduler.running) == running
        self.scheduler.max_num_scheduled_tokens = PROMPT_CHUNK_TOKENS + running
        slots_left = running * (prompt_tokens // BLOCK_TOKENS)
        while slots_left > 0:  # beyond its new blocks, a round stores blocks of the prompts
            stored = [self.step().stored_blocks for _ in range(BLOCK_TOKENS)]
            if sum(stored) <= running + BLOCK_TOKENS:
                break
            slots_left -= sum(stored) - running
        for _ in range(2 * BLOCK_TOKENS):
            self.step()

    def _fill(self, slots: int, longest_prompt: int) -> None:
        """Fill the host cache with prefixes that no running request has."""
        self._stored_prefixes: list[int] = []
        for _ in range(0, slots, longest_prompt // BLOCK_TOKENS):
            prefix = self.new_prefix()
            # In the first cache group, a key is the block's hash.
            keys = [block_name(prefix, index) for index in range(longest_prompt // BLOCK_TOKENS)]
            self.manager.complete_store(self.manager.prepare_store(keys))
            self._stored_prefixes.append(prefix)
        assert self.manager.slots_in_use == slots

    def take_stored_prefix(self) -> int:
        """Return the latest unused prefix that host memory has and the engine has never had."""
        return self._stored_prefixes.pop()

    def new_prefix(self) -> int:
        self._prefixes += 1
        return self._prefixes

    # -- requests ------------------------------------------------------------------------------

    def add(self, request_id: str, prefix: int, prompt_tokens: int, max_tokens: int) -> None:
        """Queue a request whose blocks are those of `prefix`."""
        request = make_request(request_id, partial(block_name, prefix), prompt_tokens, max_tokens)
        self._requests[request_id] = request
        self.scheduler.add_request(request)

    def serve(self, request_id: str, prefix: int, prompt_tokens: int) -> list[StepCost]:
        """Step until a new request has its only token; return the cost of each step."""
        self.add(request_id, prefix, prompt_tokens, 1)
        costs = []
        while request_id in self.scheduler.requests:
            costs.append(self.step())
        del self._requests[request_id]
        return costs

    @contextmanager
    def waiting_hit(self, request_id: str, prompt_tokens: int) -> Iterator[Callable[[], None]]:
        """Queue a prompt that is in host memory, while another request holds one block too many.

        Yields a function that compensates for blocks that decodes take; call it before every step.
        """
        pool = self.scheduler.kv_cache_manager.block_pool
        running = len(self.scheduler.running)
        left = prompt_tokens // BLOCK_TOKENS - 1
        held = pool.get_new_blocks(pool.get_num_free_blocks() - left)

        def make_up() -> None:
            for _ in range(left - pool.get_num_free_blocks()):
                pool.free_blocks([held.pop()])

        self.add(request_id, self.take_stored_prefix(), prompt_tokens, 1)
        try:
            yield make_up
        finally:
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            del self._requests[request_id]
            pool.free_blocks(held)
            assert len(self.scheduler.running) == running, "a decode was preempted"

    # -- one step ------------------------------------------------------------------------------

    def step(self) -> StepCost:
        """Schedule a step, pretend to compute it, and deliver its output."""
        self.clock.take()
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        result = sampled(output, self._requests, kv_connector_output=self._copies_ended())
        self._submitted = metadata
        self.scheduler.update_from_output(output, result)
        return StepCost(
            self.clock.take(),
            output.total_num_scheduled_tokens,
            sum(len(job.pairs) for job in metadata.stores),
            sum(len(job.pairs) for job in metadata.loads),
        )

    def _copies_ended(self) -> KVConnectorOutput:
        """Report the copies of the last step, as one rank would."""
        ended = KVConnectorOutput()
        if (metadata := self._submitted) is not None:
            jobs = {job.job_id: Outcome.OK for job in metadata.stores}
            jobs |= {job.job_id: Outcome.OK for job in metadata.loads}
            if jobs:
                ended.kv_connector_worker_meta = OffloadWorkerMetadata({0: RankReport(jobs)})
        return ended
