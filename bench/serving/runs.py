"""Which engine is started when, what is asked of it, and what is collected."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.links import host_of
from bench.machine import machine
from bench.serving.process import EngineError, EngineProcess, progress
from bench.serving.report import save
from bench.serving.settings import LIMIT, OURS, SERVER_STEP_TOKENS, EngineSettings
from bench.serving.shapes import SHAPES
from bench.serving.stats import ratio_interval

SECTIONS = ("ttft", "throughput", "latency", "pairs", "conversations", "start")
OF_ONE_ENGINE = SECTIONS[:3]
"""Sections that one engine is asked for, one after the other; functions of `sections.py`."""
STARTS = 5
ROUNDS = 2
"""How often each engine holds conversations, each time started anew, by turns; unless named."""


@dataclass(frozen=True)
class Visit:
    """One start of an engine, and what it is asked for then."""

    settings: EngineSettings
    asked: tuple[str, ...]
    turn: int | None = None
    """Where engines are started more than once, by turns."""

    def label(self, name: str) -> str:
        """Name one answer, for the list of what is missing."""
        turn = "" if self.turn is None else f" {self.turn + 1}"
        return f"{self.settings.connector} {name}{turn}"


class Bench:
    """Runs sections on engines and collects the results.

    After every answer of an engine everything is written to the folder of `--out`, with what is
    still missing: a run takes minutes, and may be stopped by a time limit. `model` is the folder of
    the model's configuration, the same for all.
    """

    def __init__(self, arguments: argparse.Namespace, model: str) -> None:
        self._arguments = arguments
        ranks = arguments.tensor_parallel
        self._shape = SHAPES[arguments.shape].on_ranks(ranks)
        self._host = host_of(ranks) if ranks > 1 else None
        self._settings = {
            connector: EngineSettings(self._shape, connector, model, arguments.options)
            for connector in [*arguments.connectors, LIMIT]
        }
        self._visits = self._plan()
        self._processes: list[EngineProcess] = []
        self.results: dict[str, dict[str, Any]] = {}
        self.pairs: dict[str, float] | None = None
        self.missing = [visit.label(name) for visit in self._visits for name in visit.asked]
        self._has_pairs = "pairs" in arguments.sections and {"off", OURS} <= self._settings.keys()
        if self._has_pairs:
            self.missing.append("pairs")

    def _plan(self) -> list[Visit]:
        chosen, connectors = self._arguments.sections, self._arguments.connectors
        sections = tuple(section for section in OF_ONE_ENGINE if section in chosen)
        visits = []
        for connector in connectors if sections else ():
            link = ("link",) if connector == "off" and "ttft" in chosen else ()
            visits.append(Visit(self._settings[connector], (*link, *sections, "memory")))
        for turn in range(self._arguments.rounds if "conversations" in chosen else 0):
            for settings in self._settings.values():
                as_a_server = replace(settings, step_tokens=SERVER_STEP_TOKENS)
                visits.append(Visit(as_a_server, ("conversations",), turn))
        # The first start of all compiles, and does not count.
        for turn in range(1 + STARTS if "start" in chosen else 0):
            visits += [Visit(self._settings[name], ("start",), turn) for name in connectors]
        return visits

    def document(self) -> dict[str, Any]:
        """Return all that is known so far, with what it was measured on."""
        arguments = self._arguments
        return {
            "machine": machine(),
            "sections": arguments.sections,
            "options": arguments.options,
            "shape": {"name": arguments.shape, **asdict(self._shape)},
            "host": self._host,
            "results": self.results,
            "pairs": self.pairs,
            "missing": self.missing,
        }

    def run(self) -> None:
        """Measure every connector."""
        try:
            self._keep()  # imports what takes memory, before an engine measures how much is left
            ahead: EngineProcess | None = None
            for visit, following in zip(self._visits, [*self._visits[1:], None], strict=True):
                process = ahead or self._spawn(visit.settings)
                # To import vLLM takes seconds, and memory where that is measured.
                is_early = visit.turn is not None
                ahead = self._spawn(following.settings) if following and is_early else None
                self._ask(process, visit)
            if self._has_pairs:
                self._measure_pairs()
        finally:
            for process in self._processes:
                process.kill()

    def _spawn(self, settings: EngineSettings) -> EngineProcess:
        """Make the process of an engine that is to be started later."""
        self._processes.append(EngineProcess(settings))
        return self._processes[-1]

    def _keep(self, label: str = "") -> None:
        """Take an answer off the list of what is missing, and write all that is known."""
        if label in self.missing:
            self.missing.remove(label)
        if self._arguments.out:
            save(self.document(), self._arguments.out)

    def _fail(self, error: EngineError) -> None:
        progress(str(error))
        self.results.setdefault(error.connector, {"starts": []})["error"] = str(error)

    def _start(self, process: EngineProcess) -> dict[str, Any]:
        """Start an engine; return the results of its connector."""
        result = self.results.setdefault(process.connector, {"starts": []})
        progress(f"{process.connector}: starting an engine")
        result["starts"].append(process.ask("start"))
        return result

    def _ask(self, process: EngineProcess, visit: Visit) -> None:
        """Start an engine, ask it for all that it is to measure, and end it."""
        try:
            result = self._start(process)
            for name in visit.asked:
                if name == "conversations":
                    held = process.ask(name, seed=visit.turn)
                    result.setdefault(name, []).append(held)
                elif name != "start":
                    result[name] = process.ask(name)
                result.setdefault("counted", {}).update(process.counted)
                self._keep(visit.label(name))
        except EngineError as error:
            self._fail(error)
        process.close()

    def _measure_pairs(self) -> None:
        """Have two engines compute the same new prompts by turns, each as often first."""
        both = [self._spawn(self._settings[name]) for name in ("off", OURS)]
        ratios: list[float] = []
        try:
            for process in both:
                self._start(process)
                process.ask("turn", seed=0)
            for seed in range(1, 1 + self._shape.pairs):
                order = both if seed % 2 else both[::-1]
                rates = {process.connector: process.ask("turn", seed=seed) for process in order}
                ratios.append(rates[OURS] / rates["off"])
                progress(f"pair {seed}: {OURS} / off = {ratios[-1]:.4f}")
                if len(ratios) > 1:
                    self.pairs = ratio_interval(ratios)
                    self._keep()
            self._keep("pairs")
        except EngineError as error:
            self._fail(error)
        for process in both:
            process.close()
