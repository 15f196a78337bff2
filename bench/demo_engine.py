"""An engine of the demo, its prompts, and the figures of a phase."""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.small_models import VOCABULARY

CONNECTOR = "KVOffloadConnector"
GROUPS, PROMPTS_PER_GROUP = 4, 3
SHARED_TOKENS, OWN_TOKENS = 1024, (1500, 2500)
ANSWER_TOKENS = 16
KV_CACHE_BYTES = 64 << 20
HOST_CACHE = "256MiB"

Prompt = list[int]


COMPUTED, FROM_PREFIX_CACHE = "computed", "from prefix cache"
FROM_HOST_MEMORY, FROM_DISK, FROM_STORE = "from host memory", "from the disk", "from the store"


@dataclass(frozen=True)
class Phase:
    """All prompts, answered once. `moved` is empty for an engine without the plugin."""

    engine: str
    source: str
    """`COMPUTED`, or where most of the KV was loaded from."""
    answers: list[list[int]]
    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: list[float]
    moved: dict[str, int] = field(default_factory=dict)

    @property
    def host_tokens(self) -> int:
        """Tokens whose KV was loaded from host memory."""
        return self.moved.get("hit_tokens", 0)

    def row(self) -> dict[str, str]:
        """Return this phase's line of the table, by the header of its columns."""
        moved, moved_shown = self.moved, ("-",) * 4
        if moved:
            looked_up = moved["lookup_tokens"]
            moved_shown = (
                str(self.host_tokens),
                megabytes(moved["stored_bytes"]),
                megabytes(moved["loaded_bytes"]),
                f"{self.host_tokens / looked_up:.1%}" if looked_up else "-",
            )
        names = ("from host\nmemory", "bytes\nstored", "bytes\nloaded", "host\nhit rate")
        return {
            "phase": f"{self.engine}, {self.source}",
            "prompts": str(len(self.answers)),
            "prompt\ntokens": str(self.prompt_tokens),
            "tokens\ncomputed": str(self.prompt_tokens - self.cached_tokens),
            "from prefix\ncache": str(self.cached_tokens - self.host_tokens),
            **dict(zip(names, moved_shown, strict=True)),
            "first token\n(median)": f"{self.first_token_ms:.0f} ms",
            "first token\n(fastest)": f"{min(self.first_token_seconds) * 1e3:.0f} ms",
        }

    @property
    def first_token_ms(self) -> float:
        """The median time to first token, in milliseconds."""
        return statistics.median(self.first_token_seconds) * 1e3


def megabytes(size_bytes: int) -> str:
    """Return a size for the table."""
    return f"{size_bytes / 1e6:.2f} MB"


def make_prompts(seed: int = 0) -> list[Prompt]:
    """Return groups of prompts; each prompt is its group's prefix plus unique tokens."""
    rng = random.Random(seed)

    def tokens(count: int) -> Prompt:
        return [rng.randrange(10, VOCABULARY) for _ in range(count)]

    prompts = []
    for _ in range(GROUPS):
        shared = tokens(SHARED_TOKENS)
        prompts += [shared + tokens(rng.randint(*OWN_TOKENS)) for _ in range(PROMPTS_PER_GROUP)]
    return prompts


class Engine:
    """One vLLM engine in this process, with or without the plugin."""

    def __init__(
        self,
        model: Path,
        dtype: str,
        totals: Mapping[str, float],
        plugin: dict[str, Any] | None = None,
    ) -> None:
        import torch
        from vllm import LLM

        options: dict[str, Any] = {}
        if torch.cuda.is_available():
            # Only checked, not allocated, because the size of the KV cache is given.
            options |= {"block_size": 16, "gpu_memory_utilization": 0.5}
        else:
            options |= {"block_size": 32}
        if plugin is not None:
            # As for a user, vLLM finds it by name, through the entry point that pip installed.
            options["kv_transfer_config"] = {
                "kv_connector": CONNECTOR,
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes": HOST_CACHE, **plugin},
            }
        self._plugin, self._totals = plugin is not None, totals
        self.llm = LLM(
            model=str(model),
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,  # compiling would take longer than everything else here
            max_model_len=SHARED_TOKENS + OWN_TOKENS[1] + ANSWER_TOKENS,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            use_tqdm_on_load=False,
            disable_log_stats=False,  # keeps the latencies that the table shows
            **options,
        )

    def warm_up(self) -> None:
        """Compute and reuse a separate prompt, because the first call of every path is slow."""
        prompt = make_prompts(seed=1)[:1]
        self._generate(prompt, ANSWER_TOKENS)
        self.reset_prefix_cache()
        self._generate(prompt, ANSWER_TOKENS)
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Empty the engine's own prefix cache."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("reset_prefix_cache() returned False: blocks are still in use")

    def answer(
        self, engine: str, source: str, prompts: Sequence[Prompt], *, reset: bool = True
    ) -> Phase:
        """Answer the prompts one at a time; with `reset`, then empty the engine's own cache.

        A reset also waits for running stores.
        """
        before = self._moved()
        outputs = self._generate(prompts, ANSWER_TOKENS)
        if reset:
            self.reset_prefix_cache()
        return Phase(
            engine,
            source,
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
        """Return the plugin's counters, including everything that has happened so far.

        Steps report counters, and the last stores end after the last step. So this runs another
        step, with a request too short to be cached or looked up.
        """
        if not self._plugin:
            return {}
        self._generate([[1, 2, 3]], 1, skip_reading_prefix_cache=True)
        names = ("lookup_tokens", "hit_tokens", "stored_bytes", "loaded_bytes", "promoted_slots")
        return {name: int(self._totals.get(name, 0)) for name in names}

    def rest(self) -> None:
        """Step until the plugin has nothing left to write, as a server's engine does by itself."""
        core = self.llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests():
            core.step_fn()

    def close(self) -> None:
        """Shut down the engine and free its memory."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
