"""What the serving bench runs: the shapes of models with the load that is put on them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.support.conversations import Conversations

GIB = 1 << 30


@dataclass(frozen=True)
class Latent:
    """Latent attention: a token leaves one vector in a layer, for all heads and on every rank."""

    lora_rank: int = 512
    rope_size: int = 64

    @property
    def numbers(self) -> int:
        """Numbers of the vector."""
        return self.lora_rank + self.rope_size


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
    """That every connector is asked to use."""
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
    latent: Latent | None = None
    """Of a model with latent attention: then `kv_heads` does not count, and heads are of
    `head_size` but for the rotated part."""
    tensor_parallel: int = 1
    """Ranks that divide the heads between them, each on a device of its own; see `on_ranks`."""

    def on_ranks(self, ranks: int) -> Shape:
        """Return the shape with so many ranks, of one that has a single one.

        With more ranks than KV heads a head is on several of them, and every connector keeps each
        of these copies. So there is host memory for all of them: as much again as one rank has. A
        latent shape, whose copies only some connectors keep, has that much from the start.
        """
        copies = 1 if self.latent else max(1, ranks / self.kv_heads)
        return replace(self, tensor_parallel=ranks, host_gib=self.host_gib * copies)

    @property
    def blocks_ever_used(self) -> int:
        """Blocks of a GPU cache that has room for all of all conversations."""
        system = self.conversations.system_tokens
        own_blocks = (self.conversations.most_tokens - system) // self.block_tokens + 2
        return self.conversations.count * own_blocks + system // self.block_tokens + 64

    @property
    def host_bytes(self) -> int:
        """The same in bytes."""
        return int(self.host_gib * GIB)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        decoded = self.decode_prompt_tokens + 64 * self.other_prompts * self.steps_between
        longest = max(*self.prompt_tokens, self.batch_tokens, self.conversations.most_tokens)
        return max(longest, decoded) + self.block_tokens

    @property
    def sharing_ranks(self) -> int:
        """Ranks that hold the same bytes, which host memory of the plugin has once."""
        return self.tensor_parallel if self.latent else 1

    def token_bytes(self, item_bytes: int) -> int:
        """Bytes of a token's KV over all layers and ranks, as they are loaded.

        Each rank has one KV head at least; of a latent vector each has all.
        """
        if self.latent:
            numbers = self.tensor_parallel * self.latent.numbers
        else:
            numbers = 2 * max(self.kv_heads, self.tensor_parallel) * self.head_size
        return self.layers * numbers * item_bytes

    def block_bytes(self, item_bytes: int) -> int:
        """Bytes of a block over all layers and ranks."""
        return self.block_tokens * self.token_bytes(item_bytes)

    def loadable_bytes(self, tokens: int, item_bytes: int) -> tuple[int, int]:
        """Least and most bytes of a prompt that a cache must serve: its full blocks.

        Where they hold all tokens, the last block may be computed: one token must be in any case.
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
    # The 48 prompts of 8,192 tokens are 48 GiB, and what was stored before goes first.
    host_gib=50,
    prompt_tokens=(1024, 4096, 16384, 32768),
    repeats=5,
    batch_prompts=48,
    batch_tokens=8192,
    pair_prompts=12,
    pairs=16,
    decodes=16,
    decode_prompt_tokens=512,
    decode_steps=300,
    other_prompts=48,
    other_tokens=4096,
    steps_between=4,
    conversations=Conversations(
        count=48,
        turns=6,
        at_once=16,
        system_tokens=1024,
        history_tokens=(1000, 4000),
        new_tokens=700,
        answer_tokens=(64, 64),
    ),
)
_SMALL = Shape(
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
        answer_tokens=(8, 8),
    ),
)
SHAPES = {
    "small": _SMALL,
    # Blocks of 16 tokens and vectors of 576 numbers are what vLLM's CPU engine has.
    "small-mla": replace(
        _SMALL,
        heads=8,
        head_size=128,
        kv_heads=8,
        latent=Latent(),
        block_tokens=16,
        gpu_blocks=2 * _SMALL.gpu_blocks,
        host_gib=0.5,
    ),
    "gqa8": _GQA8,
    # A model of 2 billion parameters: steps are short, so the host's work weighs more.
    "mqa": replace(
        _GQA8, heads=16, kv_heads=1, hidden=2048, intermediate=8192, host_gib=8, pair_prompts=48
    ),
    # DeepSeek-V2-Lite with one MLP in place of its experts, as large as those that a token takes.
    "mla": replace(
        _GQA8,
        layers=27,
        heads=16,
        kv_heads=16,
        latent=Latent(),
        hidden=2048,
        intermediate=10944,
        block_tokens=64,
        gpu_blocks=1500,
        # With two ranks vLLM's own connector keeps each rank's copy of the 48 prompts: 23 GiB.
        host_gib=25,
        pair_prompts=24,
    ),
}
