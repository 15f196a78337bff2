"""Runs `kv-offload` in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import pytest

from kv_offload.tools.main import main


class Done(NamedTuple):
    """How a command ended, and what it printed."""

    status: Any
    out: str
    err: str


Command: TypeAlias = Callable[..., Done]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*words: object) -> Done:
        try:
            status: Any = main([str(word) for word in words])
        except SystemExit as ended:  # argparse
            status = ended.code
        return Done(status, *capsys.readouterr())

    return run
