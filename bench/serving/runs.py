"""Which engine is measured when, and what is collected."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from bench.machine import machine
from bench.serving.process import EngineError, EngineProcess, progress
from bench.serving.report import save
from bench.serving.shapes import LIMIT, SERVER_STEP_TOKENS, SHAPES
from bench.serving.stats import ratio_interval

SECTIONS = ("ttft", "throughput", "latency", "pairs", "conversations", "start")
OF_ONE_ENGINE = ("ttft", "throughput", "latency")
"""Sections that need one engine only; their functions are in `sections.py`."""
STARTS = 5
ROUNDS = 2
"""How often each engine holds conversations, each time started anew, by turns."""


class Bench:
    """Runs sections on engines and collects the results.

    `model` is the folder of the model's configuration, the same for all: under its path an engine
    finds what another one has compiled.
    """

    def __init__(self, arguments: argparse.Namespace, model: str) -> None:
        self._arguments = arguments
        self.results: dict[str, dict[str, Any]] = {}
        self.pairs: dict[str, float] | None = None
        self._model = model

    def document(self) -> dict[str, Any]:
        """Return all that is known so far, with what it was measured on."""
        arguments = self._arguments
        return {
            "machine": machine(),
            "mode": "separate core" if arguments.separate_core else "one process",
            "sections": arguments.sections,
            "options": arguments.options,
            "shape": {"name": arguments.shape, **asdict(SHAPES[arguments.shape])},
            "results": self.results,
            "pairs": self.pairs,
        }

    def run(self, connectors: Sequence[str]) -> None:
        """Measure every connector; `off` waits for its turns beside `kv-offload`."""
        rest = list(connectors)
        chosen = self._arguments.sections
        if "pairs" in chosen and {"off", "kv-offload"} <= set(connectors):
            rest = [name for name in connectors if name not in ("off", "kv-offload")]
            with self._engine(self._spawn("off")) as off:
                if off is not None:
                    self._measure(off)
                with self._engine(self._spawn("kv-offload")) as ours:
                    if ours is not None:
                        self._measure(ours)
                    if off is not None and ours is not None:
                        self._measure_pairs(off, ours)
        if chosen == ["conversations"]:
            rest = []  # they start engines of their own
        for connector in rest:
            with self._engine(self._spawn(connector)) as engine:
                if engine is not None:
                    self._measure(engine)
        if "conversations" in chosen:
            engines = self._by_turns([*connectors, LIMIT], ROUNDS, SERVER_STEP_TOKENS)
            for turn, engine in enumerate(engines):
                held = self.results[engine.connector].setdefault("conversations", [])
                held.append(engine.ask("conversations", seed=turn // (len(connectors) + 1)))
        if "start" in chosen:
            for _ in self._by_turns(connectors, STARTS):
                pass

    def _keep(self) -> None:
        """Write what is known so far: a run takes minutes, and may be cut short."""
        if self._arguments.out:
            save(self.document(), self._arguments.out)

    def _spawn(self, connector: str, step_tokens: int | None = None) -> EngineProcess:
        """Make the process of an engine that is to be started later."""
        arguments = self._arguments
        return EngineProcess(
            arguments.shape,
            connector,
            arguments.separate_core,
            arguments.options,
            self._model,
            step_tokens,
        )

    @contextlib.contextmanager
    def _engine(self, engine: EngineProcess) -> Iterator[EngineProcess | None]:
        """Start an engine, note how long that took, and end it; an error is noted instead."""
        result = self.results.setdefault(engine.connector, {"starts": []})
        started = False
        try:
            result["starts"].append(engine.start())
            started = True
            yield engine
        except EngineError as error:
            progress(str(error))
            result["error"] = str(error)
            if not started:
                yield None
        finally:
            engine.close()

    def _measure(self, engine: EngineProcess) -> None:
        """Run the sections that need one engine."""
        result = self.results[engine.connector]
        chosen = self._arguments.sections
        if engine.connector == "off" and "ttft" in chosen:
            result["link"] = engine.ask("link")
        for section in OF_ONE_ENGINE:
            if section in chosen:
                result[section] = engine.ask(section)
        result["memory"] = engine.ask("memory")
        result["counted"] = engine.counted
        self._keep()

    def _measure_pairs(self, off: EngineProcess, ours: EngineProcess) -> None:
        """Have both engines compute the same new prompts by turns, each as often first."""
        ratios = []
        for engine in (off, ours):
            engine.ask("turn", seed=0)
        for seed in range(1, 1 + SHAPES[self._arguments.shape].pairs):
            order = (off, ours) if seed % 2 else (ours, off)
            rates = {engine.connector: engine.ask("turn", seed=seed) for engine in order}
            ratios.append(rates["kv-offload"] / rates["off"])
            progress(f"pair {seed}: kv-offload / off = {ratios[-1]:.4f}")
        self.pairs = ratio_interval(ratios)
        self._keep()

    def _by_turns(
        self, connectors: Sequence[str], rounds: int, step_tokens: int | None = None
    ) -> Iterator[EngineProcess]:
        """Start every engine so often, by turns; a process is made while the one before it runs."""
        order = list(connectors) * rounds
        ahead = [self._spawn(order.pop(0), step_tokens)]
        while ahead:
            process = ahead.pop()
            if order:
                ahead.append(self._spawn(order.pop(0), step_tokens))
            with self._engine(process) as engine:
                if engine is not None:
                    yield engine
            self._keep()
