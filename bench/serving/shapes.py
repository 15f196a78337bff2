"""What the serving bench runs: the shapes of models with their load, and the connectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GIB = 1 << 30
CONNECTORS = ("off", "kv-offload", "vllm", "vllm-simple")
"""No offloading; this project; vLLM's `OffloadingConnector`; vLLM's `SimpleCPUOffloadConnector`."""
LIMIT = "limit"
"""No offloading, and a GPU cache for everything that conversations ever use again."""
SERVER_STEP_TOKENS = 8192
"""What `vllm serve` computes in a step at most, by default on a GPU with 70 GiB or more. An engine
in one process computes twice as many."""


@dataclass(frozen=True)
class Conversations:
    """Users who come back: `count` conversations of `turns` questions, `at_once` open at a time.

    Each begins with the same `system_tokens` and a history of its own, of a random length within
    `history_tokens`. Each turn adds `new_tokens` and is answered with `answer_tokens`.
    """

    count: int
    turns: int
    at_once: int
    system_tokens: int
    history_tokens: tuple[int, int]
    new_tokens: int
    answer_tokens: int

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest conversation at its end."""
        turn = self.new_tokens + self.answer_tokens
        return self.system_tokens + self.history_tokens[1] + self.turns * turn


@dataclass(frozen=True)
class Shape:
    """A model's shape, the caches, and the load that is put on them."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    intermediate: int
    block_tokens: int
    gpu_blocks: int
    host_gib: float
    prompt_tokens: tuple[int, ...]
    """Lengths of the prompts whose time to first token is taken."""
    repeats: int
    batch_prompts: int
    batch_tokens: int
    """Throughput: so many prompts at once, of so many tokens each."""
    pair_prompts: int
    pairs: int
    """Turns of both engines, with so many prompts of `batch_tokens` each."""
    decodes: int
    decode_prompt_tokens: int
    decode_steps: int
    """Inter-token latency: so many running requests, watched alone for so many steps."""
    other_prompts: int
    other_tokens: int
    steps_between: int
    """Prompts that others send meanwhile, one every so many steps."""
    conversations: Conversations

    def cache_blocks(self, connector: str) -> int:
        """Blocks of the GPU's cache: `gpu_blocks`, or of the limit as many as are ever used."""
        if connector != LIMIT:
            return self.gpu_blocks
        system = self.conversations.system_tokens
        own_blocks = (self.conversations.most_tokens - system) // self.block_tokens + 2
        return self.conversations.count * own_blocks + system // self.block_tokens + 64

    @property
    def host_bytes(self) -> int:
        """Host memory that every connector is asked to use."""
        return int(self.host_gib * GIB)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        decoded = self.decode_prompt_tokens + 64 * self.other_prompts * self.steps_between
        longest = max(*self.prompt_tokens, self.batch_tokens, self.conversations.most_tokens)
        return max(longest, decoded) + self.block_tokens

    def block_bytes(self, item_bytes: int) -> int:
        """Bytes of a block over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.block_tokens * item_bytes

    def loadable_bytes(self, tokens: int, item_bytes: int) -> tuple[int, int]:
        """Least and most bytes of a prompt that a cache must serve: its full blocks.

        Where they hold all tokens, the last block may be computed: one token must be in any case.
        """
        block_bytes = self.block_bytes(item_bytes)
        least, most = (tokens - 1) // self.block_tokens, tokens // self.block_tokens
        return least * block_bytes, most * block_bytes


_ON_GPU: dict[str, Any] = {
    "layers": 32,
    "head_size": 128,
    "block_tokens": 16,
    "gpu_blocks": 6000,
    "prompt_tokens": (1024, 4096, 16384, 32768),
    "repeats": 5,
    "batch_prompts": 48,
    "batch_tokens": 8192,
    "pairs": 16,
    "decodes": 16,
    "decode_prompt_tokens": 512,
    "decode_steps": 300,
    "other_prompts": 48,
    "other_tokens": 4096,
    "steps_between": 4,
    "conversations": Conversations(
        count=48,
        turns=6,
        at_once=16,
        system_tokens=1024,
        history_tokens=(1000, 4000),
        new_tokens=700,
        answer_tokens=64,
    ),
}
SHAPES = {
    "small": Shape(
        layers=2,
        heads=4,
        kv_heads=2,
        head_size=32,
        hidden=128,
        intermediate=256,
        block_tokens=32,
        gpu_blocks=600,
        host_gib=0.25,
        prompt_tokens=(256, 1024),
        repeats=3,
        batch_prompts=4,
        batch_tokens=512,
        pair_prompts=2,
        pairs=3,
        decodes=4,
        decode_prompt_tokens=64,
        decode_steps=24,
        other_prompts=6,
        other_tokens=256,
        steps_between=4,
        conversations=Conversations(
            count=32,
            turns=3,
            at_once=4,
            system_tokens=64,
            history_tokens=(256, 1024),
            new_tokens=96,
            answer_tokens=8,
        ),
    ),
    # 50 GiB: the 48 prompts of 8,192 tokens are 48 GiB, and what was stored before goes first.
    "gqa8": Shape(
        heads=32,
        kv_heads=8,
        hidden=4096,
        intermediate=14336,
        host_gib=50,
        pair_prompts=12,
        **_ON_GPU,
    ),
    # A model of 2 billion parameters: steps are short, so the host's work weighs more.
    "mqa": Shape(
        heads=16,
        kv_heads=1,
        hidden=2048,
        intermediate=8192,
        host_gib=8,
        pair_prompts=48,
        **_ON_GPU,
    ),
}


def transfer_config(
    connector: str, host_bytes: int, options: dict[str, Any]
) -> dict[str, Any] | None:
    """Return vLLM's `kv_transfer_config` for one of `CONNECTORS`; `options` are for ours."""
    if connector in ("off", LIMIT):
        return None
    if connector == "kv-offload":
        return {
            "kv_connector": "CountedConnector",
            "kv_connector_module_path": "bench.serving.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes": host_bytes, **options},
        }
    names = {"vllm": "OffloadingConnector", "vllm-simple": "SimpleCPUOffloadConnector"}
    return {
        "kv_connector": names[connector],
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": host_bytes},
    }
