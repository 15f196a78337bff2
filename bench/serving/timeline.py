"""When a hit was looked up, planned, copied and computed: watched through our connector's hooks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.conversations import Turn

SPANS = {
    "until it is looked up": ("asked", "looked up"),
    "until it is planned": ("looked up", "planned"),
    "until its copies are submitted": ("planned", "submitted"),
    "until their end is seen": ("submitted", "ended"),
    "until it is computed": ("ended", "scheduled"),
    "until its first token": ("scheduled", "first token"),
}
"""The spans of a hit that waits for its load, between the events that `Hit` has."""


@dataclass
class Hit:
    """One request that was served from host memory; `events` in seconds of one clock."""

    synchronous: bool
    nbytes: int
    copying: float = 0.0
    """What its copies took on the device, with those of the same step."""
    events: dict[str, float] = field(default_factory=dict)


class HitTimeline:
    """Watches both halves of a connector where they live in this process; costs some microseconds.

    What happens to a request is kept until `take` or `forget`.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget what has happened."""
        self._events: dict[str, dict[str, float]] = {}
        self._hits: dict[str, Hit] = {}
        self._jobs: dict[int, list[str]] = {}

    def put_on(self, connector: Any) -> None:
        """Watch one half."""
        if connector.offload_worker is not None:
            after(connector, "register_kv_caches", lambda *_: self._watch_copies(connector))
            return
        after(connector, "get_num_new_matched_tokens", self._looked_up)
        after(connector, "build_connector_meta", self._planned)

    def _watch_copies(self, connector: Any) -> None:
        transfer = connector.offload_worker.transfer
        after(transfer, "submit", self._submitted)
        after(transfer, "poll", self._polled)

    def _note(self, request_id: str, event: str) -> None:
        self._events.setdefault(request_id, {}).setdefault(event, time.perf_counter())

    def _looked_up(self, _answer: Any, request: Any, _computed: int) -> None:
        self._note(request.request_id, "looked up")

    def _planned(self, metadata: Any, output: Any) -> None:
        arrival: list[str] = []
        for job in metadata.loads:
            self._note(job.request_id, "planned")
            self._hits[job.request_id] = Hit(job.synchronous, len(job.pairs))
            if job.synchronous:
                arrival.append(job.request_id)  # one transfer, under the id of the first
            self._jobs[job.job_id] = arrival if job.synchronous else [job.request_id]
        for request_id in output.num_scheduled_tokens:
            self._note(request_id, "scheduled")

    def _submitted(self, _nothing: Any, job: Any) -> None:
        if job.direction.name == "LOAD":
            for request_id in self._jobs.get(job.job_id, ()):
                self._note(request_id, "submitted")

    def _polled(self, completions: Any) -> None:
        for done in completions:
            if done.direction.name == "LOAD":
                for request_id in self._jobs.pop(done.job_id, ()):
                    self._hits[request_id].copying = done.seconds
                    self._note(request_id, "ended")

    def take(self, turns: Sequence[Turn]) -> list[Hit]:
        """Return the hits among these requests with all their events, and forget them.

        vLLM gives a request an id of its own: that of its user, a dash and something random.
        """
        asked = {turn.request_id: turn for turn in turns}
        hits = []
        for request_id, hit in self._hits.items():
            turn = asked.get(request_id) or asked.get(request_id.rpartition("-")[0])
            if turn is not None:
                hit.events = {"asked": turn.asked, **self._events[request_id]}
                hit.events["first token"] = turn.arrivals[0]
                hits.append(hit)
        self.forget()
        return hits


def after(owner: Any, name: str, call: Callable[..., None]) -> None:
    """Have `call(result, *arguments)` made after every call of a method of one object."""
    method = getattr(owner, name)

    def watched(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        call(result, *arguments)
        return result

    setattr(owner, name, watched)


def describe(hits: Sequence[Hit], block_bytes: int) -> dict[str, Any]:
    """Return medians of the spans by kind of load, and the hit of the median time to first token.

    The end of a synchronous load is seen after the forward that it comes before, so its last span
    begins with its submission.
    """
    result: dict[str, Any] = {}
    for name, synchronous in (("waits for its load", False), ("loads before the forward", True)):
        chosen = [
            hit for hit in hits if hit.synchronous is synchronous and _is_whole(hit, synchronous)
        ]
        if not chosen:
            continue
        spans = dict(SPANS)
        if synchronous:
            del spans["until it is computed"], spans["until their end is seen"]
            spans["until its first token"] = ("submitted", "first token")
        chosen.sort(key=lambda hit: hit.events["first token"] - hit.events["asked"])
        middle = chosen[len(chosen) // 2]
        result[name] = {
            "hits": len(chosen),
            "bytes": block_bytes * statistics.median(hit.nbytes for hit in chosen),
            "copying": statistics.median(hit.copying for hit in chosen),
            "spans": {
                span: statistics.median(hit.events[end] - hit.events[begin] for hit in chosen)
                for span, (begin, end) in spans.items()
            },
            "median hit": {
                "bytes": block_bytes * middle.nbytes,
                "copying": middle.copying,
                **{
                    event: when - middle.events["asked"]
                    for event, when in sorted(middle.events.items(), key=lambda item: item[1])
                },
            },
        }
    return result


def _is_whole(hit: Hit, synchronous: bool) -> bool:
    needed = {event for span in SPANS.values() for event in span}
    return needed - {"ended" if synchronous else ""} <= hit.events.keys()
