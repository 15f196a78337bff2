"""What is found on the call stack, and what a model runner and a model tell then."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
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

# -- the output-copy stream -------------------------------------------------------------------


class Caller:
    """An object that calls the plugin, through a frame of others."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def call(self, function: Callable[[], Any]) -> Any:
        return (lambda: function())()


STREAM = object()
MAKE = "_get_or_create_async_output_copy_stream"


def unused() -> None:
    pytest.fail("makes a stream that it will not use")


@pytest.mark.parametrize(
    ("runner", "stream"),
    [
        ({}, None),
        # Runner V2 owns the stream, if there is one.
        ({"output_copy_stream": STREAM}, STREAM),
        ({"output_copy_stream": None}, None),
        # Runner V1 makes the stream that it will use.
        ({MAKE: lambda: STREAM, "use_async_scheduling": True}, STREAM),
        ({MAKE: unused, "use_async_scheduling": False}, None),
        ({MAKE: unused}, None),
    ],
)
def test_the_runner_that_calls_has_the_stream(runner: dict[str, Any], stream: object) -> None:
    caller = Caller(**runner)
    assert caller.call(lambda: Caller().call(RANK.find_output_copy_stream)) is stream
    assert RANK.find_output_copy_stream() is None, "no runner calls"


def test_the_nearest_runner_counts() -> None:
    """A draft model's runner can be called by the target's."""
    inner, outer = Caller(output_copy_stream=STREAM), Caller(output_copy_stream=object())
    assert outer.call(lambda: inner.call(RANK.find_output_copy_stream)) is STREAM


# -- before each step ---------------------------------------------------------------------------


class SteppingRunner(Caller):
    """Has a method that the worker calls for every step, like a real one."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
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


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Cycles stay in memory."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_a_runner_that_calls_is_freed_at_once() -> None:
    runner = SteppingRunner()
    runner.register(lambda output: None)
    found = weakref.ref(runner)
    del runner
    assert found() is None


def test_without_a_runner_nobody_calls() -> None:
    before_each_step(lambda output: pytest.fail("nothing to call it"))


# -- the weights of a model ---------------------------------------------------------------------


class Weights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given: list[str] = []

    def load_weights(self, weights: Sequence[tuple[str, object]], *, strict: bool = True) -> int:
        self.given += [name for name, _ in weights]
        return len(weights)


def loading_runner() -> Any:
    model = Weights()
    return SteppingRunner(model=model, get_model=lambda: model)


def test_a_model_counts_how_often_it_is_given_weights() -> None:
    runner = loading_runner()
    runner.model.load_weights([("at start", 0)])
    loads = runner.call(RANK.count_weight_loads)
    assert loads() == 0
    assert runner.model.load_weights([("a", 1), ("b", 2)], strict=False) == 2
    assert runner.model.load_weights(weights=[("c", 3)]) == 1
    assert (loads(), runner.model.given) == (2, ["at start", "a", "b", "c"])
    loading_runner().model.load_weights([])
    assert loads() == 2, "other models are left alone"


def test_a_model_whose_load_fails_counts_it() -> None:
    runner = loading_runner()
    loads = runner.call(RANK.count_weight_loads)
    with pytest.raises(TypeError):
        runner.model.load_weights(None)  # type: ignore[arg-type]
    assert loads() == 1, "half of them may be there"


def test_wrappers_of_load_weights_are_called_too() -> None:
    runner, told = loading_runner(), []
    load = runner.model.load_weights
    runner.model.load_weights = lambda weights: told.append("before") or load(weights)  # type: ignore[method-assign,assignment,func-returns-value]
    first = runner.call(RANK.count_weight_loads)
    wrapper = runner.model.load_weights
    second = runner.call(RANK.count_weight_loads)
    assert runner.model.load_weights is wrapper, "it tells both"
    assert runner.model.load_weights([("a", 1)]) == 1
    assert (told, first(), second()) == (["before"], 1, 1)


@pytest.mark.usefixtures("uncollected")
def test_a_model_that_counts_is_freed_at_once_and_keeps_nothing_alive() -> None:
    runner = loading_runner()
    loads = runner.call(RANK.count_weight_loads)
    model = runner.model
    model.load_weights([])
    found = [weakref.ref(runner), weakref.ref(model)]
    del runner
    assert found[0]() is None
    del model
    assert found[1]() is None
    assert loads() == 1


def test_without_a_runner_or_a_model_nothing_is_counted() -> None:
    without_a_model = SteppingRunner(), SteppingRunner(get_model=object)
    counts = [runner.call(RANK.count_weight_loads) for runner in without_a_model]
    assert [loads() for loads in (RANK.count_weight_loads(), *counts)] == [0, 0, 0]


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
        assert RANK.forward_context() is context
        assert RANK.forward_with_layer_calls() == (context, (mode, False))


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
        assert RANK.forward_with_layer_calls() is None


def test_the_context_is_vllms_own() -> None:
    """Its fields have the names that are asked for; a dummy step's has no attention."""
    names = {field.name for field in dataclasses.fields(ForwardContext)}
    assert names >= {"cudagraph_runtime_mode", "attn_metadata", "ubatch_slices", "skip_compiled"}
    real = ForwardContext(no_compile_layers={}, attn_metadata={"layer": None}, slot_mapping={})  # type: ignore[dict-item]
    with override_forward_context(real):
        assert RANK.forward_with_layer_calls() == (real, ("NONE", False))
