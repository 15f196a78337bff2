"""`python -m bench.trace.shifts`: hits of `lru` and `auto` in each phase of changing traffic.

A workload is a list of phases, and a phase a list of prompts in blocks of 16 tokens. Capacities are
chosen so that some phases just fit and others do not.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from bench.serving.report import markdown_table
from kv_offload.simulation.mini_sim import MiniSim, SampledRequest

BLOCK_TOKENS = 16

Prompt: TypeAlias = list[int]
Phases: TypeAlias = list[list[Prompt]]


class _Blocks:
    """Draws prompts of unique blocks."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._names: Iterator[int] = itertools.count()

    def new(self, blocks: int) -> Prompt:
        return list(itertools.islice(self._names, blocks))

    def prompts(self, count: int, blocks: int) -> list[Prompt]:
        return [self.new(blocks) for _ in range(count)]


def _documents(blocks: _Blocks) -> Phases:
    """A few prompts of many lengths, sent twice; then, in three passes, new ones that just fit."""
    warm = [prompt for size in (32, 128, 512, 1024) for prompt in blocks.prompts(3, size)]
    documents = blocks.prompts(48, 256)
    return [[prompt for prompt in warm for _ in range(2)], documents, documents, documents]


def _users(blocks: _Blocks) -> Phases:
    """A chat service whose users change, and whose conversations grow."""
    phases = []
    for _ in range(4):
        users, asked = blocks.prompts(60, 64), []
        for _ in range(450):
            at = blocks.random.randrange(len(users))
            if len(users[at]) < 300:
                users[at] = users[at] + blocks.new(16)
            asked.append(users[at])
        phases.append(asked)
    return phases


def _scan(blocks: _Blocks) -> Phases:
    """Documents requested at random, a scan of others, and new documents."""

    def asked() -> list[Prompt]:
        documents = blocks.prompts(100, 50)
        return [blocks.random.choice(documents) for _ in range(500)]

    before, after = asked(), asked()
    return [before, before, blocks.prompts(60, 200), after, after]


def _system_prompts(blocks: _Blocks) -> Phases:
    """One system prompt for all requests, which is then replaced."""
    return [
        [system + blocks.new(blocks.random.randint(5, 40)) for _ in range(300)]
        for system in blocks.prompts(4, 100)
    ]


def _day_and_night(blocks: _Blocks) -> Phases:
    """Two groups of users in turns, whose conversations grow."""
    groups = [[blocks.new(blocks.random.choice((30, 60, 120))) for _ in range(40)] for _ in "ab"]
    phases = []
    for turn in range(4):
        users, asked = groups[turn % 2], []
        for _ in range(250):
            at = blocks.random.randrange(len(users))
            users[at] = blocks.new(50) if len(users[at]) > 300 else users[at] + blocks.new(4)
            asked.append(users[at])
        phases.append(asked)
    return phases


def _once_then_again(blocks: _Blocks) -> Phases:
    """Prompts that are never repeated, then some that are repeated five times; all of it twice."""
    phases = []
    for _ in range(2):
        phases.append(blocks.prompts(500, 50))
        phases.append(blocks.prompts(90, 50) * 6)
    return phases


def _ending_chats(blocks: _Blocks) -> Phases:
    """Conversations that grow and end; their number, turns and lengths differ by phase."""
    phases = []
    for at_once, turns, growth in ((40, 12, 10), (100, 3, 30), (20, 40, 5)):
        chats: list[tuple[Prompt, int]] = []
        asked = []
        for _ in range(600):
            if len(chats) < at_once:
                chats.append((blocks.new(20), blocks.random.randint(1, turns)))
            said, left = chats.pop(blocks.random.randrange(len(chats)))
            said = said + blocks.new(blocks.random.randint(1, growth))
            asked.append(said)
            if left > 1:
                chats.append((said, left - 1))
        phases.append(asked)
    return phases


def _popularity(blocks: _Blocks) -> Phases:
    """Prompts drawn by Zipf's law, while popularity moves to other prompts."""
    prompts = [blocks.new(blocks.random.randint(10, 60)) for _ in range(600)]
    weights = [1 / rank for rank in range(1, len(prompts) + 1)]
    phases = []
    for _ in range(3):
        blocks.random.shuffle(prompts)
        phases.append(blocks.random.choices(prompts, weights, k=800))
    return phases


def _loop_then_documents(blocks: _Blocks) -> Phases:
    """A loop over more prompts than fit, some of which `auto` keeps; then new prompts."""
    documents = blocks.prompts(70, 64)
    return [blocks.prompts(100, 64) * 6, documents, documents, documents]


def _popular_then_documents(blocks: _Blocks) -> Phases:
    """Popular prompts among others that are never repeated; then new prompts that just fit."""
    popular = blocks.prompts(40, 32)
    asked = [
        blocks.random.choice(popular) if blocks.random.random() < 0.3 else blocks.new(64)
        for _ in range(1500)
    ]
    documents = blocks.prompts(60, 64)
    return [asked, documents, documents, documents]


def _batches(blocks: _Blocks) -> Phases:
    """Three passes over documents with one question each; lengths differ by phase."""
    phases = []
    for size in (128, 512, 32, 256, 1024, 64):
        documents = blocks.prompts(max(4, 6000 // size), size)
        passes = [blocks.random.sample(documents, len(documents)) for _ in range(3)]
        phases.append([document + blocks.new(2) for each in passes for document in each])
    return phases


def _lengths_that_swap(blocks: _Blocks) -> Phases:
    """Short prompts repeat and long ones do not, then the other way around."""
    phases = []
    for again, once in ((30, 200), (200, 30)) * 2:
        popular = blocks.prompts(30, again)
        phases.append(
            [
                blocks.random.choice(popular) if blocks.random.random() < 0.5 else blocks.new(once)
                for _ in range(600)
            ]
        )
    return phases


def _once_then_each_again(blocks: _Blocks) -> Phases:
    """Prompts sent once and some popular ones; then each prompt repeats after 40 others."""
    popular = blocks.prompts(20, 50)
    phases = [
        [
            blocks.random.choice(popular) if blocks.random.random() < 0.25 else blocks.new(50)
            for _ in range(800)
        ]
    ]
    for _ in range(2):
        prompts = blocks.prompts(800, 50)
        phases.append([one for at in range(40, 800) for one in (prompts[at], prompts[at - 40])])
    return phases


class Shift(NamedTuple):
    """Changing traffic, and the capacities in blocks to try."""

    phases: Callable[[_Blocks], Phases]
    capacities: tuple[int, ...]

    def make(self, seed: int = 0) -> Phases:
        """Draw the prompts."""
        return self.phases(_Blocks(seed))


SHIFTS: Mapping[str, Shift] = {
    "documents that just fit": Shift(_documents, (12_288, 15_000)),
    "users who change": Shift(_users, (7_500, 12_500)),
    "a scan between documents": Shift(_scan, (2_500, 4_750, 5_250)),
    "a system prompt that is replaced": Shift(_system_prompts, (1_000, 5_000)),
    "day and night": Shift(_day_and_night, (4_000, 6_000, 10_000)),
    "prompts asked once, then prompts asked again": Shift(_once_then_again, (4_550, 6_000)),
    "conversations that end": Shift(_ending_chats, (2_000, 5_000)),
    "a loop, then documents that just fit": Shift(_loop_then_documents, (4_500, 5_000, 5_500)),
    "popular prompts, then documents that just fit": Shift(_popular_then_documents, (2_000, 4_000)),
    "batches of new lengths": Shift(_batches, (3_000, 5_000, 6_250)),
    "lengths that swap": Shift(_lengths_that_swap, (3_000, 7_000, 10_000)),
    "prompts asked once, then each again": Shift(_once_then_each_again, (2_250, 4_500)),
    "popularity that moves": Shift(_popularity, (1_000, 4_000, 10_000)),
}


def hits_by_phase(phases: Phases, policy: str, capacity: int) -> list[float]:
    """Return the percentage of each phase's blocks that are prefix hits."""
    cache, shares = MiniSim(policy, capacity), []
    for prompts in phases:
        hits = 0
        for ids in prompts:
            hits += sum(cache.serve([SampledRequest(ids, prompt_tokens=BLOCK_TOKENS * len(ids))]))
        shares.append(100 * hits / sum(map(len, prompts)))
    return shares


def main() -> None:
    """Print a table."""
    lines = []
    for name, shift in SHIFTS.items():
        for capacity in shift.capacities:
            found = [hits_by_phase(shift.make(), policy, capacity) for policy in ("lru", "auto")]
            shares = [", ".join(f"{share:.1f}" for share in each) for each in found]
            lines.append([f"{name}, {capacity:,}", *shares])
    print(markdown_table("Hits in % by phase", ["workload, blocks", "lru", "auto"], lines))


if __name__ == "__main__":
    main()
