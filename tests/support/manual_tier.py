"""A tier below host memory whose copies run, or fail, when a test says so."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
from kv_swap.errors import TierError
from kv_swap.tiers.engine import TierCompletion, TierDirection, TierJob
from numpy.typing import NDArray

from kv_offload.tiers.directory import Question
from tests.support.manual_copies import GARBAGE


class ManualTier:
    """Keeps submitted jobs until `run`; verifies names as a disk does.

    A store also has what other engines with the same `description` put there.

    `faults` counts how many of the next rows fail with an error or turn out to be another block
    (`mismatch`), and how many of the next jobs are refused (`submit`). Records in `bad_places` can
    neither be written nor read.
    """

    is_remote = False
    name = "disk"

    def __init__(
        self,
        path: Path,
        num_slots: int,
        arena: NDArray[np.uint8],
        description: Mapping[str, str],
    ) -> None:
        self.num_slots = num_slots
        self.file_id = "manual"
        self.direct, self.continued, self.reason = False, False, "it is made by a test"
        self.description = description
        self.records: dict[Any, tuple[bytes, NDArray[np.uint8]]] = {}
        self.submitted: list[TierJob] = []
        self.faults: Counter[str] = Counter()
        self.bad_places: set[Any] = set()
        self.happened: Counter[str] = Counter()
        self.stuck = False
        self.revoke_problem = ""
        self._arena = arena
        self._done: list[TierCompletion] = []

    def revoke(self, timeout_seconds: float) -> str:
        self.happened["revoked"] += 1
        return self.revoke_problem

    def submit(self, job: TierJob) -> None:
        if self._fails("submit"):
            raise TierError("injected fault: refused")
        assert len(job.names) == len(job.pairs) > 0
        for slot, place in job.pairs.tolist():
            assert 0 <= slot < len(self._arena)
            assert 0 <= place < self.num_slots
        self.check_places(job)
        self.submitted.append(dataclasses.replace(job, pairs=job.pairs.copy()))

    def check_places(self, job: TierJob) -> None:
        for other in self.submitted:
            if TierDirection.DEMOTE in (job.direction, other.direction):
                shared = {*other.pairs[:, 1].tolist()} & {*job.pairs[:, 1].tolist()}
                assert not shared, "a slot of the tier is written while another job uses it"

    def place_of(self, place: int, name: bytes) -> Any:
        """Return the place of a record."""
        return place

    def _fails(self, site: str) -> bool:
        fails = self.faults[site] > 0
        self.faults[site] -= fails
        self.happened[site] += fails
        return fails

    def run(self, index: int = 0) -> None:
        """Run one job now. A failed row leaves garbage behind."""
        job = self.submitted.pop(index)
        promotes = job.direction is TierDirection.PROMOTE
        failed: list[int] = []
        mismatches = errors = 0
        for row, (slot, number) in enumerate(job.pairs.tolist()):
            place = self.place_of(number, job.names[row])
            if self._fails("error") or place in self.bad_places:
                errors += 1
                failed.append(row)
                if promotes:
                    self._arena[slot] = GARBAGE
                elif not self.is_remote:
                    self.records[place] = (b"torn", self._arena[slot].copy())
            elif not promotes:
                self.records[place] = (job.names[row], self._arena[slot].copy())
            else:
                name, content = self.records.get(place, (b"", self._arena[slot]))
                self._arena[slot] = content
                if self._fails("mismatch") or name != job.names[row]:
                    self._arena[slot] = GARBAGE
                    mismatches += not self.is_remote or place in self.records
                    failed.append(row)
                self.happened["promoted"] += 1
        good = len(job.pairs) - len(failed)
        self._done.append(
            TierCompletion(
                job.job_id,
                job.direction,
                tuple(failed),
                mismatches,
                good * self._arena.shape[1],
                0.001,
                TierError("injected fault") if errors else None,
            )
        )

    def run_all(self) -> None:
        while self.submitted:
            self.run()

    def poll(self) -> list[TierCompletion]:
        if not self.stuck:
            self.run_all()
        done, self._done = self._done, []
        return done

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Do nothing: no copy runs by itself."""


class ManualRemote(ManualTier):
    """Finds blocks by name alone, also those that other engines have stored."""

    is_remote = True
    name = "remote"
    contents: ClassVar[dict[str, dict[bytes, tuple[bytes, NDArray[np.uint8]]]]] = {}
    """The contents of all stores of this process, by `file_id`."""

    def __init__(
        self, make_client: object, arena: NDArray[np.uint8], description: Mapping[str, str]
    ) -> None:
        super().__init__(Path("store"), 2**31 - 1, arena, description)
        self.file_id = repr(sorted(description.items()))
        self.records = self.contents.setdefault(self.file_id, {})

    def check_places(self, job: TierJob) -> None:
        assert job.pairs[:, 1].tolist() == sorted({*job.pairs[:, 1].tolist()})

    def place_of(self, place: int, name: bytes) -> Any:
        return name


class ManualDirectory:
    """Answers at once what `ManualRemote` has, unless it is `stuck` or fails."""

    stuck = False
    fails = False

    def __init__(self, client: object, prefixes: Sequence[str], make_keys: object) -> None:
        self.parts = [ManualRemote.contents[prefix] for prefix in prefixes]
        self.asked: list[Question] = []
        self.closed = False

    def ask(self, question: Question) -> None:
        self.asked.append(question)
        self.answer()

    def answer(self) -> None:
        """Answer all pending questions."""
        for question in () if self.stuck else self.asked:
            if not question.is_done:
                question.answered = time.monotonic()
                if not self.fails:
                    names, parts = question.names, self.parts
                    question.found = [all(name in part for part in parts) for name in names]

    def close(self, timeout_seconds: float) -> None:
        self.closed = True


REMOTE = {"remote": {"kind": "mooncake", "address": "127.0.0.1:50051", "bytes": 0}}
"""The configuration of an engine with this store."""


def disk_config(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the configuration of an engine with a disk that no later one takes over."""
    return {"disk": {"path": str(folder), "bytes": "1MiB", "keep_on_restart": False, **more}}


@contextlib.contextmanager
def manual_remote() -> Iterator[None]:
    """Make engines built in this context share an empty `ManualRemote`, and look up its blocks."""
    with (
        mock.patch.dict("os.environ", PYTHONHASHSEED="0"),
        mock.patch("kv_offload.engines.vllm.start.tiers.RemoteDirectory", ManualDirectory),
        mock.patch.object(ManualRemote, "contents", {}),
    ):
        yield


@contextlib.contextmanager
def manual_tiers() -> Iterator[list[ManualTier]]:
    """Make ranks that register KV caches in this context use a `ManualTier` or `ManualRemote`."""
    made: list[ManualTier] = []

    def keep(kind: Callable[..., ManualTier]) -> Callable[..., ManualTier]:
        def make(*arguments: Any) -> ManualTier:
            made.append(kind(*arguments))
            return made[-1]

        return make

    with (
        mock.patch("kv_swap.tiers.disk.DiskTier", keep(ManualTier)),
        mock.patch("kv_swap.tiers.remote.tier.RemoteTier", keep(ManualRemote)),
    ):
        yield made
