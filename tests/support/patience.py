"""Requests that wait for a tier on any machine, however busy: one that does not proves nothing."""

from __future__ import annotations

import pytest

from kv_offload.tiers import directory, promoter

SECONDS = 60.0


def wait_for_answers(patch: pytest.MonkeyPatch) -> None:
    """Make requests of this process wait until a shared tier has answered lookups."""
    patch.setattr(directory, "PATIENCE_SECONDS", SECONDS)


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """Make them also wait for reads, here and in processes forked later."""
    wait_for_answers(patch)
    patch.setattr(promoter, "MIN_WAIT_SECONDS", SECONDS)
    patch.setattr(promoter, "MAX_WAIT_SECONDS", SECONDS)
