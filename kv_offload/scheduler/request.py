"""The requests of the engine: one record and one state machine each, all in one table.

    WAITING --admitted: computed, or loaded before its first forward--> READY
    WAITING --admitted: loaded while others run--> LOADING
    LOADING --every rank has ended the load--> READY
    READY --scheduled--> RUNNING
    LOADING, READY, RUNNING --looked up again--> WAITING
    any of them --ended--> ENDED

A request is looked up again after its load failed, and after the engine preempted it or put it
back. An ended request leaves the table, while its load continues (`transfers`).
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_offload.cache.prefix import SlotKey
from kv_offload.cache.slots import Slots
from kv_offload.engine import Request
from kv_offload.errors import RequestError
from kv_offload.hints import NO_HINTS, RequestHints, read_hints
from kv_offload.kv_hints import apply_kv_hints, find_envelope
from kv_offload.scheduler.loads.decision import Decision
from kv_offload.scheduler.statistics import Statistics

if TYPE_CHECKING:
    from kv_offload.tiers.promoter import Wait

logger = logging.getLogger(__name__)


def never() -> bool:
    """Return False."""
    return False


class Phase(enum.Enum):
    """The state of a request. Only the methods below change it."""

    WAITING = enum.auto()
    LOADING = enum.auto()
    READY = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True)
class Hit:
    """The result of a lookup: host memory has the tokens from `start_tokens` to `end_tokens`.

    Later lookups return it again while it is still valid.

    - `num_tokens`: number of tokens of the request.
    - `keys`: keys of the slots to load. `slots`: these slots, once an eviction requires a check.
    - `forgotten`: the manager's count when all keys were last seen to be readable.
    - `arrivals`: number of loads planned before the last check that none of them brings a key.
    - `found_at`: time of the lookup, on the monotonic clock in seconds.
    - `decision`: the last answer to the engine; None while nothing has been decided.
    """

    start_tokens: int
    num_tokens: int
    end_tokens: int
    keys: list[SlotKey]
    forgotten: int
    arrivals: int
    found_at: float
    slots: Slots | None = None
    decision: Decision | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens that host memory can bring."""
        return self.end_tokens - self.start_tokens

    @property
    def declined_tokens(self) -> int:
        """Number of tokens that are computed, because that is faster than loading them."""
        return self.tokens if self.decision is not None and not self.decision.tokens else 0


@dataclass(slots=True, eq=False)
class StoreCursor:
    """The GPU blocks of a request, and how far their stores have been planned."""

    request: Request
    block_ids: list[list[int]]
    """By cache group, from the first block on."""
    next_slot: list[int]
    """By cache group, the first slot whose store was neither planned nor skipped."""
    admission: int
    """Number of the admission that gave the blocks. It can share only blocks of earlier ones."""
    hints: RequestHints = NO_HINTS


@dataclass(slots=True, eq=False, weakref_slot=True)
class TrackedRequest:
    """One request, from its first lookup to its end."""

    request: Request
    phase: Phase = Phase.WAITING
    hints: RequestHints = NO_HINTS

    # Waiting.
    hit: Hit | None = None
    shared_tokens: int = 0
    """Length of the longest prefix that lacks only trailing windows and states; 0 if a complete
    prefix is longer."""
    still_waits: Callable[[], bool] = never
    """Returns True, in O(1), while another lookup would find that it must still wait."""
    load_deadline: float = math.inf
    """When it stops waiting for loads of others, on the monotonic clock in seconds."""
    tier_wait: Wait | None = None
    """Its lookup in the lower tiers, once there was one."""
    load_failed: bool = False
    """True if a load of this request has failed: nothing more is loaded for it."""
    served_by_peer_connector: bool = False
    """True if another connector loads its first tokens, so that ours would not be used."""

    # Loaded, not scheduled since.
    loaded: tuple[int, int] | None = None
    """First token of its load, and the end (exclusive)."""
    arriving: list[SlotKey] = field(default_factory=list)
    """Keys that its asynchronous load brings, until the engine's own prefix cache has them. Other
    requests wait for these."""

    cursor: StoreCursor | None = None
    """Its GPU blocks; None before it is admitted."""

    @property
    def request_id(self) -> str:
        """The engine's id of the request."""
        return self.request.request_id

    @property
    def prompt_tokens_left(self) -> int:
        """Tokens left to compute of the prompt, and of the answer before a preemption."""
        if self.phase is Phase.ENDED:
            return 0
        return int(self.request.num_tokens - self.request.num_computed_tokens)

    @property
    def may_load(self) -> bool:
        """True if it wants to load from host memory, and can."""
        wants = self.hints.load and not self.request.skip_reading_prefix_cache
        return wants and not self.load_failed and not self.served_by_peer_connector

    def looked_up(self) -> None:
        """Note that the engine looks it up; an earlier decision is void."""
        self.phase = Phase.WAITING
        self.still_waits = never
        if self.hit is not None:
            self.hit.decision = None

    def waits_no_more(self) -> None:
        """Stop waiting for loads of other requests."""
        self.still_waits, self.load_deadline = never, math.inf

    def load_planned(self, start_tokens: int, end_tokens: int, *, synchronous: bool) -> None:
        """Note that a load of these tokens fills the blocks that the request was just given."""
        self.phase = Phase.READY if synchronous else Phase.LOADING
        self.loaded = start_tokens, end_tokens

    def load_ended(self, *, ok: bool) -> None:
        """Note that every rank has ended its asynchronous load."""
        self.load_failed = self.load_failed or not ok
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def scheduled(self, block_ids: Sequence[Sequence[int]]) -> tuple[int, int] | None:
        """Note that it runs with these blocks; return the range of tokens loaded into them."""
        assert self.cursor is not None
        self.phase = Phase.RUNNING
        self.cursor.block_ids = [list(group) for group in block_ids]
        self.cursor.next_slot = [0] * len(block_ids)
        loaded, self.loaded = self.loaded, None
        return None if self.load_failed else loaded


class RequestTable:
    """The requests that have not ended, by id. The hints of each are read and counted once."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._warned = False
        self._requests: dict[str, TrackedRequest] = {}
        self.admitted = 0
        """Number of requests that hold GPU blocks, or did before a preemption."""
        self.admissions = 0
        """Number of times that a request was given blocks."""
        self.admissions_at_reset = 0
        """The same when the engine's own cache was last emptied, with all requests' blocks."""

    def get(self, request_id: str) -> TrackedRequest | None:
        """Return a request that was looked up and has not ended."""
        return self._requests.get(request_id)

    def track(self, request: Request) -> TrackedRequest:
        """Return the record of a request, made at the first call."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = TrackedRequest(request, hints=self._read_hints(request))
            self._requests[request.request_id] = tracked
        return tracked

    def _read_hints(self, request: Request) -> RequestHints:
        """Return the hints of a request; none if they are invalid and no front end refused it."""
        hints, envelope = self._read_params(request), find_envelope(request)
        if envelope is not None:
            hints, followed, ignored = apply_kv_hints(envelope, hints, request.cache_salt)
            self._statistics.count("followed_kv_hints", followed)
            self._statistics.count("ignored_kv_hints", ignored)
        return hints

    def _read_params(self, request: Request) -> RequestHints:
        if not request.kv_transfer_params:
            return NO_HINTS
        try:
            hints = read_hints(request.kv_transfer_params, request.cache_salt)
        except RequestError as error:
            self._statistics.count("ignored_hints", 1)
            if not self._warned:  # a client may send thousands
                self._warned = True
                logger.warning(
                    "%s. The request bypassed the check in vLLM's API server and was served as if "
                    "it had no hints; further ones are only counted (ignored_hints)",
                    error,
                )
            return NO_HINTS
        self._statistics.count("requests_with_hints", hints is not NO_HINTS)
        return hints

    def admit(self, tracked: TrackedRequest, block_ids: Sequence[Sequence[int]]) -> None:
        """Give a waiting request its blocks, by cache group; none of them has been stored."""
        self.admitted += tracked.cursor is None
        self.admissions += 1
        ids = [list(group) for group in block_ids]
        request, starts = tracked.request, [0] * len(ids)
        tracked.phase = Phase.READY
        tracked.cursor = StoreCursor(request, ids, starts, self.admissions, tracked.hints)
        tracked.tier_wait = tracked.loaded = None
        tracked.waits_no_more()

    def end(self, tracked: TrackedRequest) -> None:
        """End a request."""
        self.admitted -= tracked.cursor is not None
        tracked.phase = Phase.ENDED
        tracked.waits_no_more()
        del self._requests[tracked.request_id]

    def engine_was_reset(self) -> None:
        """Note that no request has blocks now; those that continue are admitted again."""
        self.admissions_at_reset = self.admissions

    def __iter__(self) -> Iterator[TrackedRequest]:
        return iter(self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)

    def check_integrity(self) -> None:
        """Raise `AssertionError` where a record contradicts itself or the counts."""
        assert self.admitted == sum(tracked.cursor is not None for tracked in self)
        for request_id, tracked in self._requests.items():
            assert tracked.request_id == request_id
            match tracked.phase:
                case Phase.WAITING:
                    assert not tracked.arriving, "others wait for a load that never runs"
                case Phase.LOADING:
                    assert tracked.loaded is not None
                    assert tracked.cursor is not None
                case Phase.READY | Phase.RUNNING:
                    assert tracked.cursor is not None
                    assert tracked.hit is None
                case Phase.ENDED:
                    raise AssertionError("a request that has ended is in the table")
