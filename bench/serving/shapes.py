"""The shapes of models in the serving benchmark, with the load on them."""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 1 << 30


@dataclass(frozen=True)
class Shape:
    """A model's shape, the caches, and the load."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    intermediate: int
    block_tokens: int
    gpu_blocks: int
    host_gib: float
    """Host memory of every connector, in GiB."""
    prompt_tokens: tuple[int, ...]
    """Lengths, in tokens, of the prompts whose time to first token is measured."""
    repeats: int
    """Number of prompts of each length."""
    old_prompts: int
    """Number of prompts of `batch_tokens` tokens that are sent twice before the batch."""
    batch_prompts: int
    batch_tokens: int
    """Throughput: number of simultaneous prompts, and tokens of each."""
    decodes: int
    decode_prompt_tokens: int
    decode_steps: int
    """Inter-token latency: number of running requests, and steps measured without others."""
    other_prompts: int
    other_tokens: int
    steps_between: int
    """Prompts that arrive meanwhile, and the number of steps between two of them."""

    @property
    def host_bytes(self) -> int:
        """Host memory in bytes."""
        return int(self.host_gib * GIB)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        decoded = self.decode_prompt_tokens + 64 * self.other_prompts * self.steps_between
        return max(*self.prompt_tokens, self.batch_tokens, decoded) + self.block_tokens

    @property
    def batch_blocks(self) -> int:
        """Number of blocks in all prompts of the batch."""
        return self.batch_prompts * -(-self.batch_tokens // self.block_tokens)

    def token_bytes(self, item_bytes: int) -> int:
        """Bytes of a token's KV over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_size * item_bytes

    def block_bytes(self, item_bytes: int) -> int:
        """Bytes of a block over all layers."""
        return self.block_tokens * self.token_bytes(item_bytes)

    def loadable_bytes(self, tokens: int, item_bytes: int) -> tuple[int, int]:
        """Return minimum and maximum bytes of a prompt that a cache must serve: its full blocks.

        If these hold all tokens, the last block may be computed: at least one token must be.
        """
        block_bytes = self.block_bytes(item_bytes)
        least, most = (tokens - 1) // self.block_tokens, tokens // self.block_tokens
        return least * block_bytes, most * block_bytes


_GQA8 = Shape(
    layers=32,
    heads=32,
    kv_heads=8,
    head_size=128,
    hidden=4096,
    intermediate=14336,
    block_tokens=16,
    gpu_blocks=6000,
    # The batch takes 48 GiB: all of it fits if the old prompts are evicted.
    host_gib=50,
    prompt_tokens=(1024, 4096, 16384, 32768),
    repeats=4,
    old_prompts=12,
    batch_prompts=48,
    batch_tokens=8192,
    decodes=16,
    decode_prompt_tokens=512,
    decode_steps=300,
    other_prompts=48,
    other_tokens=4096,
    steps_between=4,
)
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
        old_prompts=2,
        batch_prompts=4,
        batch_tokens=512,
        decodes=4,
        decode_prompt_tokens=64,
        decode_steps=24,
        other_prompts=6,
        other_tokens=256,
        steps_between=4,
    ),
    "gqa8": _GQA8,
    # A model of 2 billion parameters: steps are short, so the host's work weighs more.
    "mqa": replace(_GQA8, heads=16, kv_heads=1, hidden=2048, intermediate=8192, host_gib=6.25),
}
