"""A real engine without offloading, with this project, and with vLLM's own connectors.

usage: python -m bench.bench_serving [--shape small|gqa8|mqa] [--out FOLDER]
                                     [--connectors off,kv-offload,vllm,vllm-simple]
                                     [--sections ttft,throughput,latency,pairs,start]
                                     [--separate-core] [--options JSON]

Every connector gets an engine in a process of its own: the same shape with random weights, the same
prompts, the same GPU cache, as much host memory. docs/performance.md explains every figure.

    ttft        time to first token of prompts that are computed, and of the same prompts repeated
    throughput  many prompts at once at 0, 50 and 100 % hits
    latency     inter-token latency of running decodes: alone, beside prompts computed and loaded
    pairs       throughput at 0 % hits of `off` and `kv-offload`, by turns, with its 95 % interval
    start       engines started five times more, by turns, now that all is compiled; not in the
                default

The exit status is 1 if this project or the engine without offloading failed, or if this project
did not load exactly the bytes that it had to.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.serving_report import save, tables, unproven
from bench.serving_shapes import CONNECTORS, SHAPES
from bench.serving_stats import ratio_interval
from bench.swap_rows import machine, vllm_module

SECTIONS = ("ttft", "throughput", "latency", "pairs", "start")
STARTS = 5
ANSWER_SECONDS = 300
"""Longest wait for an engine's start or for one section; a stuck engine is ended."""
_BEGAN = time.monotonic()


class ChildError(RuntimeError):
    """An engine could not be started, or ended, or did not answer in time."""


def progress(text: str) -> None:
    print(f"[{time.monotonic() - _BEGAN:5.0f} s] {text}", file=sys.stderr, flush=True)


class Child:
    """A process for one engine; it imports vLLM at once, and starts the engine when asked to."""

    def __init__(
        self, shape: str, connector: str, separate_core: bool, options: Any, model: str
    ) -> None:
        self.connector = connector
        self.counted: dict[str, dict[str, float]] = {}
        """What the connector counted in each section, of this project only."""
        arguments = {
            "shape": shape,
            "connector": connector,
            "separate_core": separate_core,
            "options": options,
            "model": model,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.serving_child", json.dumps(arguments)],
            env={"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", **os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that `kill` reaches an engine core of its own
        )

    def start(self) -> float:
        """Start the engine; return the seconds that took."""
        progress(f"{self.connector}: starting an engine")
        return float(self.ask("start"))

    def ask(self, name: str, **more: Any) -> Any:
        """Have one section measured."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps({"do": name, **more}) + "\n")
            self._process.stdin.flush()
        return self._answer(name)

    def close(self) -> None:
        """Let the engine end by itself, or end it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self, name: str) -> Any:
        from bench.serving_child import ANSWER

        assert self._process.stdout is not None
        timer = threading.Timer(ANSWER_SECONDS, self._kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if not line.startswith(ANSWER):
                    print(line, end="", file=sys.stderr)
                    continue
                answer = json.loads(line.removeprefix(ANSWER))
                if "error" in answer:
                    raise ChildError(f"{self.connector}, {name}: {answer['error']}")
                if name != "turn":
                    progress(f"{self.connector}: {name} took {answer['took']:.1f} s")
                    if answer.get("counted"):
                        self.counted[name] = answer["counted"]
                return answer["value"]
        finally:
            timer.cancel()
        status = self._process.wait()
        raise ChildError(
            f"{self.connector}, {name}: no answer within {ANSWER_SECONDS} s, exit status {status}"
        )


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
            "machine": machine() | {"vllm": vllm_module().__version__},
            "mode": "separate core" if arguments.separate_core else "one process",
            "sections": arguments.sections,
            "options": arguments.options,
            "shape": {"name": arguments.shape, **asdict(SHAPES[arguments.shape])},
            "results": self.results,
            "pairs": self.pairs,
        }

    def _keep(self) -> None:
        """Write what is known so far: a run takes minutes, and may be cut short."""
        if self._arguments.out:
            save(self.document(), self._arguments.out)

    def spawn(self, connector: str) -> Child:
        """Make the process of an engine that is to be started later."""
        arguments = self._arguments
        return Child(
            arguments.shape,
            connector,
            arguments.separate_core,
            arguments.options,
            self._model,
        )

    @contextlib.contextmanager
    def engine(self, child: Child) -> Iterator[Child | None]:
        """Start an engine, note how long that took, and end it; an error is noted instead."""
        result = self.results.setdefault(child.connector, {"starts": []})
        started = False
        try:
            result["starts"].append(child.start())
            started = True
            yield child
        except ChildError as error:
            progress(str(error))
            result["error"] = str(error)
            if not started:
                yield None
        finally:
            child.close()

    def measure(self, child: Child) -> None:
        """Run the sections that need one engine."""
        result = self.results[child.connector]
        chosen = self._arguments.sections
        if child.connector == "off" and "ttft" in chosen:
            result["link"] = child.ask("link")
        for section in ("ttft", "throughput", "latency"):
            if section in chosen:
                result[section] = child.ask(section)
        result["memory"] = child.ask("memory")
        result["counted"] = child.counted
        self._keep()

    def measure_pairs(self, off: Child, ours: Child) -> None:
        """Have both engines compute the same new prompts by turns, each as often first."""
        ratios = []
        for child in (off, ours):
            child.ask("turn", seed=0)
        for seed in range(1, 1 + SHAPES[self._arguments.shape].pairs):
            order = (off, ours) if seed % 2 else (ours, off)
            rates = {child.connector: child.ask("turn", seed=seed) for child in order}
            ratios.append(rates["kv-offload"] / rates["off"])
            progress(f"pair {seed}: kv-offload / off = {ratios[-1]:.4f}")
        self.pairs = ratio_interval(ratios)
        self._keep()

    def measure_starts(self, connectors: Sequence[str]) -> None:
        """Start every engine again, by turns; its process is made while the one before it runs."""
        order = list(connectors) * STARTS
        ahead = [self.spawn(order.pop(0))]
        while ahead:
            child = ahead.pop()
            if order:
                ahead.append(self.spawn(order.pop(0)))
            with self.engine(child):
                self._keep()

    def run(self, connectors: Sequence[str]) -> None:
        """Measure every connector; `off` waits for its turns beside `kv-offload`."""
        rest = list(connectors)
        chosen = self._arguments.sections
        if "pairs" in chosen and {"off", "kv-offload"} <= set(connectors):
            rest = [name for name in connectors if name not in ("off", "kv-offload")]
            with self.engine(self.spawn("off")) as off:
                if off is not None:
                    self.measure(off)
                with self.engine(self.spawn("kv-offload")) as ours:
                    if ours is not None:
                        self.measure(ours)
                    if off is not None and ours is not None:
                        self.measure_pairs(off, ours)
        for connector in rest:
            with self.engine(self.spawn(connector)) as child:
                if child is not None:
                    self.measure(child)
        if "start" in chosen:
            self.measure_starts(connectors)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )

    def names(allowed: Sequence[str]) -> Any:
        def split(text: str) -> list[str]:
            chosen = text.split(",")
            if unknown := set(chosen) - set(allowed):
                raise argparse.ArgumentTypeError(
                    f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(allowed)}"
                )
            return chosen

        return split

    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--connectors", type=names(CONNECTORS), default=["off", "kv-offload"])
    parser.add_argument("--sections", type=names(SECTIONS), default=list(SECTIONS[:-1]))
    parser.add_argument("--separate-core", action="store_true", help="ttft and throughput only")
    parser.add_argument("--options", type=json.loads, default={}, help="for this project, as JSON")
    parser.add_argument("--out", type=Path, help="folder for results as JSON, Markdown and PNG")
    arguments = parser.parse_args(words)
    if arguments.separate_core:
        chosen = [s for s in arguments.sections if s in ("ttft", "throughput", "start")]
        arguments.sections = chosen
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and return the exit status."""
    arguments = parse(words)
    with tempfile.TemporaryDirectory() as model:
        bench = Bench(arguments, model)
        bench.run(arguments.connectors)
    document = bench.document()
    print(tables(document))
    if arguments.out:
        for path in save(document, arguments.out):
            progress(f"wrote {path}")
    problems = unproven(document)
    problems += [
        bench.results[name]["error"]
        for name in ("off", "kv-offload")
        if "error" in bench.results.get(name, {})
    ]
    for problem in problems:
        progress(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
