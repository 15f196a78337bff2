"""The plugin on real input: prompts with shared prefixes, computed once, then loaded from the host.

`make demo` installs what this needs and runs it. Two engines answer the same prompts, one after the
other and one prompt at a time:

    without the plugin   computed, then again from the engine's own prefix cache
    with the plugin      computed, then again from host memory: the engine's own cache was reset

Each answer of the second engine is compared with its counterpart of the first, which computed
exactly the same tokens, so a different token means different KV and not another rounding. Every
figure is the engine's own: computed tokens are those of the prompt that it did not find in a cache
(`RequestOutput.num_cached_tokens`), the time to the first token is vLLM's `first_token_latency`
(from the arrival of a request to its first token), and tokens and bytes moved are what the plugin
reports to the engine. The exit status is 1 if a token differs or nothing came from host memory.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from tests.support.small_models import VOCABULARY, write_model

CONNECTOR = "KVOffloadConnector"
GROUPS, PROMPTS_PER_GROUP = 4, 3
SHARED_TOKENS, OWN_TOKENS = 1024, (1500, 2500)
ANSWER_TOKENS = 16
KV_CACHE_BYTES = 64 << 20
HOST_CACHE = "256MiB"

Prompt = list[int]
_START = time.monotonic()


@dataclass(frozen=True)
class Phase:
    """All prompts, answered once. `moved` is empty for an engine without the plugin."""

    name: str
    answers: list[list[int]]
    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: list[float]
    moved: dict[str, int] = field(default_factory=dict)

    @property
    def host_tokens(self) -> int:
        """Tokens whose KV was loaded from host memory."""
        return self.moved.get("hit_tokens", 0)

    def row(self) -> list[str]:
        """Return this phase's line of the table."""
        looked_up = self.moved.get("lookup_tokens", 0)
        return [
            self.name,
            str(len(self.answers)),
            str(self.prompt_tokens),
            str(self.prompt_tokens - self.cached_tokens),
            str(self.cached_tokens - self.host_tokens),
            *(
                (
                    str(self.host_tokens),
                    megabytes(self.moved["stored_bytes"]),
                    megabytes(self.moved["loaded_bytes"]),
                    f"{self.host_tokens / looked_up:.1%}" if looked_up else "-",
                )
                if self.moved
                else ("-",) * 4
            ),
            f"{self.first_token_ms:.0f} ms",
        ]

    @property
    def first_token_ms(self) -> float:
        """The median time to first token, in milliseconds."""
        return statistics.median(self.first_token_seconds) * 1e3


HEADER = (
    ("phase", ""),
    ("prompts", ""),
    ("prompt", "tokens"),
    ("tokens", "computed"),
    ("from prefix", "cache"),
    ("from host", "memory"),
    ("bytes", "stored"),
    ("bytes", "loaded"),
    ("host", "hit rate"),
    ("first token", "(median)"),
)


def megabytes(size_bytes: int) -> str:
    """Return a size for the table."""
    return f"{size_bytes / 1e6:.2f} MB"


def table(phases: Sequence[Phase]) -> str:
    """Return one line per phase under a header of two lines, first column left, others right."""
    lines = [[name for name, _ in HEADER], [more for _, more in HEADER]]
    lines += [phase.row() for phase in phases]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    shown = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([*shown[:2], "-" * len(shown[0]), *shown[2:]])


def verdict(base: Sequence[Phase], plugin: Sequence[Phase]) -> tuple[int, str]:
    """Return the exit status and the line that says whether the tokens are the same."""
    pairs = [
        (want, got)
        for without, with_plugin in zip(base, plugin, strict=True)
        for want, got in zip(without.answers, with_plugin.answers, strict=True)
    ]
    different = sum(want != got for want, got in pairs)
    if different:
        return 1, (
            f"tokens: DIFFERENT from the engine without the plugin in {different} of "
            f"{len(pairs)} answers"
        )
    same = f"tokens: identical to the engine without the plugin in all {len(pairs)} answers"
    if not plugin[-1].host_tokens or not plugin[-1].moved["loaded_bytes"]:
        return 1, f"{same}, but NOTHING was loaded from host memory"
    return 0, same


def say(message: str) -> None:
    """Print a line of progress with the seconds since the start."""
    print(f"[{time.monotonic() - _START:5.1f} s] {message}", flush=True)


def make_prompts(seed: int = 0) -> list[Prompt]:
    """Return groups of prompts: the tokens of a group's prefix, then a prompt's own."""
    rng = random.Random(seed)

    def tokens(count: int) -> Prompt:
        return [rng.randrange(10, VOCABULARY) for _ in range(count)]

    prompts = []
    for _ in range(GROUPS):
        shared = tokens(SHARED_TOKENS)
        prompts += [shared + tokens(rng.randint(*OWN_TOKENS)) for _ in range(PROMPTS_PER_GROUP)]
    return prompts


class Engine:
    """One vLLM engine in this process, with the plugin or without it."""

    def __init__(
        self, model: Path, dtype: str, totals: Mapping[str, float], *, plugin: bool
    ) -> None:
        import torch
        from vllm import LLM

        options: dict[str, Any] = {}
        if torch.cuda.is_available():
            # Only checked, not taken: the size of the KV cache is given.
            options |= {"block_size": 16, "gpu_memory_utilization": 0.5}
        else:
            options |= {"block_size": 32}
        if plugin:
            # As a user gives it: found by name, through the entry point that pip installed.
            options["kv_transfer_config"] = {
                "kv_connector": CONNECTOR,
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes": HOST_CACHE},
            }
        self._plugin, self._totals = plugin, totals
        self.llm = LLM(
            model=str(model),
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,  # compiling would take longer than everything else here
            max_model_len=SHARED_TOKENS + OWN_TOKENS[1] + ANSWER_TOKENS,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            use_tqdm_on_load=False,
            disable_log_stats=False,  # keeps the latencies that are shown
            **options,
        )

    def warm_up(self) -> None:
        """Compute and reuse a prompt of its own: first calls are slower, on every path."""
        prompt = make_prompts(seed=1)[:1]
        self._generate(prompt, ANSWER_TOKENS)
        self.reset_prefix_cache()
        self._generate(prompt, ANSWER_TOKENS)
        self.reset_prefix_cache(reset_connector=self._plugin)

    def reset_prefix_cache(self, reset_connector: bool = False) -> None:
        """Forget the engine's own cache, and with `reset_connector` host memory too."""
        if not self.llm.reset_prefix_cache(reset_connector=reset_connector):
            raise RuntimeError("reset_prefix_cache() returned False: blocks are still in use")

    def answer(self, name: str, prompts: Sequence[Prompt], *, reset: bool) -> Phase:
        """Answer the prompts one at a time; `reset` empties the engine's own cache then.

        A reset also waits for the stores that still run.
        """
        before = self._moved()
        outputs = self._generate(prompts, ANSWER_TOKENS)
        if reset:
            self.reset_prefix_cache()
        return Phase(
            name,
            [list(output.outputs[0].token_ids) for output in outputs],
            sum(len(prompt) for prompt in prompts),
            sum(output.num_cached_tokens or 0 for output in outputs),
            [output.metrics.first_token_latency for output in outputs],
            {key: value - before[key] for key, value in self._moved().items()},
        )

    def _generate(self, prompts: Sequence[Prompt], answer_tokens: int, **more: Any) -> list[Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False, **more
        )
        return [
            self.llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0]
            for prompt in prompts
        ]

    def _moved(self) -> dict[str, int]:
        """Return the plugin's counters, all that happened until now included.

        Counters are reported in steps, and the last stores end after the last step: a request that
        is too short to be cached, and not looked up, is one more step.
        """
        if not self._plugin:
            return {}
        self._generate([[1, 2, 3]], 1, skip_reading_prefix_cache=True)
        names = ("lookup_tokens", "hit_tokens", "stored_bytes", "loaded_bytes")
        return {name: int(self._totals.get(name, 0)) for name in names}

    def close(self) -> None:
        """End the engine and give its memory back."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def run(model: Path, dtype: str, prompts: list[Prompt]) -> tuple[list[Phase], list[Phase]]:
    """Answer the prompts twice with each engine."""
    from tests.support.totals import counted_stats

    phases = []
    for plugin, again in ((False, "prefix cache"), (True, "host memory")):
        with_plugin = f"{'with' if plugin else 'without'} the plugin"
        say(f"starting the engine {with_plugin}")
        with counted_stats() as totals:
            engine = Engine(model, dtype, totals, plugin=plugin)
            say("warming it up")
            engine.warm_up()
            say(f"answering {len(prompts)} prompts: computed")
            first = engine.answer(f"{with_plugin}, computed", prompts, reset=plugin)
            say(f"answering them again: from {again}")
            second = engine.answer(f"{with_plugin}, from {again}", prompts, reset=True)
            phases.append([first, second])
            engine.close()
    return phases[0], phases[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    parser = argparse.ArgumentParser(description="Show what kv-offload does, in under a minute.")
    parser.add_argument(
        "--models", type=Path, default=Path(".venv/models"), help="folder for the small model"
    )
    parser.add_argument("--verbose", action="store_true", help="show vLLM's log and tracebacks")
    options = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if options.verbose else "ERROR")
    # One process: no waiting for a second one to start, and the counters can be read.
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
    print(f"\n{table([*base, *plugin])}\n")
    print(
        "The engine with the plugin forgot its own prefix cache before the prompts came again. On "
        "a busy server\nother prompts push them out. Then vLLM alone computes them again:"
    )
    computed, loaded = base[0].first_token_ms, plugin[-1].first_token_ms
    print(
        f"first token: {loaded:.0f} ms from host memory, {computed:.0f} ms computed without the "
        f"plugin ({computed / loaded:.1f} times)"
    )
    if cuda:
        print("(a GPU computes this small model too fast; python -m bench.serving has real sizes)")
    status, line = verdict(base, plugin)
    print(line)
    return status


if __name__ == "__main__":
    sys.exit(main())
