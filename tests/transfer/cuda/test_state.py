"""What becomes of an engine's state; the device is played."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
from kv_swap.cuda import state as cuda_state
from kv_swap.cuda.state import State, release


class Lane:
    """Its stream can be waited for in the process that made it, as CUDA has it."""

    def __init__(self, *, failing: bool = False) -> None:
        self.process = os.getpid()
        self.stream = SimpleNamespace(stream=self)
        self.failing = failing
        self.waits = 0

    def synchronize(self) -> None:
        if os.getpid() != self.process or self.failing:
            raise RuntimeError("CUDA error: initialization error")
        self.waits += 1


@pytest.mark.parametrize("forked", [False, True])
def test_only_the_process_that_made_it_lets_go_of_what_copies_use(
    forked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lanes: Any = {"before_compute": Lane()}
    state = State(lanes, None, None, keep_alive=("a KV tensor",))
    if forked:
        monkeypatch.setattr(os, "getpid", lambda: -1)
    release(state)
    assert not caplog.records
    assert state.keep_alive == (("a KV tensor",) if forked else ())
    assert len(state.lanes) == forked


@pytest.mark.parametrize("failing", [False, True])
def test_all_is_waited_for_once_and_kept_where_that_fails(
    failing: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy that may still run must not find its memory freed."""
    kept: list[State] = []
    monkeypatch.setattr(cuda_state, "_LEAKED", kept)
    lanes: Any = [Lane(), Lane(failing=failing)]
    state = State(dict(enumerate(lanes)), None, None, keep_alive=("a KV tensor",))
    release(state)
    if failing:
        assert kept == [state]
        assert state.keep_alive == ("a KV tensor",)
        assert "what they use is not freed" in caplog.text
    else:
        assert [waited.waits for waited in lanes] == [1, 1]
        assert not kept
        assert state.keep_alive == ()
