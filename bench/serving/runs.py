"""Plans the order of engines and sections, runs them and collects the results."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from bench.machine import machine
from bench.serving.process import EngineError, EngineProcess, progress
from bench.serving.report import save
from bench.serving.settings import EngineSettings
from bench.serving.shapes import SHAPES

SECTIONS = ("throughput", "ttft", "decodes")


@dataclass(frozen=True)
class Visit:
    """One start of an engine, and the sections to run on it."""

    settings: EngineSettings
    asked: tuple[str, ...]
    round: int

    def label(self, name: str) -> str:
        """Name one answer, for the list of missing ones."""
        return f"{self.settings.column} {name} {self.round + 1}"


def plan(arguments: argparse.Namespace, model: str) -> list[Visit]:
    """Return the visits; every other round has the opposite order of columns."""
    asked = ["pool", *(name for name in SECTIONS if name in arguments.sections), "link"]
    visits = []
    for turn in range(arguments.rounds):
        columns = [one for one in arguments.columns if not turn or one not in arguments.once]
        for column in columns[::-1] if turn % 2 else columns:
            settings = EngineSettings(SHAPES[arguments.shape], column, model)
            visits.append(Visit(settings, tuple(asked), turn))
    return visits


class Bench:
    """Runs sections on engines and collects the results.

    After every answer of an engine, all results go to the file of `--out`, with a list of missing
    answers, because a run takes minutes and a time limit may stop it. `model` is the folder of the
    model's configuration, the same for all engines.
    """

    def __init__(self, arguments: argparse.Namespace, model: str) -> None:
        self._arguments = arguments
        self._visits = plan(arguments, model)
        self._processes: list[EngineProcess] = []
        self.results: dict[str, list[dict[str, Any]]] = {one: [] for one in arguments.columns}
        """Measurements by column, one per round."""
        self.missing = [visit.label(name) for visit in self._visits for name in visit.asked]

    def document(self) -> dict[str, Any]:
        """Return all results so far, with the machine."""
        arguments = self._arguments
        return {
            "machine": machine(),
            "shape": {"name": arguments.shape, **asdict(SHAPES[arguments.shape])},
            "sections": arguments.sections,
            "rounds": arguments.rounds,
            "results": self.results,
            "missing": self.missing,
        }

    def run(self) -> None:
        """Measure every column in every round."""
        try:
            self._keep()
            process = self._spawn(self._visits[0])
            for visit, following in zip(self._visits, [*self._visits[1:], None], strict=True):
                # Importing vLLM takes seconds.
                ahead = self._spawn(following) if following else None
                self._ask(process, visit)
                process = ahead or process
        finally:
            for process in self._processes:
                process.kill()

    def _spawn(self, visit: Visit) -> EngineProcess:
        """Create the process of an engine that will be started later."""
        self._processes.append(EngineProcess(visit.settings))
        return self._processes[-1]

    def _keep(self, label: str = "") -> None:
        """Remove an answer from the list of missing ones, and write all results so far."""
        if label in self.missing:
            self.missing.remove(label)
        if self._arguments.out:
            save(self.document(), self._arguments.out)

    def _ask(self, process: EngineProcess, visit: Visit) -> None:
        """Start an engine, run all its sections, and end it."""
        result: dict[str, Any] = {"round": visit.round + 1}
        self.results[process.column].append(result)
        progress(f"{process.column}: starting an engine, round {visit.round + 1}")
        try:
            result["start_seconds"] = process.ask("start")
            for name in visit.asked:
                result[name] = process.ask(name)
                result["counted"] = process.counted
                self._keep(visit.label(name))
        except EngineError as error:
            progress(str(error))
            result["error"] = str(error)
        process.close()
