"""Fixtures of the tests of a rank's half."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.rank import Gate, Rank


@pytest.fixture
def rank() -> Iterator[Rank]:
    """A rank that has started, and told that its slots are ready."""
    from tests.support.rank import Rank

    made = Rank().start()
    made.report()
    yield made
    made.half.shutdown()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Control over the copies."""
    from tests.support.rank import Gate

    made = Gate()
    monkeypatch.setattr("kv_swap.host.transfers.copy_runs", made.copy_runs)
    yield made
    made.opened.set()
