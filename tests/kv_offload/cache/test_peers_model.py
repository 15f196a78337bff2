"""The protocol between engines of a pool as a small state machine, of which every state is visited.

A seat has a slot of two words and its directory. The engine that has it stores either of two keys,
is reset, or ends, at any step. The next one takes over the slot with the directory, or with a new
one, and then the scheduler before it may still publish in the old one. A peer copies the slot word
by word at any time. What it accepts must be of the key that it claimed, and of the weights of a
start. That something is accepted is the control that the machine moves, and each mutant of the
protocol must be caught.

A peer writes nothing, and each engine writes to its own seat alone. So two peers and two seats have
no state that one of each has not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

KEYS = ("a", "b")
SECRET = -1
"""A generation that no header names."""


class Entry(NamedTuple):
    """A directory: the slot's entry, and the generation in the header."""

    key: str = ""
    version: int = 0
    sum: tuple[str, int, int] | None = None
    header: int = 0


class Writer(NamedTuple):
    """A scheduler, and the store of its ranks that is under way."""

    generation: int = 0
    version: int = 0
    weights: int = 0
    left: int = 2
    """Stores that it may still plan: with two, a key goes and comes again."""
    storing: str = ""
    step: int = 0
    """Of a store: two words are written, then key, version and sum."""


class State(NamedTuple):
    words: tuple[tuple[str, int], tuple[str, int]] = (("a", 0), ("a", 0))
    files: tuple[Entry, ...] = (Entry("a", 2, ("a", 2, 0)),)
    """The directories of the seat; it has the last, and a peer may have another mapped."""
    writers: tuple[Writer, ...] = (Writer(version=2),)
    """The scheduler of each directory; only the last one has ranks."""
    ends: int = 0
    mapped: int = 0
    claim: Entry | None = None
    copied: tuple[tuple[str, int], ...] = ()
    accepted: bool = False


def write_steps(s: State, at: int, mutant: str) -> Iterator[State]:
    """Yield what the scheduler of a directory may do next, or its ranks."""
    w, entry, has_ranks = s.writers[at], s.files[at], at == len(s.files) - 1

    def after(writer: Writer, entry: Entry = entry, words: object = s.words) -> State:
        files = (*s.files[:at], entry, *s.files[at + 1 :])
        return s._replace(files=files, words=words, writers=(*s.writers[:at], writer))

    if not has_ranks:
        # It gets no reports, but may be in the middle of a publication.
        if w.storing and w.step >= 2:
            done = publish(w, entry, mutant)
            rest = s.writers[at + 1 :]
            out = after(*done)
            yield out._replace(writers=(*out.writers, *rest))
        return
    if not w.storing and w.left:
        cleared = entry if mutant == "never withdraws" else entry._replace(sum=None)
        for key in KEYS:
            yield after(w._replace(storing=key, step=0, left=w.left - 1), cleared)
    if w.storing and w.step < 2:
        words = list(s.words)
        words[w.step] = (w.storing, w.weights)
        yield after(w._replace(step=w.step + 1), words=tuple(words))
        if mutant == "publishes before the last word" and w.step == 1:
            made = Entry(w.storing, w.version, (w.storing, w.version, w.generation), entry.header)
            yield after(w, made)
    if w.storing and w.step >= 2:
        yield after(*publish(w, entry, mutant))
    if not w.weights:
        generation = w.generation if mutant == "a reset keeps its generation" else SECRET
        header = entry.header if mutant == "a reset keeps its generation" else 100 + s.ends
        fresh = Writer(generation, w.version, weights=1, left=w.left)
        yield after(fresh, entry._replace(header=header))
    if not s.ends:
        version = 0 if mutant == "versions begin again" else entry.version
        ended = s._replace(ends=s.ends + 1)
        yield ended._replace(writers=(*s.writers[:at], Writer(entry.header, version)))
        new = Entry(header=len(s.files))
        yield ended._replace(files=(*s.files, new), writers=(*s.writers, Writer(new.header)))


def publish(w: Writer, entry: Entry, mutant: str) -> tuple[Writer, Entry]:
    """Do the next step of a publication."""
    version = 0 if mutant == "sums without versions" else w.version + 1
    if w.step == 2:
        return w._replace(step=3), entry._replace(key=w.storing)
    if w.step == 3:
        return w._replace(step=4), entry._replace(version=version)
    made = entry._replace(sum=(w.storing, version, w.generation))
    return Writer(w.generation, w.version + 1, w.weights, w.left), made


def read_steps(s: State, mutant: str) -> Iterator[State]:
    """Yield what the peer may do next."""
    entry, last = s.files[s.mapped], len(s.files) - 1
    if s.claim is None:
        fits = entry.sum == (entry.key, entry.version, entry.header)
        if fits or (mutant == "believes an entry without its sum" and entry.key):
            yield s._replace(claim=entry)
        if s.mapped < last:
            yield s._replace(mapped=last)
    elif len(s.copied) < 2:
        yield s._replace(copied=(*s.copied, s.words[len(s.copied)]))
    elif not s.accepted:
        good = (entry.sum, entry.header) == (s.claim.sum, s.claim.header)
        if mutant == "looks only before":
            good = True
        elif mutant == "compares keys only":
            good = entry.key == s.claim.key and entry.sum is not None
        if good and (s.mapped == last or mutant == "keeps a directory that was replaced"):
            yield s._replace(accepted=True)
        yield s._replace(claim=None, copied=())


def violations(mutant: str = "", until: str = "nothing") -> tuple[int, set[str]]:
    """Return how many states there are, and what is wrong in some of them.

    States are visited until this is wrong.
    """
    start = State()
    seen, queue, wrong, hits = {start}, [start], set(), 0
    while queue and until not in wrong:
        state = queue.pop()
        if state.accepted:
            assert state.claim is not None
            hits += 1
            if any(key != state.claim.key for key, _ in state.copied):
                wrong.add("torn")
            if any(weights for _, weights in state.copied):
                wrong.add("of other weights")
            continue
        following = [*read_steps(state, mutant)]
        for at in range(len(state.files)):
            following += write_steps(state, at, mutant)
        for one in following:
            if one not in seen:
                seen.add(one)
                queue.append(one)
    assert hits, "no state has anything that is accepted"
    return len(seen), wrong


def test_a_peer_accepts_only_whole_blocks_of_the_key_that_it_claimed() -> None:
    count, wrong = violations()
    assert wrong == set()
    assert count > 1000


@pytest.mark.parametrize(
    ("mutant", "caught"),
    [
        ("never withdraws", "torn"),
        ("publishes before the last word", "torn"),
        ("sums without versions", "torn"),
        ("versions begin again", "torn"),
        ("believes an entry without its sum", "torn"),
        ("looks only before", "torn"),
        ("compares keys only", "torn"),
        ("keeps a directory that was replaced", "torn"),
        ("a reset keeps its generation", "of other weights"),
    ],
)
def test_the_machine_catches_a_protocol_that_is_wrong(mutant: str, caught: str) -> None:
    assert caught in violations(mutant, until=caught)[1]
