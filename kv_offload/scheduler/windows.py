"""Decides which peers' arenas the ranks map, and from which slots of them loads may read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kv_offload.cache.lasting import LastingManager
from kv_offload.cache.peer_slots import PeerSlots
from kv_offload.cache.peers import PeerDirectory
from kv_offload.messages import OffloadMetadata, OffloadWorkerMetadata, Window
from kv_offload.scheduler.core import Core
from kv_offload.scheduler.transfers import Transfer

GROWING_SECONDS = 30.0
"""A peer is mapped once all its slots have memory, or once no more slots have received memory for
this long: its engine may have ended."""

PATIENCE_SECONDS = 10.0
"""How long an idle engine keeps stepping while ranks map an arena, and after how long a window that
is not reported is sent again."""


@dataclass(slots=True)
class Mapped:
    """A peer whose arenas the ranks were asked to map, or to unmap if it `ends`."""

    peer: PeerDirectory
    window: Window
    since: float
    """When it was first sent."""
    sent: float
    is_closed: bool = False
    """True once lookups no longer find its slots."""
    ends: bool = False
    ranks: dict[int, int] = field(default_factory=dict)
    """By rank that has reported the window: the number of slots that its loads may read."""


class Windows:
    """Keeps the windows of `manager` up to date: one for each peer, by its seat.

    A window stays while some load may read from it, whatever happens to the peer: its bytes do not
    change until the lease ends.
    """

    def __init__(self, core: Core, manager: LastingManager, peers: PeerSlots) -> None:
        self._manager, self._peers, self._num_ranks = manager, peers, core.engine.num_ranks
        self._is_to_rest = core.engine.is_to_rest
        self._statistics, self._slots = core.statistics, core.slots
        self._mapped: dict[int, Mapped] = {}
        self._growing: dict[PeerDirectory, tuple[int, float]] = {}
        core.subscribers.plans.append(self._plan)
        core.subscribers.reports.append(self._apply_report)
        core.subscribers.load_end.append(self._count)
        core.subscribers.has_work.append(lambda _idle: self.has_work and not self._is_to_rest())

    # -- the step ------------------------------------------------------------------------------

    def _plan(self, plan: OffloadMetadata) -> OffloadMetadata:
        """End the step's lookups, and add the changes of windows to its plan."""
        self._manager.end_step()
        changes = tuple(self._changes(time.monotonic()))
        return replace(plan, windows=changes) if changes else plan

    def _changes(self, now: float) -> list[Window]:
        peers, changes = self._peers, []
        wanted = () if peers.is_cut_off else peers.directories.all
        usable = {peer: slots for peer in wanted if (slots := peer.usable_slots)}
        for gone in self._growing.keys() - usable.keys():
            del self._growing[gone]
            peers.directories.drop(gone)
        for seat, mapped in [*self._mapped.items()]:
            is_due = now - mapped.sent >= PATIENCE_SECONDS and self._is_pending(mapped)
            if mapped.ends and not mapped.ranks:
                del self._mapped[seat]
                peers.directories.drop(mapped.peer)
            elif not mapped.ends and (mapped.is_closed or mapped.peer not in usable):
                mapped.is_closed = True
                peers.open(mapped.peer, 0)
                if not peers.has_leases(mapped.peer):
                    mapped.ends, mapped.window, is_due = True, Window(seat, {}), True
                    mapped.since = now
            if is_due:
                mapped.sent = now
                changes.append(mapped.window)
        for peer, slots in usable.items():
            if peer.number not in self._mapped and self._is_complete(peer, slots, now):
                files = {rank: str(peer.seat / name) for rank, name in peer.files.items()}
                window = Window(peer.number, files, slots)
                self._mapped[peer.number] = Mapped(peer, window, now, now)
                changes.append(window)
        return changes

    def _is_complete(self, peer: PeerDirectory, slots: int, now: float) -> bool:
        """Return whether a peer has memory for all slots that it will get."""
        if slots == peer.contents.num_slots:
            self._growing.pop(peer, None)
            return True
        before, since = self._growing.get(peer, (0, now))
        self._growing[peer] = slots, (since if slots == before else now)
        return slots == before and now - since >= GROWING_SECONDS

    def _is_pending(self, mapped: Mapped) -> bool:
        """Return whether some rank has not reported a window as it was last sent."""
        return bool(mapped.ranks) if mapped.ends else len(mapped.ranks) < self._num_ranks

    # -- reports -------------------------------------------------------------------------------

    def _apply_report(self, report: OffloadWorkerMetadata) -> None:
        for rank, news in report.ranks.items():
            if news.windows is not None:
                self._take(rank, news.windows)

    def _take(self, rank: int, windows: Mapping[int, tuple[str, int]]) -> None:
        """Apply a rank's mapped windows. Only files of the window that was last sent count."""
        peers = self._peers
        for seat, mapped in self._mapped.items():
            path, slots = windows.get(seat, ("", 0))
            if mapped.ends:
                if not path:
                    mapped.ranks.pop(rank, None)
                continue
            mapped.ranks.pop(rank, None)
            if path == mapped.window.files.get(rank):
                mapped.ranks[rank] = slots
            is_whole = len(mapped.ranks) == self._num_ranks
            is_open = is_whole and not mapped.is_closed and not peers.is_cut_off
            peers.open(mapped.peer, min(mapped.ranks.values()) if is_open else 0)

    def _count(self, load: Transfer) -> None:
        """Count the bytes read from peers, over all ranks."""
        slots = len(load.slots) - len(self._manager.owned(load.slots))
        nbytes = slots * self._slots.block_bytes * self._num_ranks
        self._statistics.count("peers_read_bytes", nbytes)

    # -- queries -------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True while the engine must step for a window. Steps that run anyway try for longer."""
        peers, now = self._peers, time.monotonic()
        if any(
            self._is_pending(mapped) or not min(mapped.ranks.values(), default=1)
            for mapped in self._mapped.values()
            if now - mapped.since < PATIENCE_SECONDS
        ):
            return True
        listed = () if peers.is_cut_off else peers.directories.all
        if any(
            not mapped.ranks
            if mapped.ends
            else (mapped.is_closed or mapped.peer not in listed or not mapped.peer.usable_slots)
            and not peers.has_leases(mapped.peer)
            for mapped in self._mapped.values()
        ):
            return True  # the peer's memory is freed only once arenas and directory are unmapped
        return any(
            peer.number not in self._mapped and peer.usable_slots == peer.contents.num_slots
            for peer in listed
        )

    def gauges(self) -> dict[str, float]:
        """Return the gauges of `kv_offload.metrics`."""
        return {
            "peers": float(len(self._peers.opened)),
            "peer_slots": float(sum(self._peers.opened.values())),
            "leased_slots": float(self._peers.num_leases),
        }
