"""The protocol between the engines of a pool as a small state machine, all states of which are seen.

Two engines own a slot of two words each; either may store either of two keys, and may end at any
step, whereupon the next one takes over its slot: with its directory, or with a new one, where the
old one could not be had. Two readers copy a slot of each word by word, as a rank does, at any time.
What a reader accepts must be of the key that it asked for, in each interleaving. That something is
accepted is the control that the machine moves, and each mutant of the protocol must be caught.

Engines share nothing that they write, so one engine with two readers, and two engines with one,
have all interleavings that two with two have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

KEYS = ("a", "b")
PUBLICATIONS = 3


class Entry(NamedTuple):
    """What a directory says of the slot; a sum that is of it, or 0."""

    key: str = ""
    version: int = 0
    sum: tuple[str, int, int] | int = 0


class Owner(NamedTuple):
    """An engine, or what one has left."""

    words: tuple[str, str] = ("", "")
    files: tuple[Entry, ...] = (Entry(),)
    """The directories of the seat, of which it has the last; readers may have the others mapped."""
    header: int = 0
    """The generation that its directory names."""
    storing: str = ""
    written: int = -1
    """Words of the plan that ranks have written; -1 before the plan is sent."""
    publishing: int = 0
    """Steps of the publication that are done."""
    version: int = 0
    resets: int = 0
    ends: int = 0


class Reader(NamedTuple):
    """A rank that copies a slot of an owner."""

    wants: str = ""
    file: int = 0
    """The directory that it has mapped."""
    claim: tuple[Entry, int] | None = None
    """The entry and the generation that it read."""
    copied: tuple[str, ...] = ()
    accepted: bool = False


class State(NamedTuple):
    owners: tuple[Owner, ...]
    readers: tuple[Reader, ...]


def summed(entry: Entry, header: int) -> tuple[str, int, int]:
    return entry.key, entry.version, header


def own_steps(o: Owner, mutant: str) -> Iterator[Owner]:
    """Yield what an owner may do next."""
    entry = o.files[-1]

    def with_entry(entry: Entry, **more: object) -> Owner:
        return o._replace(files=(*o.files[:-1], entry), **more)

    if not o.storing and o.version < PUBLICATIONS:
        for key in KEYS:
            cleared = entry if mutant == "never withdraws" else entry._replace(sum=0)
            yield with_entry(cleared, storing=key, written=-1, publishing=0)
    if o.storing and o.written < 0:
        yield o._replace(written=0)
    if o.storing and 0 <= o.written < 2:
        words = list(o.words)
        words[o.written] = o.storing
        yield o._replace(words=(words[0], words[1]), written=o.written + 1)
    done = 1 if mutant == "publishes before the last word" else 2
    if o.storing and o.written >= done:
        version = o.version if mutant == "no versions" else o.version + 1
        if o.publishing == 0:
            yield with_entry(entry._replace(key=o.storing), publishing=1)
        elif o.publishing == 1:
            yield with_entry(entry._replace(version=version), publishing=2, version=o.version + 1)
        else:
            made = entry._replace(sum=summed(entry, o.header))
            storing = o.storing if o.written < 2 else ""
            yield with_entry(made, storing=storing, publishing=0 if o.written == 2 else 2)
    if not o.resets:
        # The process publishes with a generation that the header does not name.
        yield o._replace(header=-1, resets=1, storing="", written=-1, publishing=0)
    if o.ends < 2:
        # It ended; another takes over its directory, or puts a new one in its place.
        fresh = o._replace(storing="", written=-1, publishing=0, ends=o.ends + 1, resets=0)
        known = 0 if mutant == "versions begin again" else entry.version
        header = 1 if o.header < 0 else o.header
        yield fresh._replace(version=known, header=header)
        yield fresh._replace(files=(*o.files, Entry()), header=2 + len(o.files), version=0)


def read_steps(r: Reader, owner: Owner, mutant: str) -> Iterator[Reader]:
    """Yield what a reader may do next."""
    entry, header = owner.files[r.file], owner.header
    if r.accepted:
        return
    if r.claim is None:
        fits = entry.sum == summed(entry, header if r.file == len(owner.files) - 1 else -2)
        if r.file < len(owner.files) - 1:
            # An old directory has the generation that it had: what it says still fits.
            fits = entry.sum != 0
            header = entry.sum[2] if isinstance(entry.sum, tuple) else 0
        if (fits or (mutant == "believes without a sum" and entry.key)) and entry.key:
            yield r._replace(claim=(entry, header), wants=entry.key)
        if r.file < len(owner.files) - 1:
            yield r._replace(file=len(owner.files) - 1)
    elif len(r.copied) < 2:
        yield r._replace(copied=(*r.copied, owner.words[len(r.copied)]))
    else:
        claimed, generation = r.claim
        good = entry.sum == claimed.sum
        if mutant == "looks only before":
            good = True
        if mutant == "compares keys":
            good = entry.key == claimed.key and entry.sum != 0
        is_seat = r.file == len(owner.files) - 1 or mutant == "keeps an old directory"
        is_same = header == generation or r.file < len(owner.files) - 1
        if good and is_seat and is_same:
            yield r._replace(accepted=True)
        yield Reader(file=r.file)


def violations(num_owners: int, num_readers: int, mutant: str = "") -> tuple[int, int, set[str]]:
    """Return how many states there are, in how many something was accepted, and what is wrong."""
    start = State((Owner(),) * num_owners, (Reader(),) * num_readers)
    seen, queue, wrong, hits = {start}, [start], set(), 0
    while queue:
        state = queue.pop()
        for reader in state.readers:
            hits += reader.accepted
            if reader.accepted and reader.copied != (reader.wants,) * 2:
                wrong.add(f"{reader.copied} as {reader.wants}")
        if wrong:
            break
        for number, owner in enumerate(state.owners):
            for after in own_steps(owner, mutant):
                owners = (*state.owners[:number], after, *state.owners[number + 1 :])
                _note(state._replace(owners=owners), seen, queue)
        for number, reader in enumerate(state.readers):
            # With one reader it takes each owner; each of two takes the one that there is.
            for owner in {*state.owners}:
                for next_reader in read_steps(reader, owner, mutant):
                    readers = (*state.readers[:number], next_reader, *state.readers[number + 1 :])
                    _note(state._replace(readers=readers), seen, queue)
            if num_owners > 1:
                break
    return len(seen), hits, wrong
