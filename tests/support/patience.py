"""Requests that wait for a tier however busy the machine is; one that does not proves nothing."""

from __future__ import annotations

import pytest

from kv_offload.tiers import directory, promoter

SECONDS = 60.0


def wait_for_answers(patch: pytest.MonkeyPatch) -> None:
    """Have requests of this process wait until a shared tier says what it has."""
    patch.setattr(directory, "PATIENCE_SECONDS", SECONDS)


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """Have them wait for what it brings, too. Processes forked later do as well."""
    wait_for_answers(patch)
    patch.setattr(promoter, "MIN_WAIT_SECONDS", SECONDS)
    patch.setattr(promoter, "MAX_WAIT_SECONDS", SECONDS)
