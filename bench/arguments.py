"""Arguments shared by several benches."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def names(allowed: Collection[str]) -> Callable[[str], list[str]]:
    """Return a parser for a comma-separated list of words from `allowed`."""

    def split(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(allowed):
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(allowed)}"
            )
        return chosen

    return split
