"""The protocol between engines of a pool as a small state machine, of which every state is visited.

A seat has a slot of two words and its directory. The engine that has it stores either of two keys,
is reset, or ends, at any step. The next one takes over the slot with the directory, or with a new
one, and then the scheduler before it may still publish in the old one. A reader leases the slot and
reads it word by word, or ends, at any step. What it reads must be of the key that it leased, and of
the weights of a start. That something is read is the control that the machine moves, and each
mutant of the protocol must be caught.

An owner only asks whether any reader has a lease, and readers know nothing of each other. So a
second reader has no step that one alone has not; with it, fewer stores are visited.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.support.slow import rest_is_slow

KEYS = ("a", "b")

Sum = tuple[str, int, int]
"""Of key, version and generation."""


class Entry(NamedTuple):
    """A directory: the slot's entry and leases, and its header."""

    key: str = ""
    version: int = 0
    sum: Sum | None = None
    generation: int = 0
    is_retired: bool = False
    leases: tuple[bool, ...] = (False,)


class Writer(NamedTuple):
    """A scheduler, and the store of its ranks that is under way."""

    generation: int = 0
    version: int = 0
    weights: int = 0
    left: int = 2
    """Stores that it may still plan: with two, a key goes and comes again."""
    storing: str = ""
    step: int = 0
    """Of a store: the sum is cleared, the leases are read, two words are written, then key, version
    and sum."""


class Reader(NamedTuple):
    mapped: int = 0
    step: str = "idle"
    generation: int = 0
    sum: Sum | None = None
    key: str = ""
    read: tuple[tuple[str, int], ...] = ()
    is_alive: bool = True
    is_late: bool = False
    """Whether it has leased what the directory had before it was retired and taken over."""


class State(NamedTuple):
    words: tuple[tuple[str, int], tuple[str, int]] = (("a", 0), ("a", 0))
    files: tuple[Entry, ...] = (Entry("a", 2, ("a", 2, 0)),)
    """The directories of the seat; it has the last, and a reader may have another mapped."""
    writers: tuple[Writer, ...] = (Writer(version=2),)
    """The scheduler of each directory; only the last one has ranks."""
    readers: tuple[Reader, ...] = (Reader(),)
    ends: int = 0
    resets: bool = True
    """Whether schedulers are reset."""


def write_steps(s: State, at: int, mutant: str) -> Iterator[State]:
    """Yield what the scheduler of a directory may do next, or its ranks."""
    w, entry, has_ranks = s.writers[at], s.files[at], at == len(s.files) - 1

    def after(writer: Writer, entry: Entry = entry, words: object = s.words) -> State:
        files = (*s.files[:at], entry, *s.files[at + 1 :])
        writers = (*s.writers[:at], writer, *s.writers[at + 1 :])
        return s._replace(files=files, words=words, writers=writers)

    if not has_ranks:
        # It gets no reports, but may be in the middle of a publication.
        if w.storing and w.step >= 4:
            yield after(*publish(w, entry, mutant))
        return
    if entry.is_retired and not w.weights:  # just taken over
        if entry.sum is not None and mutant != "a revived directory keeps its entries":
            yield after(w, entry._replace(sum=None))
        elif entry.generation < 100:
            generation = 100 + s.ends
            yield after(w._replace(generation=generation), entry._replace(generation=generation))
        else:
            yield after(w, entry._replace(is_retired=False))
    elif not w.storing and w.left:
        for key in KEYS:
            yield after(w._replace(storing=key, step=0, left=w.left - 1))
    elif w.storing and w.step < 2:
        looks = w.step == (0 if mutant == "an owner looks at the leases first" else 1)
        if not looks:
            cleared = entry if mutant == "never withdraws" else entry._replace(sum=None)
            yield after(w._replace(step=w.step + 1), cleared)
        else:
            looked = s.files[-1:] if mutant == "a new directory forgets leases" else s.files
            free = not any(any(one.leases) for one in looked)
            if free or mutant == "an owner ignores leases":
                yield after(w._replace(step=w.step + 1))
    elif w.storing and w.step < 4:
        words = list(s.words)
        words[w.step - 2] = (w.storing, w.weights)
        yield after(w._replace(step=w.step + 1), words=tuple(words))
        if mutant == "publishes before the last word" and w.step == 3:
            made = (w.storing, w.version, w.generation)
            yield after(w, entry._replace(key=w.storing, version=w.version, sum=made))
    elif w.storing:
        if not w.weights or mutant == "publishes after a reset":
            yield after(*publish(w, entry, mutant))
        else:
            yield after(w._replace(storing=""))
    if s.resets and not w.weights and not entry.is_retired:
        retired = entry._replace(is_retired=mutant != "publishes after a reset")
        yield after(Writer(w.generation, w.version, weights=1, left=w.left), retired)
        if w.storing:  # its copies run on
            yield after(w._replace(weights=1), retired)
    for number, reader in enumerate(s.readers):
        if not reader.is_alive or mutant == "an owner ends leases of the living":
            for file, one in enumerate(s.files):
                if one.leases[number]:
                    yield set_lease(s, file, number, leased=False)
    if not s.ends:
        version = 0 if mutant == "versions begin again" else entry.version
        ended = s._replace(ends=s.ends + 1)
        yield ended._replace(writers=(*s.writers[:at], Writer(entry.generation, version)))
        new = Entry(generation=len(s.files), leases=(False,) * len(s.readers))
        following = Writer(new.generation)
        yield ended._replace(files=(*s.files, new), writers=(*s.writers, following))


def publish(w: Writer, entry: Entry, mutant: str) -> tuple[Writer, Entry]:
    """Do the next step of a publication."""
    version = 0 if mutant == "sums without versions" else w.version + 1
    if w.step == 4:
        return w._replace(step=5), entry._replace(key=w.storing)
    if w.step == 5:
        return w._replace(step=6), entry._replace(version=version)
    made = entry._replace(sum=(w.storing, version, w.generation))
    return Writer(w.generation, w.version + 1, w.weights, w.left), made


def set_lease(s: State, file: int, number: int, *, leased: bool) -> State:
    entry = s.files[file]
    leases = (*entry.leases[:number], leased, *entry.leases[number + 1 :])
    files = (*s.files[:file], entry._replace(leases=leases), *s.files[file + 1 :])
    return s._replace(files=files)


NEXT = {
    "idle": "sum",
    "sum": "key",
    "key": "lease",
    "lease": "again",
    "again": "valid",
    "valid": "read",
}
ORDERS = {
    "reads the key before the sum": {"idle": "key", "key": "sum", "sum": "lease"},
    "looks again before the lease": {"key": "again", "again": "lease", "lease": "valid"},
}


def read_steps(s: State, number: int, mutant: str) -> Iterator[State]:
    """Yield what a reader may do next. Its `step` is what it does next; "idle" begins a lease."""
    reader, last = s.readers[number], len(s.files) - 1
    entry = s.files[reader.mapped]
    order = NEXT | ORDERS.get(mutant, {})

    def after(reader: Reader, s: State = s) -> State:
        return s._replace(readers=(*s.readers[:number], reader, *s.readers[number + 1 :]))

    def refused() -> State:
        return after(Reader(reader.mapped), set_lease(s, reader.mapped, number, leased=False))

    if not reader.is_alive:
        # Only now the next process gets the lock of its seat.
        yield after(Reader(last), set_lease(s, last, number, leased=False))
        return
    yield after(Reader(reader.mapped, is_alive=False))
    following = reader._replace(step=order.get(reader.step, ""))
    match reader.step:
        case "idle":
            yield after(following._replace(generation=entry.generation))
            if reader.mapped < last:
                yield after(Reader(last))
        case "sum":
            yield after(following._replace(sum=entry.sum)) if entry.sum else refused()
        case "key":
            yield after(following._replace(key=entry.key))
        case "lease":
            yield after(following, set_lease(s, reader.mapped, number, leased=True))
        case "again":
            same = entry.sum == reader.sum or mutant == "does not look again"
            yield after(following) if same else refused()
        case "valid":
            good = not entry.is_retired or mutant == "believes a retired directory"
            if mutant != "ignores generations":
                good = good and entry.generation == reader.generation
            if mutant != "keeps a directory that was replaced":
                good = good and reader.mapped == last
            is_late = reader.sum is not None and reader.sum[2] != entry.generation
            late = following._replace(is_late=is_late and not entry.is_retired)
            yield after(late) if good else refused()
        case "read":
            if len(reader.read) < 2:
                yield after(reader._replace(read=(*reader.read, s.words[len(reader.read)])))
            else:
                yield refused()  # it has read all, and ends its lease


def violations(
    mutant: str = "", *, readers: int = 1, stores: int = 2, resets: bool = False, ends: int = 0
) -> tuple[int, set[str]]:
    """Return how many states there are, and what is wrong in some of them; a mutant stops there."""
    first = Entry("a", 2, ("a", 2, 0), leases=(False,) * readers)
    writer = Writer(version=2, left=stores)
    all_readers = (Reader(),) * readers
    start = State(files=(first,), writers=(writer,), readers=all_readers, ends=ends, resets=resets)
    seen, queue, wrong, hits = {start}, [start], set(), 0
    while queue and not (wrong and mutant):
        state = queue.pop()
        for number, reader in enumerate(state.readers):
            if reader.is_late:
                wrong.add("of a directory before")
            if len(reader.read) == 2:
                hits += 1
                if any(key != reader.key for key, _ in reader.read):
                    wrong.add("torn")
                if any(weights for _, weights in reader.read):
                    wrong.add("of other weights")
            idle = reader.is_alive and reader.step == "idle"
            if idle and state.files[reader.mapped].leases[number]:
                wrong.add("leaked")
        following = [one for number in range(readers) for one in read_steps(state, number, mutant)]
        for at in range(len(state.files)):
            following += write_steps(state, at, mutant)
        for one in following:
            if one not in seen:
                seen.add(one)
                queue.append(one)
    assert hits or wrong, "no state has anything that is read"
    return len(seen), wrong


@pytest.mark.parametrize(
    ("readers", "stores", "resets", "ends"),
    rest_is_slow([(1, 2, False, 0), (2, 2, False, 1), (1, 1, True, 0)], 2),
)
def test_a_reader_reads_only_whole_blocks_of_the_key_that_it_leased(
    readers: int, stores: int, resets: bool, ends: int
) -> None:
    count, wrong = violations(readers=readers, stores=stores, resets=resets, ends=ends)
    print(count)
    assert wrong == set()
    assert count > 1000


@pytest.mark.parametrize(
    ("mutant", "caught"),
    [
        ("never withdraws", "torn"),
        ("publishes before the last word", "torn"),
        ("sums without versions", "torn"),
        ("versions begin again", "torn"),
        ("an owner ignores leases", "torn"),
        ("an owner looks at the leases first", "torn"),
        ("an owner ends leases of the living", "torn"),
        ("a new directory forgets leases", "torn"),
        ("reads the key before the sum", "torn"),
        ("looks again before the lease", "torn"),
        ("does not look again", "torn"),
        ("keeps a directory that was replaced", "torn"),
        ("publishes after a reset", "of other weights"),
        ("a revived directory keeps its entries", "of a directory before"),
        ("ignores generations", "of a directory before"),
    ],
)
def test_the_machine_catches_a_protocol_that_is_wrong(mutant: str, caught: str) -> None:
    resets = caught != "torn"
    assert caught in violations(mutant, stores=1 if resets else 2, resets=resets)[1]
