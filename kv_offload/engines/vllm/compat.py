"""Everything that depends on vLLM's version or reaches behind its connector interface."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

from kv_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.kv_offload")  # only children of "vllm" have a handler


class _Forward(logging.Handler):
    """Hands records to the engine's log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as if it were logged here."""
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def forward_log(name: str) -> None:
    """Show in the engine's log what is logged under `name`. A second call changes nothing."""
    source = logging.getLogger(name)
    if not any(isinstance(handler, _Forward) for handler in source.handlers):
        source.addHandler(_Forward())
        source.setLevel(logging.INFO)


OLDEST, NEWEST = (0, 26), (0, 33)
"""Minor versions whose connector interface this plugin was written against and tested with."""


def check_version(version: str) -> tuple[int, int]:
    """Return vLLM's (major, minor). Raises `UnsupportedError` outside the supported range."""
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        major, minor = -1, -1
    if not OLDEST <= (major, minor) <= NEWEST:
        raise UnsupportedError(
            f"kv-offload works with vLLM {_dotted(OLDEST)} to {_dotted(NEWEST)}, this is "
            f"{version!r}; install a vLLM in that range or a kv-offload that supports yours"
        )
    return major, minor


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def vllm_version() -> tuple[int, int]:
    """Return the running vLLM's (major, minor), checked."""
    import vllm

    return check_version(vllm.__version__)


def reports_failed_requests(version: tuple[int, int]) -> bool:
    """Whether a failed load is reported by request (0.32 and newer), not by block."""
    return version >= (0, 32)


def layer_specs(kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    """Return the KV-cache spec of every layer; uniform groups keep one per layer."""
    specs = {}
    for group in kv_cache_config.kv_cache_groups:
        per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None) or {}
        for name in group.layer_names:
            specs[name] = per_layer.get(name, group.kv_cache_spec)
    return specs


def counts_attention_hits(version: tuple[int, int]) -> bool:
    """Whether a hybrid model's local hit is that of its attention alone (0.26 and 0.27).

    Such a hit may end where no state is. It is meant for connectors that always bring the state.
    """
    return version < (0, 28)


def count_common_hits() -> None:
    """Have vLLM 0.26 and 0.27 count as local only what all cache groups of a hybrid model have.

    Their scheduler takes the longest hit of any group when `has_mamba_layers` is set; it reads that
    attribute nowhere else once it has been built. A second call replaces nothing.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.schedule
    if getattr(original, "_kv_offload_counts_common_hits", False):
        return

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.has_mamba_layers = False
        return original(self, *args, **kwargs)

    schedule._kv_offload_counts_common_hits = True  # type: ignore[attr-defined]
    Scheduler.schedule = schedule


def bytes_per_block(kv_cache_config: KVCacheConfig) -> int:
    """Return the bytes of one block over all tensors of this rank.

    Up to 0.31 every `KVCacheTensor` is an allocation of its own unless it is packed; from 0.32 all
    of them describe places in one allocation of `size` bytes.
    """
    tensors = kv_cache_config.kv_cache_tensors
    shared = hasattr(tensors[0], "layers") or getattr(tensors[0], "block_stride", 0) > 0
    total = tensors[0].size if shared else sum(tensor.size for tensor in tensors)
    return int(total) // int(kv_cache_config.num_blocks)


def host_hit_source() -> Any:
    """Return the engine's label for hits in host memory; None before vLLM had such labels."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return getattr(CacheHitSource, "HOST", None)


def find_output_copy_stream() -> Any | None:
    """Return the stream on which the model runner copies sampled tokens to the host, if any.

    No interface exposes it, but the runner is a caller of the connector's `register_kv_caches`, in
    which this must be called: it is looked for on the call stack. Runner V2 owns the stream from
    its construction on; runner V1 makes it at first use, which this brings forward where
    asynchronous scheduling will use it. The stream lives as long as the runner.
    """
    for runner in _callers():
        stream = getattr(runner, "output_copy_stream", None)
        if stream is not None:
            return stream
        make = getattr(runner, "_get_or_create_async_output_copy_stream", None)
        if make is not None:
            return make() if getattr(runner, "use_async_scheduling", False) else None
    return None


def _callers() -> Iterator[Any]:
    """Yield what is called `self` in the caller and in its callers, the nearest first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back  # type: ignore[assignment]


def before_each_step(call: Callable[[Any], None]) -> None:
    """Have the model runner call `call(scheduler_output)` before it does anything for a step.

    The connector's own first hook comes later: just before the forward in runner V2, in V1 not
    before some preparations. Looks for the runner on the call stack, as `find_output_copy_stream`
    does; where there is none nothing changes.
    """
    runner = _calling_runner()
    if runner is not None:

        def begin(scheduler_output: Any, *_args: Any, **_kwargs: Any) -> None:
            call(scheduler_output)

        _call_before(runner, "execute_model", begin)


def _calling_runner() -> Any | None:
    """Return the model runner on the call stack, the nearest if there are several."""
    return next((caller for caller in _callers() if hasattr(caller, "execute_model")), None)


def _call_before(owner: Any, method: str, call: Callable[..., None]) -> None:
    """Have `owner.method(...)` call `call(...)` first, with the same arguments.

    Only this object changes. A wrapper that somebody else has set on it is called in its turn, and
    whoever wraps the method later, on the object or on its class, wraps it together with `call`.
    """
    wrapped = vars(owner).get(method)
    found = weakref.ref(owner)  # a cycle would keep its KV tensors until the next collection

    @functools.wraps(wrapped or getattr(type(owner), method))
    def first(*args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        if wrapped is not None:
            return wrapped(*args, **kwargs)
        alive = found()
        return getattr(type(alive), method)(alive, *args, **kwargs)

    setattr(owner, method, first)


def count_weight_loads() -> Callable[[], int]:
    """Have this rank's model count its `load_weights`; return what tells the count, from 0.

    Trainers in the engine's process call that method, past everything that the engine core sees.
    The model is that of the runner on the call stack, which `find_output_copy_stream` looks for
    too; where there is none the count stays 0. What tells the count keeps nothing of the model
    alive, nor does the model keep anything of ours.
    """
    loads = 0

    def count(*_args: Any, **_kwargs: Any) -> None:
        nonlocal loads
        loads += 1

    get_model = getattr(_calling_runner(), "get_model", None)
    model = None if get_model is None else get_model()
    if hasattr(type(model), "load_weights"):
        _call_before(model, "load_weights", count)
    return lambda: loads


def changes_blocks(scheduler_output: Any) -> bool:
    """Whether the runner zeroes or copies KV blocks for this step, before its forward.

    Not counted are copies of states between the blocks of a request that runs.
    """
    return bool(
        scheduler_output.new_block_ids_to_zero
        or getattr(scheduler_output, "kv_cache_block_copies", None)
    )


def tensor_parallel_ranks() -> tuple[int, int, Callable[[Any], list[Any]]]:
    """Return this rank's index in its tensor-parallel group, their number, and how they agree.

    The last returns what each rank of the group gives, in order; all must call it. It goes through
    the group's CPU side, and blocks.
    """
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()

    def gather(value: Any) -> list[Any]:
        gathered: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(gathered, value, group=group.cpu_group)
        return gathered

    return group.rank_in_group, group.world_size, gather


def gather_over_ranks(value: Any) -> list[Any]:
    """Return what each rank of this replica gives, this one's first where it is alone.

    All ranks of the replica must call it; blocks. Where no engine has formed groups the caller is
    alone. It goes through the groups of tensor, pipeline and prefill context parallelism, in turn:
    vLLM's group of all ranks has the other replicas' too in a mixture of experts.
    """
    import torch
    from vllm.distributed import parallel_state

    gathered = [value]
    if not torch.distributed.is_initialized():
        return gathered
    for name in ("get_tp_group", "get_pp_group", "get_pcp_group"):
        group = getattr(parallel_state, name)()
        if group.world_size > 1:
            parts: list[Any] = [None] * group.world_size
            torch.distributed.all_gather_object(parts, gathered, group=group.cpu_group)
            gathered = [item for part in parts for item in part]
    return gathered


_REPLICAS = "_kv_offload_local_replicas"


def note_replicas() -> None:
    """Have every configuration of an engine say how many replicas its front end starts here.

    Replicas of a dense model are not told: vLLM sets the sizes in their configuration to 1. A note
    in the object travels with it to all processes. A process that has not loaded vLLM's engine
    arguments makes no configuration, and nothing changes there. A second call replaces nothing.
    """
    module = sys.modules.get("vllm.engine.arg_utils")
    original = getattr(getattr(module, "EngineArgs", None), "create_engine_config", None)
    if original is None or getattr(original, "_kv_offload_notes", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        parallel = config.parallel_config
        setattr(parallel, _REPLICAS, int(parallel.data_parallel_size_local))
        return config

    create_engine_config._kv_offload_notes = True  # type: ignore[attr-defined]
    module.EngineArgs.create_engine_config = create_engine_config  # type: ignore[union-attr]


def noted_replicas(parallel: ParallelConfig) -> int:
    """Return what `note_replicas` noted in this configuration; 1 where nothing was."""
    return int(getattr(parallel, _REPLICAS, 1))


def forward_context() -> object | None:
    """Return vLLM's context of the forward that runs or is about to; None without one."""
    from vllm import forward_context as contexts

    return contexts.get_forward_context() if contexts.is_forward_context_available() else None


def forward_with_layer_calls() -> tuple[object, Hashable] | None:
    """Return the forward about to run if its attention layers call `wait_for_layer_load`.

    That is its context, and of which kind it is: forwards of a kind run the same code.

    Asked where the connector's metadata is bound. There runner V1 has set the forward's context,
    and runner V2 has unless it replays a full graph. None for a full graph, for micro-batches,
    which run under contexts of their own on several threads, for steps without attention, and
    wherever a version does not say which of these it is.
    """
    context = forward_context()
    mode = getattr(getattr(context, "cudagraph_runtime_mode", None), "name", None)
    metadata = getattr(context, "attn_metadata", None)
    if mode not in ("NONE", "PIECEWISE") or not isinstance(metadata, dict) or not metadata:
        return None
    if getattr(context, "ubatch_slices", context) is not None:
        return None
    return context, (mode, getattr(context, "skip_compiled", None))


def halves(connector: Any, attribute: str) -> Iterator[Any]:
    """Yield an attribute of our connectors: the engine's own, or those inside a MultiConnector."""
    half = getattr(connector, attribute, None)
    if half is not None:
        yield half
    for member in getattr(connector, "_connectors", ()):
        yield from halves(member, attribute)


def enclosing_configs() -> tuple[Any, ...]:
    """Return the transfer configurations of the MultiConnectors that build the caller, inner first.

    A member is given a copy of the engine's configuration that has its own in this place, and no
    way to theirs, of which the engine reads the outermost. They are looked for on the call stack,
    so this must be called while the connector is built. Empty for the engine's own connector.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    return tuple(
        caller._vllm_config.kv_transfer_config
        for caller in _callers()
        if isinstance(caller, MultiConnector)
    )


def ask_ranks(method: Callable[[Any], Any]) -> list[Any]:
    """Have every rank call `method(worker)` and return the answers, in the order of the ranks.

    Blocks. For a hook that the engine core calls while it is built: it is looked for on the call
    stack. Raises `UnsupportedError` where there is none.
    """
    for core in _callers():
        if hasattr(core, "model_executor"):
            answers: list[Any] = core.model_executor.collective_rpc(method)
            return answers
    raise UnsupportedError(
        "inside a MultiConnector kv-offload asks its ranks through vLLM's engine core, which is "
        "not on the call stack in this vLLM: use KVOffloadConnector without MultiConnector"
    )


def observe_local_stats() -> None:
    """Have the MultiConnector of vLLM 0.26 to 0.31 take stats of its members in one process.

    It indexes what they reported as the dictionaries that come from another process; those of its
    own are objects, on which it raises. Newer versions turn them into dictionaries before. A second
    call replaces nothing.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

    metrics = multi_connector.MultiKVConnectorPromMetrics
    original = metrics.observe
    if hasattr(KVConnectorStats, "to_dict") or getattr(original, "_kv_offload_observes", False):
        return

    def observe(self: Any, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        as_sent = {
            name: {"data": stats.data} if isinstance(stats, KVConnectorStats) else stats
            for name, stats in transfer_stats_data.items()
        }
        original(self, as_sent, engine_idx)

    observe._kv_offload_observes = True  # type: ignore[attr-defined]
    metrics.observe = observe


def role_accepts_embeddings(vllm_config: Any, transfer_config: Any) -> bool:
    """Whether vLLM accepts embeddings in place of images because of `kv_role`, as 0.32 does.

    It then turns `enable_mm_embeds` on, and keeps no note of whether it was on before. 0.28 only
    allows that embeddings which the user has enabled come without their data, 0.26 nothing.
    """
    from vllm.config import VllmConfig

    inputs = getattr(vllm_config.model_config, "multimodal_config", None)
    encoders = getattr(vllm_config, "ec_transfer_config", None)
    return (
        not hasattr(VllmConfig, "_resolve_allow_missing_mm_embeddings")
        and transfer_config.is_kv_consumer
        and getattr(inputs, "enable_mm_embeds", False)
        and getattr(inputs, "allow_missing_mm_embeddings", False)
        and not (encoders is not None and encoders.is_ec_consumer)
    )


def local_rank(engine_id: str | None) -> Any | None:
    """Return the worker's half of this engine's connector if it lives in this process, else None.

    With one rank vLLM runs the worker in the process and on the thread of the scheduler. Not looked
    for inside a MultiConnector, which adds up what its members report.
    """
    from vllm.distributed import kv_transfer

    if not kv_transfer.has_kv_transfer_group():
        return None
    connector = kv_transfer.get_kv_transfer_group()
    half = getattr(connector, "offload_worker", None)
    return half if half is not None and connector.engine_id == engine_id else None


def drain_before_reset(drain: Callable[..., None]) -> None:
    """Have every engine core call `drain(core, requeue=...)` before it resets its prefix cache.

    While a block is referenced a reset fails, or raises if it is to reset running requests too; the
    engine asks no connector first, and in one process nobody steps it after the last output. Sleep
    and pause reset through the same method. Requests that wait for loads are requeued unless
    requests run that make the reset fail anyway. A second call replaces nothing.
    """
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.reset_prefix_cache
    if getattr(original, "_kv_offload_drains", False):
        return

    def reset_prefix_cache(
        self: Any, reset_running_requests: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        drain(self, requeue=reset_running_requests or not self.scheduler.running)
        with blocks_freed_at_once(self.scheduler):
            return original(self, reset_running_requests, *args, **kwargs)

    reset_prefix_cache._kv_offload_drains = True  # type: ignore[attr-defined]
    EngineCore.reset_prefix_cache = reset_prefix_cache


@contextlib.contextmanager
def blocks_freed_at_once(scheduler: Any) -> Iterator[None]:
    """Have vLLM's scheduler hold back no freed block, not even those that it does already.

    With a connector and steps in flight it keeps what a request frees until the last of them has
    ended: it may still write the block, and a load into it need not come after that. A reset of
    running requests raises then. Ours do come after it (`SwapEngine`), and the forwards of a rank
    follow one another. Of the other connectors in a MultiConnector that is not known: nothing
    changes with those.
    """
    alone = getattr(scheduler.get_kv_connector(), "offload_scheduler", None) is not None
    if not alone or not getattr(scheduler, "defer_block_free", False):
        yield
        return
    ended = scheduler.processed_step_seq
    scheduler.processed_step_seq = scheduler.sched_step_seq
    scheduler._drain_deferred_frees()
    scheduler.processed_step_seq = ended
    scheduler.defer_block_free = False
    try:
        yield
    finally:
        scheduler.defer_block_free = True


def waiting_for_loads(scheduler: Any, request_ids: set[str]) -> set[str]:
    """Return those of the requests that wait for a load, or for their turn after it."""
    from vllm.v1.request import RequestStatus

    return {
        request_id
        for request_id in request_ids & scheduler.requests.keys()
        if scheduler.requests[request_id].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    }


def give_blocks_back(scheduler: Any, request_ids: set[str]) -> None:
    """Have requests whose loads have ended wait without blocks, as if nothing had been loaded.

    They are put into the state of those whose load has failed, which vLLM looks up anew when it
    gets to them; it frees their blocks only then, and a second time does no harm. No step reads or
    writes these blocks: a request that waits for its load has not been computed.
    """
    for request_id in request_ids:
        request = scheduler.requests[request_id]
        request.num_computed_tokens = 0
        scheduler.failed_recving_kv_req_ids.add(request_id)
        scheduler._inflight_prefills.discard(request)
        scheduler.kv_cache_manager.free(request)


def end_requests_with_lost_kv(find: Callable[[Any, Any], set[str]]) -> None:
    """Have vLLM end requests that computed with KV that was not there, before it hears of tokens.

    vLLM can be told of invalid blocks, but has no right way to go on from there under asynchronous
    scheduling: it rewinds a running request's computed tokens without its placeholders, and asserts
    or computes a token in the wrong place (0.26 to 0.33). So such requests end with an error, by
    the method that ends others so. No block keeps its key: what was computed with that KV, also in
    the step behind, would be served to others.

    `find` gets the scheduler's connector and what its ranks reported with the output of a step, and
    returns the requests. Where it raises nobody knows which they are, and all of that step end. A
    second call replaces nothing.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    original = Scheduler.update_from_output
    if getattr(original, "_kv_offload_ends_requests", False):
        return

    @functools.wraps(original)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        reported = model_runner_output.kv_connector_output
        try:
            lost = find(self.connector, reported) if reported is not None else None
        except Exception:
            lost = set(scheduler_output.num_scheduled_tokens)
            logger.exception(
                "kv-offload: an error while looking for requests with wrong KV: the %d requests of "
                "this step end, since any of them may be one. Please report this",
                len(lost),
            )
        if not lost:
            return original(self, scheduler_output, model_runner_output)
        self.kv_cache_manager.evict_blocks(set(range(self.kv_cache_config.num_blocks)))
        ended = self.finish_requests(lost, RequestStatus.FINISHED_ERROR)
        outputs = original(self, scheduler_output, model_runner_output)
        for request in ended:
            outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[])).outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )
        return outputs

    update_from_output._kv_offload_ends_requests = True  # type: ignore[attr-defined]
    Scheduler.update_from_output = update_from_output


def recompute_failed_requests(find: Callable[[Any, Any], set[str]]) -> None:
    """Let vLLM 0.26 to 0.31 recompute a request of several cache groups whose load failed.

    Those versions can only be told about blocks, and end the engine if there are several groups.
    Their scheduler has the state that newer ones set, though: a request whose id is in
    `failed_recving_kv_req_ids` with no computed tokens is freed and scheduled anew. `find` gets the
    scheduler's connector and what its ranks reported with the output of a step, and returns the
    requests whose loads failed.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    original = Scheduler._update_from_kv_xfer_finished
    if getattr(original, "_kv_offload_recomputes", False):
        return

    def update(self: Any, output: Any) -> None:
        original(self, output)
        for request_id in find(self.connector, output):
            request = self.requests.get(request_id)
            if request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                request.num_computed_tokens = 0
                self.failed_recving_kv_req_ids.add(request_id)

    update._kv_offload_recomputes = True  # type: ignore[attr-defined]
    Scheduler._update_from_kv_xfer_finished = update
