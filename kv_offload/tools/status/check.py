"""Checks a server's figures against limits, for probes and scripts."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

from kv_offload.tools.status.figures import Figures

LIMITS: dict[str, tuple[str, float | None, str]] = {
    "--max-copy-seconds": ("oldest_copy_seconds", 60, "age of the oldest load or store"),
    "--max-unread-tiers": ("tiers_left_alone", 0, "engines that leave a disk or remote store out"),
    "--max-load-failures": ("load_failures", None, "loads that failed since the start"),
    "--max-lost-requests": ("lost_requests", None, "requests that a failed load ended"),
    "--max-errors": ("errors", None, "errors of every kind since the start"),
    "--max-paused-stores": ("stores_paused", None, "engines that paused stores"),
}
"""For each option: the figure, its default limit (None if not judged), and a description."""

HIT_RATIO = "--min-hit-ratio"
ENOUGH_TOKENS = 100_000
"""Minimum looked-up tokens before the hit ratio is judged: a new server has no hits."""


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add `--check` and its limits, each of which implies it."""
    limits = parser.add_argument_group("limits of --check")
    limits.add_argument("--check", action="store_true", help="exit with 1 if a limit is passed")
    for option, (_, default, description) in LIMITS.items():
        shown = "not judged" if default is None else f"{default:g}"
        text = f"{description} (default: {shown})"
        limits.add_argument(option, type=_limit, metavar="N", help=text)
    limits.add_argument(
        HIT_RATIO,
        type=_share,
        metavar="SHARE",
        help=f"least share of looked-up tokens that are loaded, such as 0.2, once {ENOUGH_TOKENS:,}"
        " were looked up (default: not judged)",
    )


def _limit(text: str, most: float = math.inf) -> float:
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not (0 <= limit <= most and math.isfinite(limit)):
        bound = "0 or more" if most == math.inf else f"from 0 to {most:g}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, {bound}")
    return limit


def _share(text: str) -> float:
    return _limit(text, 1.0)


def is_asked_for(arguments: argparse.Namespace) -> bool:
    """Return whether the arguments ask for a check."""
    return arguments.check or any(
        _given(arguments, option) is not None for option in (*LIMITS, HIT_RATIO)
    )


def problems(figures: Figures, arguments: argparse.Namespace) -> Iterator[str]:
    """Yield a line for each limit that is exceeded."""
    for option, (name, default, description) in LIMITS.items():
        given = _given(arguments, option)
        limit, value = default if given is None else given, figures.values[name]
        if limit is not None and value > limit:
            yield f"{description}: {value:,.10g}, more than {option} {limit:g}"
    least, ratio = _given(arguments, HIT_RATIO), figures.hit_ratio
    if least is not None and figures.values["lookup_tokens"] >= ENOUGH_TOKENS and ratio < least:
        yield f"share of looked-up tokens that are loaded: {ratio:.3f}, less than {least:g}"


def _given(arguments: argparse.Namespace, option: str) -> float | None:
    given: float | None = getattr(arguments, option.removeprefix("--").replace("-", "_"))
    return given
