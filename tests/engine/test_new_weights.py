"""A real engine whose weights change: host memory serves nothing of the old ones.

Tokens are compared with those of an engine that had the new weights from the start. In the control
the plugin does not notice the change, which must give other tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from kv_offload.scheduler.resets import Resets
from tests.engine.harness import (
    BLOCK_TOKENS,
    Engine,
    Tokens,
    offloading,
    plain_answers,
    random_tokens,
)
from tests.support.small_models import write_model

PROMPT = random_tokens(10 * BLOCK_TOKENS + 1, seed=11)
CHANGED = ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight")
"""Weights that the CPU engine uses in their loaded form, and on which all KV depends."""

Weights = list[tuple[str, torch.Tensor]]


def changed(file: Path) -> dict[str, torch.Tensor]:
    """Return a file's weights, with `CHANGED` replaced."""
    weights = load_file(file)
    generator = torch.Generator().manual_seed(1)
    for name in CHANGED:
        weight = weights[name]
        noise = torch.randn(weight.shape, generator=generator)
        weights[name] = weight + noise * weight.std().clamp(min=0.3)
    return weights


def write_new_weights(models: Path) -> tuple[Path, Weights, Weights]:
    """Write the small model with other weights; return its folder, the old and the new values."""
    old = write_model("qwen3", models / "qwen3")
    folder = models / "new" / "qwen3"
    shutil.copytree(old, folder, dirs_exist_ok=True)
    before, weights = load_file(old / "model.safetensors"), changed(old / "model.safetensors")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    before, after = ([(name, of[name]) for name in CHANGED] for of in (before, weights))
    return folder, before, after


# -- how trainers give a running engine new weights ---------------------------------------------


def give(model: Any, weights: Weights) -> None:
    """Give a model weights like a broadcast into its tensors, which cannot be noticed."""
    type(model).load_weights(model, iter(weights))


class UpdateNamedParam:
    """The worker extension of TRL's server, with its method's name."""

    def update_named_param(self, name: str, weight: torch.Tensor) -> None:
        give(self.model_runner.model, [(name, weight)])  # type: ignore[attr-defined]


def by_name(engine: Engine, weights: Weights) -> None:
    for name, weight in weights:
        engine.llm.collective_rpc("update_named_param", args=(name, weight))


def by_function(engine: Engine, weights: Weights) -> None:
    engine.llm.collective_rpc(lambda worker: give(worker.model_runner.model, weights))


def by_apply_model(engine: Engine, weights: Weights) -> None:
    engine.llm.apply_model(lambda model: give(model, weights))


def by_hand(engine: Engine, weights: Weights) -> None:
    """As TRL does if the engine is in the trainer's process."""
    executor = engine.llm.llm_engine.model_executor
    for weight in weights:
        executor.driver_worker.model_runner.model.load_weights([weight])


WAYS = {
    "a method of a worker extension": by_name,
    "a function": by_function,
    "apply_model": by_apply_model,
    "load_weights of the model": by_hand,
}


# -- what is served afterwards ------------------------------------------------------------------


class Case(NamedTuple):
    old_weights: Weights
    new_weights: Weights
    old: list[Tokens]
    new: list[Tokens]


@pytest.fixture(scope="module")
def case(model_folder: Path) -> Case:
    """The new weights, and the answers without the plugin with the old and the new ones."""
    folder, *weights = write_new_weights(model_folder)
    old, new = (plain_answers(models, [PROMPT]) for models in (model_folder, folder.parent))
    assert old != new
    return Case(*weights, old, new)


@pytest.fixture(scope="module")
def ours(model_folder: Path, case: Case) -> Iterator[Engine]:
    """An engine with the old weights, which each test restores."""
    extension = "tests.engine.test_new_weights.UpdateNamedParam"
    with offloading(model_folder, worker_extension_cls=extension) as running:
        yield running


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_nothing_of_the_old_weights_is_served(ours, case, way, monkeypatch):
    """Also for blocks stored between the change and the reset, from the engine's own cache."""
    ours.forget()
    ours.generate([PROMPT])
    assert ours.reload([PROMPT]) == case.old
    ours.forget()
    with monkeypatch.context() as deaf:  # the control
        deaf.setattr(Resets, "weights_change", lambda resets: False)
        way(ours, case.new_weights)
        assert ours.reload([PROMPT]) != case.new
        assert ours.blocks_loaded() == 10
    way(ours, case.new_weights)
    ours.generate([PROMPT])
    ours.forget()
    # Computed at first, then stored and loaded like any other prompt.
    assert ours.generate([PROMPT]) == case.new
    assert ours.blocks_loaded() == 0
    assert ours.reload([PROMPT]) == case.new
    assert ours.blocks_loaded() == 10
    # A change is also noticed after a reset.
    ours.forget()
    way(ours, case.old_weights)
    assert ours.generate([PROMPT]) == case.old
    assert ours.blocks_loaded() == 0
