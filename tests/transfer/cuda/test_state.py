"""What becomes of an engine's state; the device is played."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
from kv_swap.cuda.state import State, release


class Lane:
    """Its stream can be waited for in the process that made it, as CUDA has it."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.stream = SimpleNamespace(stream=self)

    def synchronize(self) -> None:
        if os.getpid() != self.process:
            raise RuntimeError("CUDA error: initialization error")


@pytest.mark.parametrize("forked", [False, True])
def test_only_the_process_that_made_it_lets_go_of_what_copies_use(
    forked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lanes: Any = {"before_compute": Lane()}
    state = State(lanes, None, None, None, keep_alive=("a KV tensor",))
    if forked:
        monkeypatch.setattr(os, "getpid", lambda: -1)
    release(state)
    assert not caplog.records
    assert state.keep_alive == (("a KV tensor",) if forked else ())
    assert len(state.lanes) == forked
