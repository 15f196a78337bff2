"""A vLLM scheduler without a model: its scheduling and our connector are real, the rest is played.

`PlayedEngine` drives vLLM's own `Scheduler` with both roles of `KVOffloadConnector`. What it plays
is the model and the copies. The KV of a token is a number that names the whole prefix up to it, so
a block that is overwritten too early, loaded into the wrong place or stored before it was computed
is found at the first forward that reads it. Copies run when the test says so.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from kv_swap.engine import Completion, Direction, SwapEngine, SwapJob
from kv_swap.errors import CopyError, JobError
from kv_swap.layout import KVLayout
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kv_offload.cache.prefix import CacheGroup
from kv_offload.engines.vllm.halves import halves
from kv_offload.engines.vllm.plugin import CONNECTOR
from kv_offload.engines.vllm.versions import reports_failed_requests, vllm_version
from kv_offload.metrics import METRICS

PAGE_WORDS = 8
"""Words of 8 bytes in a block of a group, whatever its tokens: vLLM makes pages equal."""
VOCABULARY = 2
GARBAGE = 0xA5
_KINDS = {metric.name: metric.kind for metric in METRICS}

HOOKS = (
    "offload_scheduler.admissions.match",
    "offload_scheduler.admissions.allocated",
    "offload_scheduler.build_metadata",
    "offload_scheduler.reports.read",
    "offload_scheduler.finished",
    "offload_scheduler.take_stats",
    "offload_worker.submit_stores",
    "offload_worker.start_copies",
    "offload_worker.start_kv_transfers",
    "offload_worker.prepare_store_kv",
    "offload_worker.poll",
    "offload_worker.take_report",
)
"""What the connector's hooks call, on both halves."""

Tokens = list[int]


# -- hashes and configurations -----------------------------------------------------------------


@functools.cache
def block_hasher(hash_block_tokens: int) -> Callable[[Request], list[Any]]:
    """Return vLLM's own hasher, as its engine core makes it."""
    return get_request_block_hasher(hash_block_tokens, _hash_function())


@functools.cache
def _hash_function() -> Any:
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)  # draws a new seed: once in a process
    return hash_function


def make_request(
    request_id: str,
    prompt: Sequence[int],
    hash_block_tokens: int,
    max_tokens: int = 4,
    **sampling: Any,
) -> Request:
    """Return a real request with its block hashes."""
    parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **sampling)
    return Request(
        request_id,
        list(prompt),
        parameters,
        pooling_params=None,
        block_hasher=block_hasher(hash_block_tokens),
    )


def make_spec(
    block_tokens: int,
    window_tokens: int | None = None,
    chunk_tokens: int | None = None,
    holds_state: bool = False,
) -> Any:
    """Return a spec whose page has `PAGE_WORDS` words."""
    if holds_state:
        return MambaSpec(
            block_size=block_tokens,
            shapes=((PAGE_WORDS // 2,), (PAGE_WORDS // 4, 2)),
            dtypes=(torch.int32, torch.int64),
            page_size_padded=PAGE_WORDS * 8,
            mamba_cache_mode="align",
        )
    shape = {
        "block_size": block_tokens,
        "num_kv_heads": 1,
        "head_size": PAGE_WORDS // block_tokens,
        "dtype": torch.float32,
    }
    if chunk_tokens is not None:
        return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=chunk_tokens)
    if window_tokens is None:
        return FullAttentionSpec(**shape)
    return SlidingWindowSpec(**shape, sliding_window=window_tokens)


def make_tensor(size: int, layers: list[str], page_bytes: int) -> KVCacheTensor:
    """Return the description of one allocation, in the words of the installed vLLM."""
    if "layers" in {field.name for field in dataclasses.fields(KVCacheTensor)}:
        return KVCacheTensor(
            size=size, layers=layers[:1], layer_stride=size, block_stride=page_bytes
        )
    return KVCacheTensor(size=size, shared_by=layers)


def make_kv_cache_config(groups: Sequence[CacheGroup], num_blocks: int) -> KVCacheConfig:
    """Return a configuration of one layer per group; all of them overlay the same bytes."""
    layers = [f"layer.{group.group_id}" for group in groups]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[make_tensor(num_blocks * PAGE_WORDS * 8, layers, PAGE_WORDS * 8)],
        kv_cache_groups=[
            KVCacheGroupSpec(
                [layer],
                make_spec(
                    group.block_tokens, group.window_tokens, group.chunk_tokens, group.holds_state
                ),
            )
            for layer, group in zip(layers, groups, strict=True)
        ],
    )


@functools.cache
def _model_folder() -> tempfile.TemporaryDirectory[str]:
    """Write the configuration of a small model that exists for the scheduler only.

    It has an architecture of its own: to look at one of its own models, vLLM starts a process.
    """
    from vllm.model_executor.models import ModelRegistry

    from tests.support.small_models import qwen3

    class ScheduledOnly(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            raise NotImplementedError

        def embed_input_ids(self, input_ids: Any) -> Any:
            raise NotImplementedError

        def forward(self, input_ids: Any, positions: Any) -> Any:
            raise NotImplementedError

        def compute_logits(self, hidden_states: Any) -> Any:
            raise NotImplementedError

    ModelRegistry.register_model("ScheduledOnly", ScheduledOnly)
    folder = tempfile.TemporaryDirectory()
    config = qwen3()
    config.architectures = ["ScheduledOnly"]
    config.save_pretrained(folder.name)
    return folder


def make_vllm_config(
    plugin: dict[str, Any],
    *,
    max_model_len: int = 96,
    max_num_batched_tokens: int = 16,
    max_num_seqs: int = 4,
    drafts: int = 0,
    draft_head: bool = False,
    async_scheduling: bool = False,
    ranks: int = 1,
    replicas: int = 1,
    transfer_config: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Any:
    """Return the configuration that vLLM makes of a user's arguments, in the front end.

    Drafts come from the text, or from a head whose method is set afterwards: it has no model here.
    `transfer_config` makes that of another connector around ours from the options of the plugin.
    """
    plugin = {"cpu_bytes": 1 << 20, **plugin}
    speculative = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
    config = EngineArgs(
        model=_model_folder().name,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        data_parallel_size=replicas,
        **({} if reports_failed_requests(vllm_version()) else {"disable_cascade_attn": True}),
        speculative_config=speculative if drafts else None,
        kv_transfer_config={
            "kv_connector": "KVOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "kv_offload.engines.vllm.connector",
            "kv_connector_extra_config": plugin,
        }
        if transfer_config is None
        else transfer_config(plugin),
    ).create_engine_config()
    if draft_head:
        config.speculative_config.method = "eagle"
    # The CPU platform turns it off and allows no second rank; the scheduler does not mind.
    config.scheduler_config.async_scheduling = async_scheduling
    config.parallel_config.world_size = ranks
    return config


# -- copies that run when the test says so -----------------------------------------------------


class ManualSwapEngine(SwapEngine):
    """Keeps submitted jobs until `run`; copies as `kv_swap.host` does.

    `faults` counts how often something is to fail from now on: `submit` refuses a job,
    `before_compute` fails a load that compute waits for, `load_now` the copy that makes up for it.
    Copies that fail leave garbage behind.
    """

    def __init__(self, layout: KVLayout, num_slots: int) -> None:
        super().__init__(layout, num_slots)
        self.locked_slots = num_slots
        self.arena: NDArray[np.uint8] = np.full((num_slots, layout.slot_bytes), GARBAGE, np.uint8)
        self.submitted: list[SwapJob] = []
        self.stuck = False
        self.faults: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()
        self._failure: CopyError | None = None
        self.bytes_per_second: float | None = None
        """How fast copies are, their start included; None if each takes a millisecond."""
        self._done: list[Completion] = []
        self._undelivered = 0

    def submit(self, job: SwapJob) -> None:
        self.check_pairs(job)
        if self._fails("submit"):
            raise JobError("injected fault: refused")
        self.submitted.append(dataclasses.replace(job, pairs=job.pairs.copy()))
        self._undelivered += 1
        if job.before_compute:
            fails = self._fails("before_compute")
            self._failure = CopyError("injected fault: before compute") if fails else None
            self.run(-1, fail=fails)

    @property
    def ready_slots(self) -> int:
        return self.locked_slots

    def await_loads(self) -> None:
        """`submit` ran them."""
        if self._failure is not None:
            raise self._failure

    def load_now(self, pairs: NDArray[np.int32]) -> None:
        self._failure = None
        fails = self._fails("load_now")
        self._copy(SwapJob(-1, Direction.LOAD, pairs), fails)
        if fails:
            raise CopyError("injected fault: at once")

    def _fails(self, site: str) -> bool:
        fails = self.faults[site] > 0
        self.faults[site] -= fails
        self.happened[site] += fails
        return fails

    def _copy(self, job: SwapJob, fail: bool) -> None:
        for block, slot in job.pairs.tolist():
            for page, place in self._pages(block, slot):
                source, target = (place, page) if job.direction is Direction.LOAD else (page, place)
                target[:] = GARBAGE if fail else source

    def run(self, index: int = 0, *, fail: bool = False) -> None:
        """Copy one job now. One that fails leaves garbage behind."""
        job = self.submitted.pop(index)
        self._copy(job, fail)
        nbytes = len(job.pairs) * self.layout.slot_bytes
        error = CopyError("injected fault") if fail else None
        seconds = 0.001 if self.bytes_per_second is None else nbytes / self.bytes_per_second
        self._done.append(Completion(job.job_id, job.direction, nbytes, seconds, error))

    def run_all(self) -> None:
        while self.submitted:
            self.run()

    def _pages(
        self, block: int, slot: int
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        for region in self.layout.regions:
            start = region.slot_offset_bytes
            yield (
                bytes_at(region.address + block * region.block_stride_bytes, region.page_bytes),
                self.arena[slot, start : start + region.page_bytes],
            )

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        self._undelivered -= len(done)
        return done

    def wait(self, timeout_seconds: float) -> bool:
        if not self.stuck:
            self.run_all()
        return not self.stuck

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        self.check_blocks(blocks)
        for block in blocks:
            for page, _ in self._pages(block, 0):
                page[:] = 0

    def close(self, timeout_seconds: float = 30.0) -> None:
        self.wait(timeout_seconds)

    def keep_alive(self, objects: Sequence[object]) -> Sequence[object]:
        return ()

    @property
    def in_flight(self) -> int:
        return self._undelivered


def bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Return memory that somebody else owns."""
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


@contextlib.contextmanager
def manual_copies() -> Iterator[list[ManualSwapEngine]]:
    """Have every worker half that registers its KV caches here use a `ManualSwapEngine`."""
    made: list[ManualSwapEngine] = []

    def create(_kind: str, layout: KVLayout, num_slots: int, **_more: Any) -> ManualSwapEngine:
        made.append(ManualSwapEngine(layout, num_slots))
        return made[-1]

    with mock.patch("kv_offload.worker.allocation.create_engine", create):
        yield made


# -- the model ---------------------------------------------------------------------------------


def name_prefix(previous: int, token: int) -> int:
    """Return the KV of a token: a number for the prefix that ends with it."""
    return hash((previous, token)) >> 1


def name_prefixes(tokens: Sequence[int], weights: int) -> list[int]:
    """Return the KV of every token."""
    names: list[int] = []
    for token in tokens:
        names.append(name_prefix(names[-1] if names else weights, token))
    return names


def next_token(kv: int) -> int:
    return (kv >> 7) % VOCABULARY


@dataclasses.dataclass
class _ModelRequest:
    """What a model runner remembers of a request."""

    tokens: Tokens
    block_ids: list[list[int]]
    names: list[int] = dataclasses.field(default_factory=list)

    def extend_names(self, weights: int) -> list[int]:
        for token in self.tokens[len(self.names) :]:
            self.names.append(name_prefix(self.names[-1] if self.names else weights, token))
        return self.names


class PlayedModel:
    """Reads, checks and writes KV on all ranks, and samples; follows scheduler outputs as a runner.

    A query checks all KV that it reads; a mismatch is an `AssertionError`, unless the test has KV
    lost: then what is computed with it is wrong as well, KV and tokens. With decode context
    parallelism runs of `interleave` tokens are on the ranks in turn, and a group's `block_tokens`
    are those of a block over all of them.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        kv: list[list[NDArray[np.int64]]],
        context_ranks: int = 1,
        interleave: int = 1,
    ) -> None:
        self.groups = groups
        self.context_ranks = context_ranks
        self.interleave = interleave
        self.kv = kv
        """By rank and group, of shape `(blocks, block_tokens, words)`."""
        self.weights = 0
        """Another number makes other KV of the same tokens."""
        self.may_lose_kv = False
        self.sampled: dict[tuple[str, int], set[int]] = {}
        """By request and position: tokens that were sampled from right KV."""
        self.requests: dict[str, _ModelRequest] = {}
        self.drafts: dict[str, Tokens] = {}
        self.loaded_tokens = 0

    def follow(self, output: Any) -> None:
        """Take what the scheduler says about requests and their blocks."""
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self.requests[new.req_id] = _ModelRequest(
                list(tokens), [list(g) for g in new.block_ids]
            )
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            request, new_ids = self.requests[request_id], cached.new_block_ids[index]
            resumed = request_id in cached.resumed_req_ids
            sent = cached.all_token_ids.get(request_id, ())
            if resumed or len(sent) > len(request.tokens):
                request.tokens, request.names = list(sent), []
            if resumed:
                request.block_ids = [list(ids) for ids in new_ids]
            else:
                for ids, more in zip(request.block_ids, new_ids or (), strict=bool(new_ids)):
                    ids.extend(more)

    def forward(self, output: Any, draft: Callable[[Tokens], Tokens]) -> list[Tokens]:
        """Compute one step; return the sampled tokens by request, in the scheduler's order."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.drafts = {}
        return [
            self._forward(request_id, computed[request_id], scheduled, output, draft)
            for request_id, scheduled in output.num_scheduled_tokens.items()
        ]

    def _forward(
        self,
        request_id: str,
        computed: int,
        scheduled: int,
        output: Any,
        draft: Callable[[Tokens], Tokens],
    ) -> Tokens:
        request = self.requests[request_id]
        known = len(request.tokens)
        # With asynchronous scheduling `computed` also counts drafts that were rejected meanwhile.
        start = min(computed, known - 1)
        names = request.extend_names(self.weights)
        placeholders = output.scheduled_spec_decode_tokens.get(request_id, [])
        drafts = list(placeholders)
        if -1 in drafts:
            drafts = (draft(request.tokens) + [0] * len(drafts))[: len(drafts)]
        end = start + scheduled
        assert end <= known + len(drafts)
        inputs = names[start:end]
        for token in drafts[: max(0, end - known)]:
            inputs.append(name_prefix(inputs[-1], token))
        places = [
            (rank, group, words, np.array(request.block_ids[group.group_id], np.int64))
            for rank, kv in enumerate(self.kv)
            for group, words in zip(self.groups, kv, strict=True)
        ]
        right = all(
            [self._check(request_id, *place, names, start) for place in places]  # noqa: C419
        )
        if not right:
            inputs = [~name for name in inputs]
        for rank, group, words, blocks in places:
            if group.holds_state:
                self._advance(group, words, blocks, inputs, start)
            else:
                self._write(rank, group, words, blocks, inputs, start)
        if end - len(drafts) < known:
            return []
        sampled: Tokens = []
        current = names[known - 1]
        for token in [*drafts, None]:
            sampled.append(next_token(current))
            if sampled[-1] != token:
                break
            current = name_prefix(current, token)
        if right:
            for position, token in enumerate(sampled, known):
                self.sampled.setdefault((request_id, position), set()).add(token)
        else:
            sampled = [(sampled[0] + 1) % VOCABULARY]
        request.tokens.extend(sampled)
        self.drafts[request_id] = draft(request.tokens)
        return sampled

    def _check(
        self,
        request_id: str,
        rank: int,
        group: CacheGroup,
        words: NDArray[np.int64],
        blocks: NDArray[np.int64],
        names: list[int],
        start: int,
    ) -> bool:
        positions = self._own(rank, group.first_needed_token(start), start)
        row = 0 if group.holds_state else self._rows(group, positions)
        found = words[blocks[positions // group.block_tokens], row]
        expected = np.array(names[:start], np.int64)[positions] + group.group_id
        wrong = np.flatnonzero((found != expected[:, None]).any(axis=1))
        assert not len(wrong) or self.may_lose_kv, (
            f"{request_id}: rank {rank}, group {group.group_id}: wrong KV at {positions[wrong]}, "
            f"read before position {start}"
        )
        return not len(wrong)

    def _own(self, rank: int, start: int, end: int) -> NDArray[np.int64]:
        """Return the positions of which a rank has the KV."""
        positions = np.arange(start, end)
        return positions[self.is_own(rank, positions)]

    def is_own(self, rank: int, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        owners = positions // self.interleave % self.context_ranks
        return np.asarray(owners == rank % self.context_ranks)

    def _rows(self, group: CacheGroup, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where in its rank's part of a block a token lies."""
        runs, inside = np.divmod(positions % group.block_tokens, self.interleave)
        return np.asarray(runs // self.context_ranks * self.interleave + inside)

    def _write(
        self,
        rank: int,
        group: CacheGroup,
        words: NDArray[np.int64],
        blocks: NDArray[np.int64],
        inputs: list[int],
        start: int,
    ) -> None:
        positions = self._own(rank, start, start + len(inputs))
        targets = blocks[positions // group.block_tokens]
        assert targets.all(), "the null block is written"
        values = np.array(inputs, np.int64)[positions - start, None] + group.group_id
        words[targets, self._rows(group, positions)] = values

    @staticmethod
    def _advance(
        group: CacheGroup,
        words: NDArray[np.int64],
        blocks: NDArray[np.int64],
        inputs: list[int],
        start: int,
    ) -> None:
        """Write the state at the end of a step, in place while it stays in one block."""
        target = blocks[(start + len(inputs) - 1) // group.block_tokens]
        assert target, "the null block is written"
        words[target] = inputs[-1] + group.group_id


# -- the engine --------------------------------------------------------------------------------


class PlayedWeights:
    """What a trainer gives weights to. They make no difference to what `PlayedModel` samples."""

    def load_weights(self, weights: Sequence[tuple[str, Any]]) -> set[str]:
        return {name for name, _ in weights}


class PlayedRank:
    """One worker: the worker's role of the connector, its KV cache, and its copies."""

    def __init__(self, config: Any, kv_cache_config: KVCacheConfig, rank: int) -> None:
        config = copy.copy(config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        self.weights = PlayedWeights()
        self.connector = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, kv_cache_config
        )
        self.memory = torch.full((kv_cache_config.num_blocks, PAGE_WORDS), -1, dtype=torch.int64)
        self.kv: list[NDArray[np.int64]] = []
        caches = {}
        for group in kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            rows = 1 if isinstance(spec, MambaSpec) else spec.block_size
            tensor = self.memory.view(len(self.memory), rows, -1)
            caches[group.layer_names[0]] = self._cache_of(spec, tensor)
            self.kv.append(tensor.numpy())
        with manual_copies() as made:
            self.connector.register_kv_caches(caches)
        self.copies = made[0]

    def get_model(self) -> PlayedWeights:
        """Stand for the model runner, which the connector looks for when KV is registered."""
        return self.weights

    def execute_model(self, scheduler_output: Any) -> None:
        """Stand for the model runner; `begin` and `end` are called instead."""

    @staticmethod
    def _cache_of(spec: Any, tensor: torch.Tensor) -> Any:
        """Return what this vLLM registers for a layer: up to 0.31, a list of its states."""
        if not isinstance(spec, MambaSpec) or reports_failed_requests(vllm_version()):
            return tensor
        first = tensor[:, 0, : PAGE_WORDS // 4].view(torch.int32)
        return [first, tensor[:, 0, PAGE_WORDS // 4 : -PAGE_WORDS // 4].unflatten(1, (-1, 2))]

    def begin(self, output: Any) -> None:
        metadata = output.kv_connector_metadata
        self.connector.handle_preemptions(metadata)
        if output.new_block_ids_to_zero:
            self.memory[output.new_block_ids_to_zero] = 0
        self.connector.bind_connector_metadata(metadata)
        self.connector.start_load_kv(None)

    def end(self, output: Any) -> KVConnectorOutput:
        """Run the hooks of a step's end as the model runner of this vLLM does."""
        connector, report = self.connector, KVConnectorOutput()
        newer = reports_failed_requests(vllm_version())
        if output.num_scheduled_tokens or newer:
            connector.wait_for_save()
        if newer:
            results = connector.get_transfer_results(output.finished_req_ids)
            report.finished_sending = results.finished_sending
            report.finished_recving = results.finished_recving
            report.failed_recving = results.failed_recving
        else:
            finished = connector.get_finished(output.finished_req_ids)
            report.finished_sending, report.finished_recving = finished
        report.invalid_block_ids = connector.get_block_ids_with_load_errors()
        report.kv_connector_stats = connector.get_kv_connector_stats()
        report.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return report


class PlayedExecutor:
    """What an engine core asks of all its ranks."""

    is_sleeping = False

    def __init__(self, engine: PlayedEngine) -> None:
        self._engine = engine

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), *_: Any
    ) -> list[Any]:
        engine = self._engine
        while engine.scheduled:
            engine.execute()  # dispatched before
        if isinstance(method, str):
            if "weight" in method or method == "update_named_param":
                engine.change_weights()
            return [None for _ in engine.ranks]
        answers = []
        for rank in engine.ranks:
            with mock.patch(
                "vllm.distributed.kv_transfer.get_kv_transfer_group", lambda r=rank: r.connector
            ):
                answers.append(method(None, *args))
        return answers

    def sleep(self, level: int) -> None:
        """Discard the KV cache; with `level` 2 the weights too, which come back as others."""
        self.collective_rpc("sleep")
        for rank in self._engine.ranks:
            rank.memory.fill_(-1)
        if level > 1:
            self._engine.change_weights()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """The memory is there."""

    def reset_mm_cache(self) -> None:
        """There is none."""

    reset_encoder_cache = reset_mm_cache


class RestlessError(AssertionError):
    """Requests are left, but no step makes progress."""


class PlayedEngine:
    """An engine core in pieces: `schedule`, `execute` and `process` are called by the test.

    `execute` runs the oldest scheduled step on all ranks, `process` hands the oldest executed one
    back to the scheduler. With asynchronous scheduling two steps may be under way.
    """

    beside = False
    """Whether an only rank lives in the process of the scheduler, which then asks it what ended."""

    def __init__(
        self,
        groups: Sequence[CacheGroup] = (CacheGroup(0, 4),),
        *,
        plugin: dict[str, Any] | None = None,
        blocks: int = 40,
        slots: int = 64,
        ranks: int = 1,
        async_scheduling: bool = False,
        drafts: int = 0,
        draft_head: bool = False,
        replaces_resumed: bool = False,
        synchronous_loads: bool = False,
        context_ranks: int = 1,
        prefill_ranks: int = 1,
        interleave: int = 1,
        replica: int | None = None,
        beside: bool | None = None,
        locked_slots: int | None = None,
        **arguments: Any,
    ) -> None:
        plugin = {"cpu_bytes": slots * ranks * PAGE_WORDS * 8, **(plugin or {})}
        config = make_vllm_config(
            plugin,
            drafts=drafts,
            draft_head=draft_head,
            async_scheduling=async_scheduling,
            ranks=ranks,
            **arguments,
        )
        config.cache_config.block_size = groups[0].block_tokens
        config.cache_config.num_gpu_blocks = blocks
        if any(group.holds_state for group in groups):
            config.cache_config.mamba_cache_mode = "align"
        config.parallel_config.decode_context_parallel_size = context_ranks
        config.parallel_config.prefill_context_parallel_size = prefill_ranks
        config.parallel_config.cp_kv_cache_interleave_size = interleave
        if replica is not None:
            config.parallel_config.data_parallel_size = 2
            config.parallel_config.data_parallel_rank = replica
        kv_cache_config = make_kv_cache_config(groups, blocks)
        block_tokens, self.hash_block_tokens = resolve_kv_cache_block_sizes(kv_cache_config, config)
        self.groups = tuple(
            dataclasses.replace(group, block_tokens=group.block_tokens * context_ranks)
            for group in groups
        )
        self.max_steps_under_way = 2 if async_scheduling else 1
        scheduler_class = AsyncScheduler if async_scheduling else Scheduler
        self.scheduler = scheduler_class(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_tokens,
            hash_block_size=self.hash_block_tokens,
            log_stats=True,
        )
        if replaces_resumed:
            # What runner V2 has the scheduler do.
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
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, r): rank.connector.get_handshake_metadata() for r, rank in enumerate(self.ranks)}
        )
        self.offload.load_mode.allowed = synchronous_loads
        self.offload.watch.load_rate.learn(float("inf"))
        kv = [rank.kv for rank in self.ranks]
        self.model = PlayedModel(self.groups, kv, context_ranks, interleave)
        self._aggregator = KVOutputAggregator.from_connector(self.connector, ranks)
        self._drafts = drafts
        self.propose: Callable[[Tokens], Tokens] = self.good_drafts
        self.answers: dict[str, Tokens] = {}
        self.ended: dict[str, str] = {}
        """Why requests ended, as their clients hear it."""
        self.totals: Counter[str] = Counter()
        self.known: dict[bytes, NDArray[np.int64]] = {}
        """What every slot key stands for: a name of each token of the block; of states, one."""
        self._requests: list[tuple[Request, int]] = []

    # -- parts ---------------------------------------------------------------------------------

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def offload(self) -> Any:
        return next(halves(self.connector, "offload_scheduler"))

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
        return core

    @property
    def model_executor(self) -> PlayedExecutor:
        """What ours finds on the call stack while the engine is built, and calls the ranks by."""
        return PlayedExecutor(self)

    def good_drafts(self, tokens: Tokens) -> Tokens:
        """Draft what the model will sample."""
        kv = name_prefixes(tokens, self.model.weights)[-1]
        drafts: Tokens = []
        for _ in range(self._drafts):
            drafts.append(next_token(kv))
            kv = name_prefix(kv, drafts[-1])
        return drafts

    def change_weights(self) -> None:
        """Make the KV of all tokens another; host memory must hold none of the old."""
        self.model.weights += 1
        self.known.clear()
        self._requests = [(request, 0) for request, _ in self._requests]

    def bad_drafts(self, tokens: Tokens) -> Tokens:
        """Draft what the model will not sample."""
        return [(token + 1) % VOCABULARY for token in self.good_drafts(tokens)]

    # -- requests ------------------------------------------------------------------------------

    def add(
        self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, **sampling: Any
    ) -> Request:
        request = make_request(request_id, prompt, self.hash_block_tokens, max_tokens, **sampling)
        self.scheduler.add_request(request)
        self._requests.append((request, 0))
        return request

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    # -- one step ------------------------------------------------------------------------------

    def schedule(self) -> Any:
        assert len(self.scheduled) + len(self.executed) < self.max_steps_under_way
        output = self.scheduler.schedule()
        self.scheduled.append(output)
        return output

    def execute(self) -> None:
        output = self.scheduled.popleft()
        self.model.follow(output)
        for rank in self.ranks:
            rank.begin(output)
        sampled = self.model.forward(output, self.propose if self._drafts else lambda _: [])
        ids = list(output.num_scheduled_tokens)
        results = [
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=[list(tokens) for tokens in sampled],
                kv_connector_output=rank.end(output),
            )
            for rank in self.ranks
        ]
        self.executed.append((output, self._aggregator.aggregate(results)))

    def process(self) -> None:
        output, result = self.executed.popleft()
        drafts = dict(self.model.drafts)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                self.answers.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.ended[one.request_id] = str(one.finish_reason)
            if outputs.scheduler_stats is not None:
                stats = outputs.scheduler_stats.kv_connector_stats or {}
                # Inside a MultiConnector: up to 0.31 an object, then a dictionary.
                ours = stats.get(
                    CONNECTOR, {} if isinstance(self.connector, MultiConnector) else stats
                )
                stats = getattr(ours, "data", ours)
                self.totals.update({n: v for n, v in stats.items() if _KINDS[n] == "counter"})
        if self._drafts and not self.scheduler.scheduler_config.async_scheduling:
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(list(drafts), [list(tokens) for tokens in drafts.values()])
            )

    def step(self, steps: int = 1, *, copies: bool = False) -> Any:
        """Schedule, execute and process; with `copies`, all submitted jobs end in time."""
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
        while self.scheduled or self.executed:
            if self.scheduled:
                self.execute()
            self.process()

    def run(self, max_steps: int = 400) -> None:
        """Step, with copies that end at once, until the engine rests."""
        self.finish_steps()
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                return
            self.step(copies=True)
        raise RestlessError("the engine does not come to rest")

    def reset(self, **arguments: bool) -> bool:
        """Reset the prefix cache as `EngineCore` does, which drains first."""
        return bool(self.core.reset_prefix_cache(**arguments))

    # -- checks --------------------------------------------------------------------------------

    def check_host_memory(self) -> None:
        """Check that every readable slot holds, on every rank, what its key stands for."""
        self._learn_keys()
        manager = self.offload.manager
        manager.check_integrity()
        for key, slot in manager.readable_slots().items():
            expected = self.known[key]
            for rank, played in enumerate(self.ranks):
                own = expected[self.model.is_own(rank, np.arange(len(expected)))]
                found = played.copies.arena[slot].view(np.int64).reshape(len(own), -1)
                assert (found == own[:, None]).all(), f"slot {slot} holds another prefix"

    def _learn_keys(self) -> None:
        for index, (request, learnt) in enumerate(self._requests):
            hashes = request.block_hashes
            if len(hashes) == learnt:
                continue
            self._requests[index] = (request, len(hashes))
            names = name_prefixes(request.all_token_ids, self.model.weights)
            for group in self.groups:
                tokens = group.block_tokens
                for end in range(tokens, len(names) + 1, tokens):
                    last = end // self.hash_block_tokens
                    if last > len(hashes):
                        break
                    (key,) = self.offload.prefixes.slot_keys(
                        hashes, group, end // tokens - 1, end // tokens
                    )
                    value = np.array(names[end - tokens : end], np.int64) + group.group_id
                    self.known[key] = value[-1:] if group.holds_state else value

    def check_pins(self) -> None:
        """Check that every pin is a reference on a block that is not free."""
        stores = self.offload.stores.jobs
        pins = Counter(stores.pinned())
        assert stores.pinned_blocks == pins.total()
        for block, count in pins.items():
            assert self.pool.blocks[block].ref_cnt >= count
            assert not self.pool.blocks[block].is_null

    def check_rest(self) -> None:
        """Check that an engine at rest holds nothing."""
        assert not self.scheduler.has_requests()
        offload = self.offload
        offload.check_integrity()
        assert not offload.has_pending_stores
        assert not offload.has_pending_work
        assert offload.stores.jobs.pinned_blocks == 0
        assert (len(offload.leftovers), offload.leftovers.slots) == (0, 0)
        assert offload.loads.running == 0
        assert len(offload.requests) == 0
        assert all(rank.copies.in_flight == 0 for rank in self.ranks)
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in self.pool.blocks if not block.is_null)
        self.check_host_memory()
        assert self.scheduler.reset_prefix_cache() is True


def wrap_hook(
    connector: Any, hook: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace one of `HOOKS` of a connector by what `wrap` makes of it, if it has that half."""
    half, *path, name = hook.split(".")
    part = getattr(connector, half)
    if part is not None:
        for step in path:
            part = getattr(part, step)
        setattr(part, name, wrap(getattr(part, name)))


# -- what tests of the played engine share -----------------------------------------------------

PROMPT = [1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 1, 1]
"""Five blocks of four tokens and one token."""
OTHER = [0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 0, 1, 0]


def store(engine: PlayedEngine, prompt: Sequence[int], request_id: str = "stored") -> None:
    """Compute a prompt, keep it in host memory, and forget it on the engine's side."""
    engine.add(request_id, prompt, max_tokens=1)
    engine.run()
    forget(engine)


def forget(engine: PlayedEngine) -> None:
    """Forget what the engine has computed, and the totals."""
    assert engine.scheduler.reset_prefix_cache() is True
    engine.totals.clear()


def answer(prompt: Sequence[int], max_tokens: int = 4) -> Tokens:
    """Answer without host memory: nothing is stored twice, nothing loaded."""
    engine = PlayedEngine()
    engine.add("plain", prompt, max_tokens)
    engine.run()
    return engine.answers["plain"]


def pinned(engine: PlayedEngine) -> set[int]:
    """Return the blocks that stores pin."""
    return set(engine.offload.stores.jobs.pinned())


def tables(engine: PlayedEngine, request: Request) -> list[list[int]]:
    """Return a request's blocks by group, as the engine has them."""
    manager = engine.scheduler.kv_cache_manager
    return [list(group) for group in manager.get_block_ids(request.request_id)]
