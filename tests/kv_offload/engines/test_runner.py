"""What is found on the call stack, and what a model runner and a model tell then."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kv_offload.engines.vllm.hooks.worker import changes_blocks
from kv_offload.engines.vllm.runner import VLLMRank, before_each_step, guard_inputs

RANK = VLLMRank(None, None, gives_idle_blocks=False, packs=False)  # type: ignore[arg-type]


class Caller:
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
def test_the_nearest_runner_that_calls_has_the_stream(runner, stream):
    caller = Caller(**runner)
    assert caller.call(lambda: Caller().call(RANK.find_output_copy_stream)) is stream
    if stream is not None:  # a draft model's runner can be called by the target's
        outer = Caller(output_copy_stream=object())
        assert outer.call(lambda: caller.call(RANK.find_output_copy_stream)) is stream
    assert RANK.find_output_copy_stream() is None, "no runner calls"


@pytest.mark.parametrize(
    ("batches", "device", "runner", "guarded"),
    [
        (2, "cuda", {"prepare_inputs_event": None}, True),
        (1, "cuda", {"prepare_inputs_event": None}, False),
        (2, "cpu", {"prepare_inputs_event": None}, False),
        (2, "cuda", {"prepare_inputs_event": "vLLM's"}, False),
        (2, "cuda", {}, False),  # runner V2 has several buffers for inputs
    ],
)
def test_inputs_of_a_pipeline_are_guarded(batches, device, runner, guarded, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda *, blocking: ("event", blocking))
    caller = Caller(execute_model=None, device=torch.device(device), **runner)
    caller.call(lambda: guard_inputs(SimpleNamespace(max_concurrent_batches=batches)))
    found = getattr(caller, "prepare_inputs_event", "none")
    assert found == (("event", True) if guarded else runner.get("prepare_inputs_event", "none"))


@pytest.mark.parametrize("stages", [1, 2])
def test_runner_v1_rewrites_inputs_only_after_its_event(stages):
    """What `guard_inputs` relies on, of vLLM's own runner."""
    seen: list[str] = []
    event = SimpleNamespace(
        synchronize=lambda: seen.append("wait"), record=lambda: seen.append("record")
    )
    runner = SimpleNamespace(prepare_inputs_event=None if stages == 1 else event)
    with GPUModelRunner.synchronize_input_prep(runner):
        seen.append("rewrite")
    assert seen == (["rewrite"] if stages == 1 else ["wait", "rewrite", "record"])


class Weights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given: list[str] = []

    def load_weights(self, weights: Sequence[tuple[str, object]], *, strict: bool = True) -> int:
        self.given += [name for name, _ in weights]
        return len(weights)


class Runner(Caller):
    def __init__(self) -> None:
        model = Weights()
        super().__init__(model=model, get_model=lambda: model)
        self.executed: list[tuple[object, ...]] = []

    def execute_model(self, scheduler_output: object, tensors: object = None) -> str:
        self.executed.append((scheduler_output, tensors))
        return "output"

    def listen(self, call: Callable[..., None]) -> None:
        self.call(lambda: before_each_step(call))


def test_the_runner_calls_before_each_step():
    runner, told = Runner(), []
    runner.listen(
        lambda scheduler_output, **_: told.append((scheduler_output, len(runner.executed)))
    )
    assert runner.execute_model("one") == "output"
    assert runner.execute_model(scheduler_output="two", tensors=3) == "output"
    assert told == [("one", 0), ("two", 1)]
    assert runner.executed == [("one", None), ("two", 3)]
    assert Runner().execute_model("other") == "output"
    assert len(told) == 2, "other runners are left alone"


def test_wrappers_of_others_are_called_too(monkeypatch):
    """Set on the runner before ours, and set on its class after ours."""
    told: list[str] = []

    def wrap(name: str, inner: Callable[..., str]) -> Callable[..., str]:
        return lambda *args, **kwargs: told.append(name) or inner(*args, **kwargs)

    runner, other = Runner(), Runner()
    runner.execute_model = wrap("before", runner.execute_model)  # type: ignore[method-assign]
    for one in (runner, other):
        one.listen(lambda scheduler_output, **_: told.append("ours"))
    monkeypatch.setattr(Runner, "execute_model", wrap("class", Runner.execute_model))
    assert runner.execute_model("one", tensors=3) == other.execute_model("two") == "output"
    assert (runner.executed, other.executed) == ([("one", 3)], [("two", None)])
    assert told == ["ours", "before", "ours", "class"]


def test_a_model_counts_how_often_it_is_given_weights():
    runner = Runner()
    runner.model.load_weights([("at start", 0)])
    loads = runner.call(RANK.count_weight_loads)
    assert loads() == 0
    assert runner.model.load_weights([("a", 1), ("b", 2)], strict=False) == 2
    with pytest.raises(TypeError):
        runner.model.load_weights(None)
    assert loads() == 2, "half of them may be there"
    again = runner.call(RANK.count_weight_loads)
    assert runner.model.load_weights(weights=[("c", 3)]) == 1
    Runner().model.load_weights([])
    assert (loads(), again()) == (3, 1), "other models are left alone"
    assert runner.model.given == ["at start", "a", "b", "c"]


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_a_runner_and_a_model_that_tell_are_freed_at_once():
    runner = Runner()
    runner.listen(lambda scheduler_output, **_: None)
    loads = runner.call(RANK.count_weight_loads)
    model = runner.model
    model.load_weights([])
    found = [weakref.ref(runner), weakref.ref(model)]
    del runner
    assert found[0]() is None
    del model
    assert found[1]() is None
    assert loads() == 1


def test_without_a_runner_or_a_model_nothing_is_told():
    before_each_step(lambda scheduler_output, **_: pytest.fail("nothing to call it"))
    bare, without_weights = Caller(execute_model=None), Caller(execute_model=None, get_model=object)
    counts = [caller.call(RANK.count_weight_loads) for caller in (bare, without_weights)]
    assert [loads() for loads in (RANK.count_weight_loads(), *counts)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("zeroed", "copied", "changes"),
    [(None, None, False), ([], [], False), ([3], None, True), (None, [(1, 2)], True)],
)
def test_steps_that_change_blocks_before_their_forward(zeroed, copied, changes):
    output = SchedulerOutput.make_empty()
    output.new_block_ids_to_zero = zeroed
    output.kv_cache_block_copies = copied
    assert changes_blocks(output) == changes


def context_of(mode: str = "NONE", **more: Any) -> Any:
    fields = {
        "cudagraph_runtime_mode": CUDAGraphMode[mode],
        "attn_metadata": {"layer": object()},
        "ubatch_slices": None,
        "skip_compiled": False,
    }
    return SimpleNamespace(**{**fields, **more})


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE"])
def test_forwards_of_which_layers_call(mode):
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
def test_forwards_of_which_no_layer_calls(context):
    with override_forward_context(context):
        assert RANK.forward_with_layer_calls() is None


def test_the_context_is_vllms_own():
    """Its fields have the names that are asked for; a dummy step's has no attention."""
    names = {field.name for field in dataclasses.fields(ForwardContext)}
    assert names >= {"cudagraph_runtime_mode", "attn_metadata", "ubatch_slices", "skip_compiled"}
    real = ForwardContext(no_compile_layers={}, attn_metadata={"layer": None}, slot_mapping={})  # type: ignore[dict-item]
    with override_forward_context(real):
        assert RANK.forward_with_layer_calls() == (real, ("NONE", False))
