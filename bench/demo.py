"""Demonstrates the plugin: prompts with shared prefixes, computed once, then loaded.

`make demo` installs the requirements and runs it. Several engines answer the same prompts, one
engine and one prompt at a time:

    without the plugin   computed, then again from the engine's own prefix cache
    with the plugin      computed, then again from host memory: the engine's own cache was reset
    started again        from the disk: host memory is empty after a start
    with a store         computed by one engine; then a second one, in a separate process, loads
                         them from the store, if Mooncake and its system library are installed

Each answer of the other engines is compared with that of the first engine, which computed exactly
the same tokens, so a different token means different KV, not different rounding. All figures are
the engine's own: computed tokens are the prompt tokens that it did not find in a cache
(`RequestOutput.num_cached_tokens`), time to first token is vLLM's `first_token_latency` (from the
arrival of a request to its first token), and the plugin reports the tokens and bytes moved.
Computing takes as long with the plugin as without. If the medians of the two `computed` lines
differ, another program used the cores: compare the fastest. The exit status is 1 if a token
differs, or if nothing was loaded from host memory, the disk or the store.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.demo_engine import (
    ANSWER_TOKENS,
    COMPUTED,
    FROM_DISK,
    FROM_HOST_MEMORY,
    FROM_PREFIX_CACHE,
    FROM_STORE,
    GROUPS,
    HOST_CACHE,
    OWN_TOKENS,
    PROMPTS_PER_GROUP,
    SHARED_TOKENS,
    Engine,
    Phase,
    Prompt,
    make_prompts,
    megabytes,
)
from bench.demo_store import share
from bench.environment import say
from tests.support.mooncake import missing
from tests.support.small_models import write_model

HAS_DISK = importlib.util.find_spec("xxhash") is not None
"""True if xxhash, which a disk needs, is installed; on some hosts nothing can be installed."""


def table(phases: Sequence[Phase]) -> str:
    """Return one line per phase, the first column aligned left, the others right."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in phases[0].row():
        shown.add_column(name, justify="right" if shown.columns else "left")
    for phase in phases:
        shown.add_row(*phase.row().values())
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def verdict(base: Sequence[Phase], plugin: Sequence[Phase]) -> tuple[int, str]:
    """Return the exit status and the line that reports whether the tokens are the same.

    Computed answers are compared with computed ones, the others with those of the prefix cache.
    """
    computed, cached = (phase.answers for phase in base)
    pairs = [
        (want, got)
        for phase in plugin
        for want, got in zip(
            computed if phase.source == COMPUTED else cached, phase.answers, strict=True
        )
    ]
    different = sum(want != got for want, got in pairs)
    if different:
        return 1, (
            f"tokens: DIFFERENT from the engine without the plugin in {different} of "
            f"{len(pairs)} answers"
        )
    same = f"tokens: identical to the engine without the plugin in all {len(pairs)} answers"
    again = [phase for phase in plugin if phase.source != COMPUTED]
    if not all(phase.host_tokens and phase.moved["loaded_bytes"] for phase in again):
        return 1, f"{same}, but NOTHING was loaded from host memory"
    for phase in again:
        if phase.source in (FROM_DISK, FROM_STORE) and not phase.moved["promoted_slots"]:
            return 1, f"{same}, but NOTHING was read {phase.source}"
    return 0, same


def run(model: Path, dtype: str, prompts: list[Prompt]) -> tuple[list[Phase], list[Phase]]:
    """Answer the prompts twice without and with the plugin, then from a disk and from a store."""
    from tests.support.totals import counted_stats

    base: list[Phase] = []
    plugin: list[Phase] = []
    with tempfile.TemporaryDirectory() as folder:
        disk = {"disk": {"path": folder, "bytes": HOST_CACHE}} if HAS_DISK else {}
        for phases, options, source in (
            (base, None, FROM_PREFIX_CACHE),
            (plugin, disk, FROM_HOST_MEMORY),
        ):
            name = f"{'without' if options is None else 'with'} the plugin"
            say(f"starting the engine {name}")
            with counted_stats() as totals:
                engine = Engine(model, dtype, totals, options)
                say("warming it up")
                engine.warm_up()
                say(f"answering {len(prompts)} prompts: {COMPUTED}")
                reset = options is not None
                phases.append(engine.answer(name, COMPUTED, prompts, reset=reset))
                say(f"answering them again: {source}")
                phases.append(engine.answer(name, source, prompts))
                engine.rest()
                engine.close()
        if disk:
            say("starting the engine with the plugin again")
            with counted_stats() as totals:
                engine = Engine(model, dtype, totals, disk)
                say(f"answering them again: {FROM_DISK}")
                plugin.append(engine.answer("started again", FROM_DISK, prompts))
                engine.close()
    if (reason := missing()) is None:
        plugin += share(model, dtype, prompts)
    else:
        say(f"no store is shown: {reason}")
    return base, plugin


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    parser = argparse.ArgumentParser(description="Show what kv-offload does, in two minutes.")
    parser.add_argument(
        "--models", type=Path, default=Path(".venv/models"), help="folder for the small model"
    )
    parser.add_argument("--verbose", action="store_true", help="show vLLM's log and tracebacks")
    options = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if options.verbose else "ERROR")
    # One process, so that no second one has to start, and the counters can be read.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not options.verbose:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    if not entry_points(group="vllm.general_plugins", name="kv_offload"):
        print(
            f"{sys.executable} has no vLLM plugin called kv_offload: install this project for it, "
            "or run make demo, which does",
            file=sys.stderr,
        )
        return 1
    say("importing vLLM")
    try:
        import torch
        import transformers
        import vllm

        if not options.verbose:
            transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        cuda = torch.cuda.is_available()
        dtype = "bfloat16" if cuda else "float32"
        device = torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores"
        model = write_model("qwen3", options.models / f"qwen3-{dtype}", dtype)
        prompts = make_prompts()
        say(
            f"vLLM {vllm.__version__} on {device}; model {model} "
            f"({megabytes((model / 'model.safetensors').stat().st_size)}, random weights, {dtype})"
        )
        say(
            f"{GROUPS} groups of {PROMPTS_PER_GROUP} prompts: {SHARED_TOKENS} shared tokens and "
            f"{OWN_TOKENS[0]} to {OWN_TOKENS[1]} of its own each; {ANSWER_TOKENS} tokens answered"
        )
        base, plugin = run(model, dtype, prompts)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if options.verbose:
            raise
        print(f"the demo failed: {type(error).__name__}: {error}", file=sys.stderr)
        print("run it with --verbose for the engine's log", file=sys.stderr)
        return 1
    say("done")
    print(table([*base, *plugin]))
    print(
        "The engine with the plugin dropped its own prefix cache before the prompts were repeated. "
        "On a busy server\nother prompts evict them, and vLLM alone computes them again:"
    )
    computed = base[0].first_token_ms
    print(f"TTFT: {computed:.0f} ms computed without the plugin")
    for phase in plugin:
        if phase.source != COMPUTED:
            took = phase.first_token_ms
            times, word = (
                (computed / took, "faster") if took <= computed else (took / computed, "slower")
            )
            print(f"      {took:.0f} ms {phase.source} ({times:.1f} times {word})")
    if cuda:
        print("(a GPU computes this small model too fast; python -m bench.serving has real sizes)")
    status, line = verdict(base, plugin)
    print(line)
    return status


if __name__ == "__main__":
    sys.exit(main())
