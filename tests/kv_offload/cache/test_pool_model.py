"""The protocol of a pool as a small state machine, of which every state is visited.

A scheduler and a rank of one engine share a slot of two words and its entry in the directory. The
engine before has left another slot, which becomes usable at any moment. All interleavings of their
steps are tried, with new weights and a reset at any moment, and in each state that this reaches the
engine may end: then the next one must find no key whose bytes are not all there, and none of other
weights than those of a start. This one has nothing of the engine before once it knows of new
weights. That a key is found in some state is the control that the machine moves, and each mutant of
the protocol must be caught.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

KEYS = ("a", "b")


class State(NamedTuple):
    """One engine; `0` is the generation that its directory had at the start."""

    words: tuple[tuple[str, int], ...] = (("", 0), ("", 0))
    """The bytes of the slot: of which key each is, and of which weights."""
    entry: tuple[str, str, int] = ("", "", 0)
    """Its key, and what its sum is of: key and generation."""
    header: int = 0
    """The generation that the header names."""
    generation: int = 0
    """The generation with which the scheduler publishes."""
    storing: str = ""
    """The key of the store that the scheduler has planned and not seen the end of."""
    forgotten: bool = False
    """True if a reset came after that plan."""
    publishing: str = ""
    """The key of which the scheduler has written the entry, but no sum."""
    plan: str = ""
    """The key of the plan that the rank executes."""
    written: int = 0
    """How many words of it the rank has written."""
    reported: bool = False
    weights: int = 0
    """The weights with which the rank computes now."""
    noticed: int = 0
    """The weights of which the scheduler knows."""
    later: str = "left"
    """The slot of the engine before: `left` until it is usable, then `adopted` or `empty`."""


def steps(s: State, mutant: str) -> Iterator[State]:
    """Yield each state that may follow."""
    # The scheduler. Each of these is one step of its program, in the program's order.
    if not s.storing and not s.publishing:
        for key in KEYS:
            entry = s.entry if mutant == "never withdraws" else (s.entry[0], "", 0)
            early = mutant == "publishes with the plan"
            yield s._replace(
                entry=(key, key, s.generation) if early else entry,
                storing=key,
                plan=key,
                written=0,
                reported=False,
                forgotten=False,
            )
    if s.storing and s.reported:
        if s.forgotten:
            yield s._replace(storing="", plan="")
        else:
            yield s._replace(entry=(s.storing, *s.entry[1:]), publishing=s.storing, storing="")
    if s.publishing:
        yield s._replace(entry=(s.publishing, s.publishing, s.generation), publishing="", plan="")
    if s.noticed < s.weights:
        # One step for the directory: the sums no longer fit as soon as one byte has changed.
        later = "empty" if s.later == "adopted" else s.later
        after = s._replace(noticed=s.weights, forgotten=True, later=later)
        if mutant == "a reset only forgets":
            yield after
        elif mutant == "a reset begins a generation":
            yield after._replace(header=1, generation=1)
        elif mutant == "a reset keeps its own generation":
            yield after._replace(header=1)
        else:
            yield after._replace(header=1, generation=2)
    if s.later == "left":
        yield s._replace(later="empty" if s.generation else "adopted")
    # The rank.
    if s.plan and s.written < len(s.words):
        words = list(s.words)
        words[s.written] = (s.plan, s.weights)
        yield s._replace(words=tuple(words), written=s.written + 1)
    done = 1 if mutant == "reports too early" else len(s.words)
    if s.plan and s.written >= done and not s.reported:
        # A rank reports new weights before it reports a store of what they computed.
        noticed = s.noticed if mutant == "reports stores first" else s.weights
        if noticed == s.noticed:
            yield s._replace(reported=True)
    if not s.weights:
        yield s._replace(weights=1)


def found(s: State) -> str:
    """Return the key that the next engine takes over; nothing if it takes over none."""
    key, summed, generation = s.entry
    return key if summed and (summed, generation) == (key, s.header) else ""


def violations(mutant: str = "") -> tuple[int, set[str]]:
    """Return how many states there are, and what is wrong in some of them."""
    start = State()
    seen, queue, wrong = {start}, [start], set()
    hits = 0
    while queue:
        state = queue.pop()
        key = found(state)
        if key:
            hits += 1
            if any(word != key for word, _ in state.words):
                wrong.add("torn")
            if any(weights for _, weights in state.words):
                wrong.add("of other weights")
        if state.noticed and state.later == "adopted":
            wrong.add("adopted after a reset")
        for following in steps(state, mutant):
            if following not in seen:
                seen.add(following)
                queue.append(following)
    assert hits, "no state has anything to take over"
    return len(seen), wrong


def test_whenever_an_engine_ends_the_next_one_finds_only_whole_blocks_of_its_own_weights() -> None:
    count, wrong = violations()
    assert wrong == set()
    assert count > 100


@pytest.mark.parametrize(
    ("mutant", "caught"),
    [
        ("never withdraws", "torn"),
        ("publishes with the plan", "torn"),
        ("reports too early", "torn"),
        ("a reset only forgets", "of other weights"),
        ("a reset begins a generation", "of other weights"),
        ("a reset keeps its own generation", "adopted after a reset"),
        ("reports stores first", "of other weights"),
    ],
)
def test_the_machine_catches_a_protocol_that_is_wrong(mutant: str, caught: str) -> None:
    assert caught in violations(mutant)[1]
