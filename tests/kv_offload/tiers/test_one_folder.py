"""Engines that are given one folder, one after or beside the other; disk and index are real."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_offload.errors import ConfigError
from tests.support import played_rank
from tests.support.played_cases import PROMPT
from tests.support.played_engine import PlayedEngine
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

FULL_BLOCKS = len(PROMPT) // 4


class FolderEngine(PlayedEngine):
    """An engine with a real disk; blocks there are used even if computing them is faster."""

    def __init__(self, folder: Path, nbytes: str, **more: Any) -> None:
        plugin = {
            "disk": {"path": str(folder), "bytes": nbytes},
            "load_or_recompute": "always_load",
        }
        super().__init__(plugin=plugin, async_scheduling=True, **more)

    def turn(self, name: str) -> tuple[float, float]:
        """Answer the prompt, which neither GPU nor host memory has; return slots read, written."""
        self.offload.manager.reset()
        assert self.scheduler.reset_prefix_cache()
        self.totals.clear()
        self.add(name, PROMPT, 2)

        def is_at_rest() -> bool:
            self.step(copies=True)
            return not self.scheduler.has_requests()

        wait_until(is_at_rest)
        assert name in self.answers
        assert self.totals["hook_errors"] == self.totals["tier_mismatches"] == 0
        return self.totals["promoted_slots"], self.totals["demoted_slots"]

    def end(self) -> None:
        for connector in (self.connector, *(rank.connector for rank in self.ranks)):
            connector.shutdown()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return what starts an engine with `disk.bytes` in the one folder, to be ended."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(played_rank, "manual_tiers", lambda: contextlib.nullcontext([]))

    @contextlib.contextmanager
    def start(nbytes: str, **more: Any) -> Iterator[FolderEngine]:
        engine = FolderEngine(tmp_path, nbytes, **more)
        yield engine
        engine.end()

    return start


@pytest.mark.parametrize("other", [{"nbytes": "2MiB"}, {"nbytes": "4MiB", "ranks": 2}])
def test_who_comes_second_is_refused_and_the_first_one_keeps_its_blocks(start, other):
    with start("4MiB") as first:
        assert first.turn("stored") == (0, FULL_BLOCKS)
        with pytest.raises(ConfigError, match=r"another engine uses it.*its own disk\.path"):
            start(**other).__enter__()
        assert first.turn("read") == (FULL_BLOCKS, 0)
    with start("4MiB") as again:
        assert again.turn("after a restart") == (FULL_BLOCKS, 0)


@pytest.mark.parametrize("other", [{"nbytes": "2MiB"}, {"nbytes": "4MiB", "ranks": 2}])
def test_who_comes_after_another_configuration_begins_empty(start, other):
    for keys in ({"nbytes": "4MiB"}, other, {"nbytes": "4MiB"}):
        with start(**keys) as engine:
            assert engine.turn("stored") == (0, FULL_BLOCKS)
            assert engine.turn("read") == (FULL_BLOCKS, 0)
