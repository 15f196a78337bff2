"""Ways in which trainers give a running engine new weights, and models to do it with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine.harness import Engine
from tests.support.small_models import write_model

CHANGED = ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight")
"""Weights that the CPU engine uses as they were loaded, and on which all KV depends."""

Weights = list[tuple[str, torch.Tensor]]
Way = Callable[[Engine, Weights], None]


def write_new_weights(models: Path) -> tuple[Path, Weights]:
    """Write the small model with other weights; return its folder and what is other."""
    old = write_model("qwen3", models / "qwen3")
    folder = models / "new" / "qwen3"
    shutil.copytree(old, folder, dirs_exist_ok=True)
    weights = load_file(old / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    changed = [(name, weights[name].clone()) for name in CHANGED]
    for name, weight in changed:
        weight += torch.randn(weight.shape, generator=generator) * weight.std().clamp(min=0.3)
        weights[name] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, changed


def give(model: Any, weights: Weights) -> None:
    """Give a model weights as a broadcast into its tensors does: nobody can notice."""
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
    """As TRL does where the engine lives in the trainer's process."""
    executor = engine.llm.llm_engine.model_executor
    for weight in weights:
        executor.driver_worker.model_runner.model.load_weights([weight])


WAYS: dict[str, Way] = {
    "a method of a worker extension": by_name,
    "a function": by_function,
    "apply_model": by_apply_model,
    "load_weights of the model": by_hand,
}
