"""What standard output can show."""

from __future__ import annotations

import os
import sys


def is_terminal() -> bool:
    """Whether standard output is a terminal; what goes elsewhere has no escapes at all."""
    return sys.stdout is not None and sys.stdout.isatty()  # it is None where a shell has closed it


def shows_colour() -> bool:
    """Whether text may have colours and weights: on a terminal, unless `NO_COLOR` is set."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
