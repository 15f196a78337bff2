"""A vLLM scheduler without a model: its scheduling and our connector are real, the rest is played.

`PlayedEngine` drives vLLM's own `Scheduler` with both roles of `KVOffloadConnector`. The model
(`played_model`) checks all KV that it reads, and the copies (`manual_copies`) run when the test
says so. Every token that a client gets is compared with the model's answer without a cache. After
every step each readable slot is compared with what its key stands for, which shows that only
computed blocks were stored.
"""

from __future__ import annotations

import dataclasses
import inspect
import queue
from collections import ChainMap, Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from kv_swap.engine import Direction
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.v1.core.kv_cache_utils import (
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kv_offload.cache.prefix import CacheGroup, PrefixMap
from kv_offload.engines.vllm import CONNECTOR
from kv_offload.engines.vllm.locate import connectors_in
from kv_offload.metrics import KINDS
from tests.support.configurations import (
    PAGE_WORDS,
    make_kv_cache_config,
    make_request,
    make_vllm_config,
)
from tests.support.loads import set_synchronous_loads
from tests.support.played_model import VOCABULARY, PlayedModel, Tokens, answer, name_prefixes
from tests.support.played_rank import PlayedExecutor, PlayedRank
from tests.support.router import Block, Router
from tests.support.timing import Timing

Known = tuple[NDArray[np.int64], int]
"""A block's content: the names of its tokens, or one for a state; and its group's number."""


class RestlessError(AssertionError):
    """Requests are left, but steps make no progress."""


class PlayedEngine:
    """An engine core in pieces: `schedule`, `execute` and `process` are called by the test.

    `execute` runs the oldest scheduled step on all ranks, `process` passes the oldest executed one
    back to the scheduler. As many steps may be in flight as a pipeline has stages, and with
    asynchronous scheduling one more. All stages run a step at once: none sees what another does,
    and the scheduler gets the output of a step when all have run it.
    """

    beside = False
    """Whether the only rank is in the scheduler's process, so that the scheduler asks it what
    ended."""
    async_scheduling = replaces_resumed = False
    """The default of engines that do not set it."""
    model_class: type[PlayedModel] = PlayedModel

    def __init__(
        self,
        groups: Sequence[CacheGroup] = (CacheGroup(0, 4),),
        *,
        plugin: dict[str, Any] | None = None,
        blocks: int = 40,
        slots: int = 64,
        ranks: int = 1,
        stages: int = 1,
        async_scheduling: bool | None = None,
        drafts: int = 0,
        draft_head: bool = False,
        modules: int = 1,
        replaces_resumed: bool | None = None,
        synchronous_loads: bool = False,
        context_ranks: int = 1,
        prefill_ranks: int = 1,
        interleave: int = 1,
        match_tokens: int | None = None,
        checkpoints: int = 0,
        replica: int | None = None,
        beside: bool | None = None,
        locked_slots: int | None = None,
        handshake: bool = True,
        timing: Timing | None = None,
        **arguments: Any,
    ) -> None:
        # Tests with few slots expect that the oldest are evicted.
        plugin = {
            "cpu_bytes": f"{slots * ranks * PAGE_WORDS * 8}B",
            "eviction_policy": "lru",
            **(plugin or {}),
        }
        if async_scheduling is None:
            async_scheduling = self.async_scheduling
        if replaces_resumed is not None:
            self.replaces_resumed = replaces_resumed
        config = make_vllm_config(
            plugin,
            drafts=drafts,
            draft_head=draft_head,
            modules=modules,
            async_scheduling=async_scheduling,
            ranks=ranks,
            **arguments,
        )
        config.cache_config.block_size = groups[0].block_tokens
        config.cache_config.num_gpu_blocks = blocks
        config.cache_config.prefix_match_unit = match_tokens
        if any(group.holds_state for group in groups):
            config.cache_config.mamba_cache_mode = "align"
        config.parallel_config.pipeline_parallel_size = stages
        config.parallel_config.decode_context_parallel_size = context_ranks
        config.parallel_config.prefill_context_parallel_size = prefill_ranks
        config.parallel_config.cp_kv_cache_interleave_size = interleave
        if replica is not None:
            config.parallel_config.data_parallel_size = 2
            config.parallel_config.data_parallel_rank = replica
        kv_cache_config = make_kv_cache_config(
            groups, blocks, drafts=drafts, checkpoints=checkpoints, modules=modules
        )
        block_tokens, self.hash_block_tokens = resolve_kv_cache_block_sizes(kv_cache_config, config)
        self.groups = tuple(
            group
            if group.holds_state or group.is_scratch
            else dataclasses.replace(group, block_tokens=group.block_tokens * context_ranks)
            for group in groups
        )
        self.max_steps_under_way = stages + async_scheduling
        scheduler_class = AsyncScheduler if async_scheduling else Scheduler
        self.scheduler = scheduler_class(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_tokens,
            hash_block_size=self.hash_block_tokens,
            log_stats=True,
        )
        if self.replaces_resumed:
            # What runner V2 makes the scheduler do.
            self.scheduler.use_v2_model_runner = True
        self.ranks = [PlayedRank(config, kv_cache_config, rank) for rank in range(ranks)]
        self.scheduled: deque[Any] = deque()
        self.executed: deque[tuple[Any, ModelRunnerOutput]] = deque()
        for rank in self.ranks if locked_slots is not None else ():
            rank.copies.locked_slots = locked_slots
        if beside is not None:
            self.beside = beside
        if self.beside and ranks == 1:
            self.connector._local_rank = lambda: self.ranks[0].connector.offload_worker
        if handshake:
            told = self.model_executor.get_kv_connector_handshake_metadata()
            self.connector.set_xfer_handshake_metadata_pp_aware(dict(ChainMap(*told)))
        set_synchronous_loads(self.offload, synchronous_loads)
        self.offload.watch.load_rate.learn(float("inf"))
        self._prefixes = PrefixMap(
            self.groups, self.hash_block_tokens, make_block_hash_with_group_id
        )
        kv = [rank.kv for rank in self.ranks]
        self.model = self.model_class(self.groups, kv, context_ranks, interleave)
        if checkpoints:
            self.model.find_checkpoint = self._find_checkpoint
        self.timing: Any = timing or Timing()
        self.timing.attach(self)
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._aggregator = KVOutputAggregator.from_connector(self.connector, ranks)
        self._drafts = drafts
        self.propose: Callable[[Tokens], Tokens] = self.good_drafts
        self.answers: dict[str, Tokens] = {}
        self.expected: dict[str, Tokens] = {}
        """The model's answers without a cache, except for requests that saw other weights."""
        self.ended: dict[str, str] = {}
        """Finish reasons of requests, as their clients see them."""
        self.may_fail = plugin.get("on_load_failure") == "fail"
        """Whether a request may end with an error; it always may if the model may lose KV."""
        self.totals: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}
        """The last values reported."""
        self.observed: dict[str, list[float]] = {}
        """All values reported for histograms."""
        self.known: dict[bytes, Known] = {}
        """The content that a slot key stands for."""
        self._requests: list[tuple[Request, int]] = []
        self.routers: list[Router] = []
        """Two routers that follow the engine's KV events, if these are on."""
        if arguments.get("events"):
            self.routers = [
                Router(self.hash_block_tokens, clears_all=clears_all)
                for clears_all in (True, False)
            ]
            self.scheduler.kv_event_publisher.publish = self._publish

    def _find_checkpoint(self, start: int, end: int, block_tokens: int) -> tuple[int, int]:
        """Return how far into a prefill a state is kept, and its place in the table; 0 for none."""
        coordinator = self.scheduler.kv_cache_manager.coordinator
        rule = {
            "hash_block_size": self.hash_block_tokens,
            "mamba_block_size": block_tokens,
            "checkpoint_alignment": 1,
            "drop_eagle_block": self.scheduler.use_eagle_block_drop,
        }
        find = compute_mamba_prefill_checkpoints
        if "cache_hit_alignment_tokens" in inspect.signature(find).parameters:  # from vLLM 0.32
            rule["cache_hit_alignment_tokens"] = coordinator._cache_hit_alignment_tokens
        (offset,), (slot,) = find([end], [end - start], **rule)
        return offset, slot

    def _publish(self, batch: Any) -> None:
        self._learn_keys()
        in_memory = self.blocks_in_memory()
        for router in self.routers:
            router.hear(batch.events, in_memory)

    def blocks_in_memory(self) -> set[Block]:
        """Return the readable blocks of host memory by cache group and hash."""
        return self._blocks(self.offload.manager.readable_slots())

    def blocks_on_disk(self) -> set[Block]:
        """Return those of the disk, if there is one."""
        disk = self.offload.tiers.tiers.get("disk")
        manager = None if disk is None else disk.manager
        return self._blocks([] if manager is None else manager.readable_slots())

    def _blocks(self, keys: Iterable[bytes]) -> set[Block]:
        suffix_bytes = len(make_block_hash_with_group_id(b"", 0))
        found = set()
        for key in keys:
            _, group_id = self.known.get(key, (None, 0))  # unknown if an earlier process stored it
            block_hash = key[:-suffix_bytes] if group_id else key
            found.add((group_id, maybe_convert_block_hash(block_hash)))
        return found

    def check_routers(self) -> None:
        """Check that routers know what is in host memory, once no announcement is pending."""
        if self.routers and not self.offload.has_pending_work and not self.held_back:
            for router in self.routers:
                assert router.in_memory == self.blocks_in_memory()
                assert router.on_disk == self.blocks_on_disk()

    @property
    def held_back(self) -> list[Any]:
        """Announcements that routers do not get before a copy has ended."""
        found: list[Any] = []
        for take in self.offload._subscribers.announcements:
            found += take.__self__.held_back
        return found

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def offload(self) -> Any:
        return next(connectors_in(self.connector)).offload_scheduler

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def core(self) -> Any:
        """vLLM's engine core, of which only the scheduler is real."""
        core = object.__new__(EngineCore)
        core.scheduler = self.scheduler
        core.model_executor = self.model_executor
        core.mm_receiver_cache = None
        core.output_queue = self._sent
        return core

    @property
    def model_executor(self) -> PlayedExecutor:
        """The executor: ours finds it on the call stack at startup, and calls ranks through it."""
        return PlayedExecutor(self)

    def good_drafts(self, tokens: Tokens) -> Tokens:
        """Draft tokens that the model will sample."""
        return answer(tokens, self._drafts, self.model.weights)

    def change_weights(self) -> None:
        """Change the KV of all tokens; host memory must hold none of the old."""
        self.model.weights += 1
        self.known.clear()
        self.expected.clear()
        self._requests = [(request, 0) for request, _ in self._requests]

    def bad_drafts(self, tokens: Tokens) -> Tokens:
        """Draft tokens that the model will not sample."""
        return [(token + 1) % VOCABULARY for token in self.good_drafts(tokens)]

    def add(
        self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, **sampling: Any
    ) -> Request:
        request = make_request(request_id, prompt, self.hash_block_tokens, max_tokens, **sampling)
        self.scheduler.add_request(request)
        self._requests.append((request, 0))
        for told in (self.answers, self.ended):
            told.pop(request_id, None)
        room = self.scheduler.max_model_len - len(prompt)
        self.expected[request_id] = answer(prompt, min(max_tokens, room), self.model.weights)
        if request.resumable:
            del self.expected[request_id]  # it depends on how much of each answer the session keeps
        return request

    def stream(
        self, request_id: str, *parts: tuple[Sequence[int], int], **sampling: Any
    ) -> Request:
        """Begin a session of parts, each tokens and the number to sample, and end it after them."""
        (prompt, max_tokens), *others = parts
        sampling["resumable"] = True
        session = self.add(request_id, prompt, max_tokens, **sampling)
        for tokens, number in others:
            hash_tokens = self.hash_block_tokens
            part = make_request(request_id, tokens, hash_tokens, number, **sampling)
            self.scheduler.add_request(part)
        self.scheduler.add_request(make_request(request_id, prompt, self.hash_block_tokens))
        return session

    def serve(self, request_id: str, prompt: Sequence[int], *args: int, **sampling: Any) -> Request:
        """Add a request, and run until the engine is idle."""
        request = self.add(request_id, prompt, *args, **sampling)
        self.run()
        return request

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    @property
    def under_way(self) -> int:
        return len(self.scheduled) + self.timing.late + len(self.executed)

    def schedule_all(self) -> None:
        """Plan as many steps as may be in flight."""
        while self.under_way < self.max_steps_under_way:
            self.schedule()

    def schedule(self) -> Any:
        assert self.under_way < self.max_steps_under_way
        output = self.scheduler.schedule()
        self.scheduled.append(output)
        return output

    def execute(self) -> None:
        self.timing.launch(self.scheduled.popleft())

    def forward(self, output: Any) -> list[Tokens]:
        return self.model.forward(output, self.propose if self._drafts else lambda _: [])

    def take_results(self, output: Any, sampled: list[Tokens], reports: Sequence[Any]) -> None:
        """Put a step's results where `process` finds them."""
        ids = list(output.num_scheduled_tokens)
        results = [
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=[list(tokens) for tokens in sampled],
                kv_connector_output=report,
            )
            for report in reports
        ]
        # Like vLLM's executors: only results from other processes are merged.
        alone = self.beside and len(results) == 1
        result = results[0] if alone else self._aggregator.aggregate(results)
        self.executed.append((output, result))

    def process(self) -> None:
        if not self.executed:
            self.timing.compute()
        output, result = self.executed.popleft()
        drafts = dict(self.model.drafts)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                self.answers.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.ended[one.request_id] = str(one.finish_reason)
                self.check_answer(one.request_id)
            self._take_stats(outputs.scheduler_stats)
        if self._drafts and not self.scheduler.scheduler_config.async_scheduling:
            # vLLM resets between whole steps, so preempted requests get no drafts.
            for request in self.scheduler.requests.values():
                if request.status == RequestStatus.PREEMPTED:
                    drafts.pop(request.request_id, None)
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(list(drafts), [list(tokens) for tokens in drafts.values()])
            )
        self.check_host_memory()
        self.check_routers()

    def _take_stats(self, scheduler_stats: Any) -> None:
        """Treat the figures of an engine core as vLLM's front end does."""
        if scheduler_stats is None:
            return
        stats = scheduler_stats.kv_connector_stats or {}
        ours = stats.get(CONNECTOR, {} if isinstance(self.connector, MultiConnector) else stats)
        for name, value in ours.items():
            if KINDS[name] == "counter":
                self.totals[name] += value
            elif KINDS[name] == "gauge":
                self.gauges[name] = value
            else:
                self.observed.setdefault(name, []).extend(value)

    def step(self, steps: int = 1, *, copies: bool = False) -> Any:
        """Schedule, execute and process; with `copies`, all submitted jobs end within the step."""
        for _ in range(steps):
            output = self.schedule()
            self.execute()
            if copies:
                self.run_copies()
            self.process()
        return output

    def run_copies(self, direction: Direction | None = None, *, fail: bool = False) -> None:
        for rank in self.ranks:
            for job in [j for j in rank.copies.submitted if direction in (None, j.direction)]:
                rank.copies.run(rank.copies.submitted.index(job), fail=fail)

    def finish_steps(self) -> None:
        while self.under_way:
            if self.scheduled:
                self.execute()
            self.process()

    def run(self, max_steps: int = 400) -> None:
        """Step, with copies that end at once, until the engine is idle."""
        self.finish_steps()
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                return
            self.step(copies=True)
        raise RestlessError("the engine does not come to rest")

    def run_ahead(self, steps: int) -> None:
        """Step like a busy engine: one step is planned while another is executed."""
        for _ in range(steps):
            self.schedule_all()
            if self.scheduled:
                self.execute()
            self.run_copies()
            self.process()

    def reset(self, **arguments: bool) -> bool:
        """Reset the prefix cache as `EngineCore` does, which drains first."""
        done = bool(self.core.reset_prefix_cache(**arguments))
        self.hear()
        return done

    def hear(self) -> None:
        """Process what the engine core has sent to its front end between steps."""
        while not self._sent.empty():
            _, outputs = self._sent.get()
            self._take_stats(outputs.scheduler_stats)

    def check_answer(self, request_id: str) -> None:
        """Check that the tokens a client has so far are those the model answers without a cache."""
        found, expected = self.answers[request_id], self.expected.get(request_id)
        end = self.ended.get(request_id)
        if expected is not None:
            complete = len(found) if end != "length" else None
            assert found == expected[:complete], f"{request_id}: wrong answer"
        allowed = self.may_fail or self.model.may_lose_kv
        assert end != "error" or allowed, f"{request_id} ended with an error"

    def check_host_memory(self) -> None:
        """Check that every readable slot holds, on every rank, what its key stands for."""
        self._learn_keys()
        manager = self.offload.manager
        manager.check_integrity()
        slots = manager.readable_slots().items()
        for rank, played in enumerate(self.ranks):
            arena = played.copies.arena
            self.check_blocks(rank, [(self.known[key], arena[slot]) for key, slot in slots])
            for tier in played.tiers:
                prefix = self.offload.tiers.tiers[tier.name].generation
                records = [
                    (self.known.get(name.removeprefix(prefix)), content)
                    for name, content in tier.records.values()
                    if name.startswith(prefix)
                ]
                self.check_blocks(rank, [(known, found) for known, found in records if known])

    def check_blocks(self, rank: int, blocks: Iterable[tuple[Known, NDArray[np.uint8]]]) -> None:
        """Check the content of a rank's blocks."""
        alike = defaultdict(list)
        for (names, group_id), content in blocks:
            alike[group_id, len(names)].append((names, content))
        for (group_id, _), same in alike.items():
            names, contents = map(np.stack, zip(*same, strict=True))
            group, tokens = self.groups[group_id], 1
            if not group.holds_state:
                names = names[:, self.model.is_own(rank, np.arange(names.shape[1]))]
                tokens = group.block_tokens // self.model.context_ranks
            found = contents.view(np.int64).reshape(len(same), tokens, -1) - group_id
            self.check_names(group, found[:, : names.shape[1]], names)

    def check_names(
        self, group: CacheGroup, found: NDArray[np.int64], names: NDArray[np.int64]
    ) -> None:
        """Check the words of tokens, `(blocks, tokens, words)`: each must name its token."""
        assert (found == names[:, :, None]).all(), "a block holds another prefix"

    def _learn_keys(self) -> None:
        for index, (request, learnt) in enumerate(self._requests):
            hashes = request.block_hashes
            if len(hashes) == learnt and not request.resumable:
                continue
            self._requests[index] = (request, len(hashes))
            names = name_prefixes(request.all_token_ids, self.model.weights)
            for group in self._prefixes.stored_groups:
                tokens = group.block_tokens
                for end in range(tokens, len(names) + 1, tokens):
                    last = end // self.hash_block_tokens
                    if last > len(hashes):
                        break
                    (key,) = self._prefixes.slot_keys(
                        hashes, group, end // tokens - 1, end // tokens
                    )
                    first = end - 1 if group.holds_state else end - tokens
                    self.known[key] = np.array(names[first:end], np.int64), group.group_id
            self._learn_tails(hashes, names)

    def _learn_tails(self, hashes: Sequence[bytes], names: Sequence[int]) -> None:
        """Learn the keys of blocks that are full up to a hash inside them, of named tokens."""
        step, proof = self._prefixes.tail_tokens, self._prefixes.proof_tokens
        for end in range(step, len(hashes) * step - proof + 1, step) if step else ():
            for group in self._prefixes.stored_groups:
                first = end - 1 if group.holds_state else end - end % group.block_tokens
                for key in self._prefixes.tail_keys(hashes, group, end):
                    # A proof's key may be that of the whole block.
                    self.known.setdefault(key, (np.array(names[first:end]), group.group_id))

    def check_pins(self) -> None:
        """Check that every pin is a reference on a block that is not free."""
        self.offload.check_integrity()

    def rest(self) -> None:
        """Run until the engine is idle, and check that it then holds nothing."""
        self.run()
        self.check_rest()

    def check_rest(self) -> None:
        """Check that an idle engine holds nothing."""
        assert not self.scheduler.has_requests()
        offload = self.offload
        offload.check_integrity()
        assert not offload.has_pending_work
        gauges = offload.gauges()
        for name in ("running_loads", "running_stores", "pinned_blocks", "waiting_slots"):
            assert gauges[name] == 0, name
        assert gauges["oldest_copy_seconds"] == 0
        assert offload.watch.under_way == 0
        assert not len(offload._requests)
        assert all(rank.copies.in_flight == 0 for rank in self.ranks)
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in self.pool.blocks if not block.is_null)
        self.check_host_memory()
        assert not self.held_back
        self.check_routers()
        assert self.scheduler.reset_prefix_cache() is True
