"""What is found on the call stack, and what a model runner and a model tell then."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context

from kv_offload.engines.vllm.runner import VLLMRank, before_each_step

pytestmark = pytest.mark.filterwarnings("default")

RANK = VLLMRank(None, gives_idle_blocks=False)  # type: ignore[arg-type]
find_output_copy_stream = RANK.find_output_copy_stream
count_weight_loads = RANK.count_weight_loads
forward_context = RANK.forward_context
forward_with_layer_calls = RANK.forward_with_layer_calls

# -- the output-copy stream -------------------------------------------------------------------


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


def test_the_nearest_runner_counts() -> None:
    """A draft model's runner can be called by the target's."""
    inner = RunnerV2(object())

    class Outer(RunnerV2):
        def register(self) -> object | None:
            return inner.register()

    assert Outer(object()).register() is inner.output_copy_stream


# -- the forward that is about to run ---------------------------------------------------------


def context_of(mode: str = "NONE", **more: Any) -> Any:
    """Return what vLLM knows of a forward, as all versions have it."""
    fields = {
        "cudagraph_runtime_mode": CUDAGraphMode[mode],
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
        context_of(attn_metadata=None),
        context_of(attn_metadata={}),
        context_of(attn_metadata=[{}, {}]),
        context_of(ubatch_slices=[object(), object()]),
    ],
)
def test_forwards_of_which_no_layer_calls(context: Any) -> None:
    with override_forward_context(context):
        assert forward_with_layer_calls() is None


def test_the_context_is_vllms_own() -> None:
    """Its fields have the names that are asked for; a dummy step's has no attention."""
    names = {field.name for field in dataclasses.fields(ForwardContext)}
    assert names >= {"cudagraph_runtime_mode", "attn_metadata", "ubatch_slices", "skip_compiled"}
    real = ForwardContext(no_compile_layers={}, attn_metadata={"layer": None}, slot_mapping={})  # type: ignore[dict-item]
    with override_forward_context(real):
        assert forward_with_layer_calls() == (real, ("NONE", False))
