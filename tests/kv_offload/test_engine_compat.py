"""What depends on vLLM's version, and the hooks that reach into the engine."""

from __future__ import annotations

import dataclasses
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

import torch
import vllm
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.request import RequestStatus

from kv_offload.cache.prefix import CacheGroup
from kv_offload.engines.vllm import compat as engine_compat
from kv_offload.engines.vllm import engine_hooks
from kv_offload.engines.vllm.compat import (
    NEWEST,
    OLDEST,
    before_each_step,
    bytes_per_block,
    changes_blocks,
    check_version,
    count_common_hits,
    count_weight_loads,
    counts_attention_hits,
    drain_before_reset,
    find_output_copy_stream,
    forward_context,
    forward_log,
    forward_with_layer_calls,
    halves,
    host_hit_source,
    layer_specs,
    recompute_failed_requests,
    reports_failed_requests,
    vllm_version,
)
from kv_offload.errors import UnsupportedError
from kv_offload.messages import OffloadWorkerMetadata
from tests.support.fakes import make_kv_cache_config, make_spec

pytestmark = pytest.mark.filterwarnings("default")

# -- versions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.26.0", (0, 26)),
        ("0.26", (0, 26)),
        ("0.28.1.dev7+g1234abc.d20260101", (0, 28)),
        ("0.32.0+cpu", (0, 32)),
        ("0.33.12rc1", (0, 33)),
    ],
)
def test_versions_that_are_supported(version: str, expected: tuple[int, int]) -> None:
    assert check_version(version) == expected


@pytest.mark.parametrize(
    "version", ["0.25.9", "0.34.0", "1.0.0", "1.28.0", "0", "", "dev", "v0.28.0", "0.x.1", "0.-28"]
)
def test_versions_that_are_refused(version: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_version(version)
    message = str(caught.value)
    assert "0.26 to 0.33" in message
    assert repr(version) in message
    assert "install a vLLM in that range" in message


def test_the_range_is_what_the_message_says() -> None:
    assert (OLDEST, NEWEST) == ((0, 26), (0, 33))


def test_the_running_version_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert OLDEST <= vllm_version() <= NEWEST
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    with pytest.raises(UnsupportedError, match=r"'0\.34\.0'"):
        vllm_version()


@pytest.mark.parametrize(
    ("version", "by_request"),
    [((0, 26), False), ((0, 31), False), ((0, 32), True), ((0, 33), True)],
)
def test_failed_loads_are_reported_by_request_from_a_version_on(
    version: tuple[int, int], by_request: bool
) -> None:
    assert reports_failed_requests(version) == by_request


def test_the_label_for_hits_in_host_memory_exists_where_the_engine_has_labels() -> None:
    source = host_hit_source()
    assert (source is not None) == hasattr(
        vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1,
        "get_external_cache_hit_sources",
    )


# -- the KV cache's configuration --------------------------------------------------------------


def test_bytes_of_a_block_in_a_real_configuration() -> None:
    assert bytes_per_block(make_kv_cache_config([CacheGroup(0, 4), CacheGroup(1, 8, 9)], 40)) == 64


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        # To 0.31: an allocation each ...
        ([SimpleNamespace(size=1000, shared_by=["a"])], 100),
        ([SimpleNamespace(size=1000, shared_by=["a", "b"], block_stride=0)] * 3, 300),
        # ... unless they are packed into one.
        ([SimpleNamespace(size=1000, shared_by=["a"], block_stride=100)] * 3, 100),
        # From 0.32: all describe places in one allocation.
        ([SimpleNamespace(size=1000, layers=["a"], layer_stride=1, block_stride=2)] * 3, 100),
        ([SimpleNamespace(size=1009, layers=["a"], layer_stride=1, block_stride=2)], 100),
    ],
)
def test_bytes_of_a_block_in_every_generation(tensors: list[Any], expected: int) -> None:
    config = SimpleNamespace(num_blocks=10, kv_cache_tensors=tensors)
    assert bytes_per_block(config) == expected


def test_layers_have_the_spec_of_their_group() -> None:
    config = make_kv_cache_config([CacheGroup(0, 4), CacheGroup(1, 4, 6)], 40)
    assert layer_specs(config) == {"layer.0": make_spec(4), "layer.1": make_spec(4, 6)}


def test_layers_of_a_uniform_group_have_specs_of_their_own() -> None:
    config = make_kv_cache_config([CacheGroup(0, 4)], 40)
    own = {"layer.0": make_spec(4), "layer.1": make_spec(4, 6)}
    config.kv_cache_groups[0].layer_names = ["layer.0", "layer.1"]
    config.kv_cache_groups[0].kv_cache_spec = UniformTypeKVCacheSpecs(
        block_size=4, kv_cache_specs=own
    )
    assert layer_specs(config) == own


# -- the output-copy stream --------------------------------------------------------------------


class Runner:
    """A caller of `register_kv_caches`, through a frame or two of others."""

    def register(self) -> object | None:
        return Connector().register_kv_caches()


class Connector:
    def register_kv_caches(self) -> object | None:
        def look() -> object | None:
            return find_output_copy_stream()

        return look()


class RunnerV2(Runner):
    def __init__(self, stream: object | None) -> None:
        self.output_copy_stream = stream


class RunnerV1(Runner):
    def __init__(self, asynchronous: bool | None) -> None:
        if asynchronous is not None:
            self.use_async_scheduling = asynchronous
        self.made: list[object] = []

    def _get_or_create_async_output_copy_stream(self) -> object:
        self.made = self.made or [object()]
        return self.made[0]


def test_no_stream_is_found_where_no_runner_calls() -> None:
    assert find_output_copy_stream() is None
    assert Runner().register() is None


def test_runner_v2_owns_the_stream() -> None:
    stream = object()
    assert RunnerV2(stream).register() is stream


def test_runner_v2_without_a_stream() -> None:
    assert RunnerV2(None).register() is None


def test_runner_v1_makes_the_stream_that_it_will_use() -> None:
    runner = RunnerV1(asynchronous=True)
    assert runner.register() is runner.made[0]


@pytest.mark.parametrize("asynchronous", [False, None])
def test_runner_v1_makes_no_stream_that_it_will_not_use(asynchronous: bool | None) -> None:
    runner = RunnerV1(asynchronous)
    assert runner.register() is None
    assert runner.made == []


class SteppingRunner:
    """Has KV tensors, like a real one, and a method that the worker calls for every step."""

    def __init__(self) -> None:
        self.executed: list[tuple[object, ...]] = []

    def register(self, call: Callable[[Any], None]) -> None:
        before_each_step(call)

    def execute_model(self, scheduler_output: object, tensors: object = None) -> str:
        self.executed.append((scheduler_output, tensors))
        return "output"


def test_the_runner_calls_before_each_step() -> None:
    runner, told = SteppingRunner(), []
    runner.register(lambda output: told.append((output, len(runner.executed))))
    assert runner.execute_model("one") == "output"
    assert runner.execute_model(scheduler_output="two", tensors=3) == "output"
    assert told == [("one", 0), ("two", 1)]
    assert runner.executed == [("one", None), ("two", 3)]
    assert SteppingRunner().execute_model("other") == "output"
    assert len(told) == 2, "other runners are left alone"


def test_wrappers_of_others_are_called_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set on the runner before ours, set on it after ours, and set on its class after ours."""
    runner, told = SteppingRunner(), []

    def wrap(name: str) -> None:
        inner = runner.execute_model

        def outer(*args: Any, **kwargs: Any) -> Any:
            told.append(name)
            return inner(*args, **kwargs)

        runner.execute_model = outer  # type: ignore[method-assign]

    wrap("before")
    runner.register(lambda output: told.append("ours"))
    wrap("after")
    original = SteppingRunner.execute_model

    def on_class(self: SteppingRunner, *args: Any, **kwargs: Any) -> str:
        told.append("class")
        return original(self, *args, **kwargs)

    other = SteppingRunner()
    other.register(lambda output: told.append("ours"))
    monkeypatch.setattr(SteppingRunner, "execute_model", on_class)
    assert runner.execute_model("one", tensors=3) == "output"
    assert runner.executed == [("one", 3)]
    assert told == ["after", "ours", "before"]
    told.clear()
    assert other.execute_model("one") == "output"
    assert told == ["ours", "class"]


def test_a_runner_that_calls_is_freed_at_once() -> None:
    runner = SteppingRunner()
    runner.register(lambda output: None)
    gc.disable()
    try:
        found = weakref.ref(runner)
        del runner
        assert found() is None
    finally:
        gc.enable()


def test_without_a_runner_nobody_calls() -> None:
    before_each_step(lambda output: pytest.fail("nothing to call it"))


class Weights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given: list[str] = []

    def load_weights(self, weights: Sequence[tuple[str, object]], *, strict: bool = True) -> int:
        self.given += [name for name, _ in weights]
        return len(weights)


class LoadingRunner(SteppingRunner):
    def __init__(self) -> None:
        super().__init__()
        self.model = Weights()

    def get_model(self) -> Weights:
        return self.model

    def register_counting(self) -> Callable[[], int]:
        return count_weight_loads()


def test_a_model_counts_how_often_it_is_given_weights() -> None:
    runner = LoadingRunner()
    runner.model.load_weights([("at start", 0)])
    loads = runner.register_counting()
    assert loads() == 0
    assert runner.model.load_weights([("a", 1), ("b", 2)], strict=False) == 2
    assert runner.model.load_weights(weights=[("c", 3)]) == 1
    assert (loads(), runner.model.given) == (2, ["at start", "a", "b", "c"])
    LoadingRunner().model.load_weights([])
    assert loads() == 2, "other models are left alone"


def test_a_model_whose_load_fails_counts_it() -> None:
    runner = LoadingRunner()
    loads = runner.register_counting()
    with pytest.raises(TypeError):
        runner.model.load_weights(None)  # type: ignore[arg-type]
    assert loads() == 1, "half of them may be there"


def test_wrappers_of_load_weights_are_called_too() -> None:
    runner, told = LoadingRunner(), []
    load = runner.model.load_weights
    runner.model.load_weights = lambda weights: told.append("before") or load(weights)  # type: ignore[method-assign,assignment,func-returns-value]
    first, second = runner.register_counting(), runner.register_counting()
    assert runner.model.load_weights([("a", 1)]) == 1
    assert (told, first(), second()) == (["before"], 1, 1)


def test_a_model_that_counts_is_freed_at_once_and_keeps_nothing_alive() -> None:
    runner = LoadingRunner()
    loads = runner.register_counting()
    model = runner.model
    gc.disable()
    try:
        found = [weakref.ref(runner), weakref.ref(model)]
        model.load_weights([])
        del runner
        assert found[0]() is None
        del model
        assert found[1]() is None
    finally:
        gc.enable()
    assert loads() == 1


def test_without_a_runner_or_a_model_nothing_is_counted() -> None:
    class Bare(SteppingRunner):
        def register_counting(self) -> Callable[[], int]:
            return count_weight_loads()

    class Other(Bare):
        def get_model(self) -> object:
            return object()

    assert [count_weight_loads()(), Bare().register_counting()()] == [0, 0]
    assert Other().register_counting()() == 0


@pytest.mark.parametrize(
    ("zeroed", "copied", "changes"),
    [(None, None, False), ([], [], False), ([3], None, True), (None, [(1, 2)], True)],
)
def test_steps_that_change_blocks_before_their_forward(
    zeroed: list[int] | None, copied: list[Any] | None, changes: bool
) -> None:
    output = SchedulerOutput.make_empty()
    output.new_block_ids_to_zero = zeroed
    output.kv_cache_block_copies = copied
    assert changes_blocks(output) == changes


def test_the_nearest_runner_counts() -> None:
    """A draft model's runner can be called by the target's."""
    inner = RunnerV2(object())

    class Outer(RunnerV2):
        def register(self) -> object | None:
            return inner.register()

    assert Outer(object()).register() is inner.output_copy_stream


# -- our halves of a connector -----------------------------------------------------------------


def test_halves_of_one_connector_or_of_those_inside_another() -> None:
    ours = SimpleNamespace(offload_scheduler="s", offload_worker=None)
    other = SimpleNamespace()
    multi = SimpleNamespace(_connectors=[other, ours, SimpleNamespace(_connectors=[ours])])
    assert list(halves(ours, "offload_scheduler")) == ["s"]
    assert list(halves(ours, "offload_worker")) == []
    assert list(halves(other, "offload_scheduler")) == []
    assert list(halves(multi, "offload_scheduler")) == ["s", "s"]
    assert list(halves(None, "offload_scheduler")) == []


def test_failed_and_lost_loads_are_collected_from_all_reports() -> None:
    def half(name: str) -> Any:
        return SimpleNamespace(offload_scheduler=SimpleNamespace(lose=lambda jobs: {(name, *jobs)}))

    def report(failed: set[str], lost: set[int]) -> OffloadWorkerMetadata:
        return OffloadWorkerMetadata(failed_loads=frozenset(failed), lost_loads=frozenset(lost))

    multi = SimpleNamespace(_connectors=[half("x"), SimpleNamespace(), half("y")])
    parts = (report({"a", "b"}, {7}), None, report({"b", "c"}, set()))
    both = SimpleNamespace(kv_connector_worker_meta=SimpleNamespace(metadata=parts))
    assert engine_hooks.failed_loads(multi, both) == {"a", "b", "c"}
    assert engine_hooks.requests_with_lost_kv(multi, both) == {("x", 7)}
    single = SimpleNamespace(kv_connector_worker_meta=parts[0])
    assert engine_hooks.failed_loads(half("z"), single) == {"a", "b"}
    assert engine_hooks.requests_with_lost_kv(half("z"), single) == {("z", 7)}
    nothing = SimpleNamespace(kv_connector_worker_meta=None)
    assert engine_hooks.failed_loads(multi, nothing) == set()


# -- draining before a reset -------------------------------------------------------------------


@pytest.fixture
def resets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happens to engine cores; the class gets its method back after the test."""
    events: list[Any] = []

    def reset_prefix_cache(self: Any, running: bool = False, connector: bool = False) -> str:
        events.append(("reset", running, connector))
        return "done"

    monkeypatch.setattr(EngineCore, "reset_prefix_cache", reset_prefix_cache)
    return events


def core_of(scheduler: Any) -> EngineCore:
    core = object.__new__(EngineCore)
    core.scheduler = scheduler
    return core


def scheduler_with(connector: Any) -> Any:
    """One that holds back blocks while steps 4 and 5 are in flight."""
    scheduler = SimpleNamespace(
        defer_block_free=True,
        processed_step_seq=3,
        sched_step_seq=5,
        deferred_frees=[4, 5],
        running=[],
    )

    def drain() -> None:
        fences = scheduler.deferred_frees
        scheduler.deferred_frees = [f for f in fences if f > scheduler.processed_step_seq]

    scheduler._drain_deferred_frees = drain
    scheduler.get_kv_connector = lambda: connector
    return scheduler


OURS = SimpleNamespace(offload_scheduler=object())


def test_a_reset_holds_back_no_block_of_steps_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def reset_prefix_cache(self: Any, running: bool) -> None:
        seen.append((self.scheduler.defer_block_free, self.scheduler.deferred_frees))
        raise RuntimeError("reset failed")

    monkeypatch.setattr(EngineCore, "reset_prefix_cache", reset_prefix_cache)
    drain_before_reset(lambda _, requeue: None)
    for connector, expected in (
        (OURS, (False, [])),
        (SimpleNamespace(_connectors=[OURS, SimpleNamespace()]), (True, [4, 5])),
        (None, (True, [4, 5])),
    ):
        scheduler = scheduler_with(connector)
        with pytest.raises(RuntimeError, match="reset failed"):
            core_of(scheduler).reset_prefix_cache()
        assert seen.pop() == expected
        assert (scheduler.defer_block_free, scheduler.processed_step_seq) == (True, 3)


def test_an_engine_core_drains_before_it_resets(resets: list[Any]) -> None:
    core = core_of(scheduler_with(None))
    drain_before_reset(lambda drained, requeue: resets.append((drained, requeue)))
    assert core.reset_prefix_cache(True, connector=True) == "done"
    assert resets == [(core, True), ("reset", True, True)]
    resets.clear()
    core.reset_prefix_cache()
    core.scheduler.running.append("a request, so that the reset fails anyway")
    core.reset_prefix_cache()
    asked = [event for event in resets if event[0] is core]
    assert asked == [(core, True), (core, False)]


def test_asking_twice_drains_once(resets: list[Any]) -> None:
    for _ in range(3):
        drain_before_reset(lambda _, requeue: resets.append("drained"))
    core_of(scheduler_with(None)).reset_prefix_cache()
    assert resets == ["drained", ("reset", False, False)]


def test_the_hooked_method_is_vllms_own() -> None:
    """Sleep and pause reset through it too; a renamed method must fail here, not at a reset."""
    assert isinstance(EngineCore.__dict__["reset_prefix_cache"], Callable)
    assert isinstance(Scheduler.__dict__["_update_from_kv_xfer_finished"], Callable)
    assert isinstance(Scheduler.__dict__["update_from_output"], Callable)


# -- recomputing requests whose load failed ----------------------------------------------------


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    events: list[Any] = []
    monkeypatch.setattr(
        Scheduler, "_update_from_kv_xfer_finished", lambda self, output: events.append(output)
    )
    return events


class Waiting:
    """The state of vLLM's scheduler that the hook reads and writes."""

    def __init__(self, **requests: RequestStatus) -> None:
        self.connector = "the connector"
        self.failed_recving_kv_req_ids: set[str] = set()
        self.requests = {
            request_id: SimpleNamespace(status=status, num_computed_tokens=7)
            for request_id, status in requests.items()
        }


def test_a_waiting_request_whose_load_failed_is_recomputed(updates: list[Any]) -> None:
    asked: list[Any] = []

    def find(connector: Any, output: Any) -> set[str]:
        asked.append((connector, output, list(updates)))
        return {"failed", "aborted", "gone"}

    recompute_failed_requests(find)
    scheduler = Waiting(
        failed=RequestStatus.WAITING_FOR_REMOTE_KVS,
        loaded=RequestStatus.WAITING_FOR_REMOTE_KVS,
        aborted=RequestStatus.FINISHED_ABORTED,
    )
    Scheduler._update_from_kv_xfer_finished(scheduler, "output")
    assert asked == [("the connector", "output", ["output"])], "vLLM's own update comes first"
    assert scheduler.failed_recving_kv_req_ids == {"failed"}
    computed = {name: r.num_computed_tokens for name, r in scheduler.requests.items()}
    assert computed == {"failed": 0, "loaded": 7, "aborted": 7}


def test_asking_twice_recomputes_once(updates: list[Any]) -> None:
    asked: list[str] = []
    for name in ("first", "second"):
        recompute_failed_requests(lambda *_, name=name: asked.append(name) or set())
    Scheduler._update_from_kv_xfer_finished(Waiting(), "output")
    assert (updates, asked) == (["output"], ["first"])


# -- local hits of hybrid models ---------------------------------------------------------------


def test_only_the_oldest_versions_count_attention_alone() -> None:
    found = [counts_attention_hits((0, minor)) for minor in (26, 27, 28, 32, 33)]
    assert found == [True, True, False, False, False]


def test_local_hits_are_those_of_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []

    def schedule(self: Any, *args: Any, **kwargs: Any) -> str:
        steps.append((self.has_mamba_layers, args, kwargs))
        return "output"

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    for _ in range(2):
        count_common_hits()
    scheduler = object.__new__(Scheduler)
    scheduler.has_mamba_layers = True
    assert scheduler.schedule(True, more=1) == "output"
    assert steps == [(False, (True,), {"more": 1})]


def test_the_log_goes_through_vllms_handler() -> None:
    assert engine_compat.logger.name.startswith("vllm.")


@pytest.fixture
def chosen_level() -> Iterator[Callable[[int], None]]:
    before = engine_compat.logger.level
    yield engine_compat.logger.setLevel
    engine_compat.logger.setLevel(before)


def test_the_log_of_transfer_goes_there_too(
    monkeypatch: pytest.MonkeyPatch, chosen_level: Callable[[int], None]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(engine_compat.logger, "handle", lambda r: shown.append(r.getMessage()))
    monkeypatch.setattr(logging.getLogger("kv_swap"), "handlers", [])
    for _ in range(2):
        forward_log("kv_swap")
    chosen_level(logging.INFO)
    logging.getLogger("kv_swap.memory.registration").info("page-locked %d bytes", 5)
    logging.getLogger("kv_swap.memory.registration").debug("not asked for")
    assert shown == ["page-locked 5 bytes"]
    chosen_level(logging.ERROR)
    logging.getLogger("kv_swap").info("not of interest to this user")
    logging.getLogger("kv_swap").error("of interest")
    assert shown == ["page-locked 5 bytes", "of interest"]


# -- the forward that is about to run ----------------------------------------------------------


def context_of(mode: str | None = "NONE", **more: Any) -> Any:
    """Return what vLLM knows of a forward, as all versions have it."""
    fields = {
        "cudagraph_runtime_mode": None if mode is None else CUDAGraphMode[mode],
        "attn_metadata": {"layer": object()},
        "ubatch_slices": None,
        "skip_compiled": False,
    }
    return SimpleNamespace(**{**fields, **more})


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE"])
def test_forwards_of_which_layers_call(mode: str) -> None:
    context = context_of(mode)
    with override_forward_context(context):
        assert forward_context() is context
        assert forward_with_layer_calls() == (context, (mode, False))


@pytest.mark.parametrize(
    "context",
    [
        None,
        context_of("FULL"),
        context_of(None),
        context_of(attn_metadata=None),
        context_of(attn_metadata={}),
        context_of(attn_metadata=[{}, {}]),
        context_of(ubatch_slices=[object(), object()]),
        SimpleNamespace(attn_metadata={"layer": object()}),
        SimpleNamespace(
            cudagraph_runtime_mode=CUDAGraphMode.NONE, attn_metadata={"layer": object()}
        ),
    ],
)
def test_forwards_of_which_that_is_not_known(context: Any) -> None:
    with override_forward_context(context):
        assert forward_with_layer_calls() is None


def test_the_context_is_vllms_own() -> None:
    """Its fields have the names that are asked for; a dummy step's has no attention."""
    names = {field.name for field in dataclasses.fields(ForwardContext)}
    assert names >= {"cudagraph_runtime_mode", "attn_metadata", "ubatch_slices", "skip_compiled"}
    real = ForwardContext(no_compile_layers={}, attn_metadata={"layer": None}, slot_mapping={})  # type: ignore[dict-item]
    with override_forward_context(real):
        assert forward_with_layer_calls() == (real, ("NONE", False))
