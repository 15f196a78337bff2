"""Conversations that change replica at random: the same for all columns of a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.serving.shapes import GIB, SHAPES, Shape

SEED = 51


@dataclass(frozen=True)
class Workload:
    """The conversations of a run, and the host memory of all replicas together.

    In each turn every conversation sends one request to a replica drawn at random. A prompt
    consists of the conversation's last prompt and `added_tokens` new ones.
    """

    conversations: int
    turns: int
    first_tokens: int
    added_tokens: int
    answer_tokens: int
    at_a_time: int
    """Number of requests that a replica serves at the same time."""
    total_gib: float
    gpu_blocks: int
    """Number of blocks in each replica's GPU cache."""

    def shape(self, name: str) -> Shape:
        """Return the shape of that name; it must have room for the longest request."""
        shape = SHAPES[name]
        assert self.prompt_tokens(self.turns - 1) + self.answer_tokens < shape.max_model_len
        return shape

    def prompt_tokens(self, turn: int) -> int:
        """Return the tokens of a prompt in a turn; the first turn is 0."""
        return self.first_tokens + turn * self.added_tokens

    def prompt(self, conversation: int, turn: int) -> list[int]:
        """Return the prompt of a conversation in a turn."""
        longest = self.prompt_tokens(self.turns - 1)
        tokens = np.random.default_rng((SEED, conversation)).integers(10, 31000, longest)
        return [int(token) for token in tokens[: self.prompt_tokens(turn)]]

    @property
    def total_bytes(self) -> int:
        """Bytes of host memory of all replicas together."""
        return int(self.total_gib * GIB)


@dataclass(frozen=True)
class Share:
    """The part of a workload that one of several replicas serves."""

    workload: Workload
    replica: int
    replicas: int

    def prompts(self, turn: int) -> list[list[int]]:
        """Return the prompts of a turn; every replica has the same number."""
        order = np.random.default_rng((SEED, 1000 + turn)).permutation(self.workload.conversations)
        mine = order[self.replica :: self.replicas].tolist()
        return [self.workload.prompt(conversation, turn) for conversation in mine]


WORKLOADS = {
    # 50 MiB of KV at the end. A Mooncake store takes 16 MiB or more from a replica.
    "small": Workload(
        conversations=80,
        turns=4,
        first_tokens=256,
        added_tokens=128,
        answer_tokens=4,
        at_a_time=2,
        total_gib=64 / 1024,
        gpu_blocks=60,
    ),
    # 45 GiB of KV at the end, which fits once but not twice; a GPU cache has 11.7 GiB.
    "gqa8": Workload(
        conversations=40,
        turns=6,
        first_tokens=4096,
        added_tokens=1024,
        answer_tokens=32,
        at_a_time=4,
        total_gib=48,
        gpu_blocks=6000,
    ),
}
