"""Forked children of a test."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator


def passes_in_a_child(check: Callable[[], object]) -> bool:
    """Call a function in a forked child; return whether it returned."""
    child = os.fork()
    if child == 0:
        # A failure must not run the rest of the tests in the child, nor wait. The handler of
        # pytest-timeout would raise within a finaliser, where nobody hears of it.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            check()
            os._exit(0)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


@contextlib.contextmanager
def living_child() -> Iterator[int]:
    """Fork a child that does nothing, and has done what Python does after a fork."""
    (end, go_on), (is_there, there) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        os.close(go_on)
        os.write(there, b"!")
        os.read(end, 1)
        os._exit(0)
    try:
        assert os.read(is_there, 1)
        yield child
    finally:
        os.close(go_on)
        os.waitpid(child, 0)
        for descriptor in (end, there, is_there):
            os.close(descriptor)
