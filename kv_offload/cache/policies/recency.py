"""A list by recency, made of integer arrays: no object per entry, and no pause to be rebuilt."""

from __future__ import annotations

from array import array

_ABSENT, _IDLE, _HELD, _PARKED = range(4)


class RecencyList:
    """Slots from the least to the most recent; a held slot keeps its place but is not popped.

    A search for a victim parks the held slots that it meets at the old end: it takes them out of
    the order, so as to pass them once. A parked slot returns to the old end when it is released.
    Several parked slots keep their order if the most recent of them is released first.

    All operations but `append` are for slots that are in the list.
    """

    __slots__ = ("_newer", "_older", "_state", "evictable", "length")

    def __init__(self) -> None:
        # Slot i is node i + 1. Node 0 closes the circle between the newest and the oldest.
        self._older = array("i", [0])
        self._newer = array("i", [0])
        self._state = bytearray([_ABSENT])
        self.length = 0
        """How many slots there are, parked ones included."""
        self.evictable = 0
        """How many slots are not held."""

    def append(self, slot: int, *, held: bool) -> None:
        """Add a slot that is not in the list, as the most recent."""
        node = slot + 1
        missing = node + 1 - len(self._state)
        if missing > 0:
            self._older.extend([0] * missing)
            self._newer.extend([0] * missing)
            self._state.extend(bytes(missing))
        self._state[node] = _HELD if held else _IDLE
        self.length += 1
        self.evictable += not held
        self._link(node, self._older[0])

    def refresh(self, slot: int) -> None:
        """Make a slot the most recent."""
        node = slot + 1
        older, newer = self._older, self._newer
        if self._state[node] == _PARKED:
            self._state[node] = _HELD
        else:
            before, after = older[node], newer[node]
            newer[before] = after
            older[after] = before
        newest = older[0]
        older[node] = newest
        newer[node] = 0
        newer[newest] = node
        older[0] = node

    def hold(self, slot: int) -> None:
        """Keep a slot that is not held from being popped."""
        self._state[slot + 1] = _HELD
        self.evictable -= 1

    def release(self, slot: int) -> None:
        """Let a held slot be popped again."""
        node = slot + 1
        if self._state[node] == _PARKED:
            self._link(node, 0)
        self._state[node] = _IDLE
        self.evictable += 1

    def remove(self, slot: int) -> None:
        """Take a slot out of the list."""
        node = slot + 1
        state = self._state[node]
        if state != _PARKED:
            self._unlink(node)
        if state == _IDLE:
            self.evictable -= 1
        self._state[node] = _ABSENT
        self.length -= 1

    def pop_oldest(self) -> int:
        """Take out the least recent slot that is not held; needs `evictable` to be above 0."""
        node = self._newer[0]
        while self._state[node] == _HELD:
            self._unlink(node)
            self._state[node] = _PARKED
            node = self._newer[0]
        self.remove(node - 1)
        return node - 1

    def _link(self, node: int, older: int) -> None:
        newer = self._newer[older]
        self._older[node] = older
        self._newer[node] = newer
        self._newer[older] = node
        self._older[newer] = node

    def _unlink(self, node: int) -> None:
        older, newer = self._older[node], self._newer[node]
        self._newer[older] = newer
        self._older[newer] = older

    def is_held(self, slot: int) -> bool:
        """Say whether a slot is held."""
        return self._state[slot + 1] != _IDLE

    def slots(self) -> list[int]:
        """Return the slots that are not parked, from the least to the most recent."""
        slots = []
        node = self._newer[0]
        while node:
            slots.append(node - 1)
            node = self._newer[node]
        return slots

    def holds(self) -> dict[int, bool]:
        """Return all slots and whether they are held."""
        return {
            node - 1: state != _IDLE for node, state in enumerate(self._state) if state != _ABSENT
        }

    def __contains__(self, slot: int) -> bool:
        return slot + 1 < len(self._state) and self._state[slot + 1] != _ABSENT

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming the first broken invariant, in O(n)."""
        listed, holds = self.slots(), self.holds()
        parked = {slot for slot in holds if self._state[slot + 1] == _PARKED}
        linked = [*listed, *parked]
        assert len(linked) == len(holds) == self.length, "a slot is lost or linked twice"
        assert holds.keys() == {*linked}, "a slot is linked that is not in the list"
        idle = len(holds) - sum(holds.values())
        assert self.evictable == idle, f"{self.evictable} slots count as evictable, but {idle} are"
