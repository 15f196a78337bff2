"""Units of Grafana's panels: by what values are divided, and what stands behind them."""

from __future__ import annotations

PLAIN = {"percentunit": (0.01, "%"), "short": (1, ""), "cps": (1, "c/s")}
STEPS = {
    "s": [(1e-3, "ms"), (1, "s")],
    "Bps": [(1000**power, f"{prefix}B/s") for power, prefix in enumerate(["", "k", "M", "G"])],
    "bytes": [
        (1024**power, f"{prefix}B") for power, prefix in enumerate(["", "Ki", "Mi", "Gi", "Ti"])
    ],
}


def scale(unit: str, largest: float) -> tuple[float, str]:
    """Return a divisor and the name of the unit in which values up to `largest` are readable.

    A unit that no panel of ours has raises `KeyError`.
    """
    if unit in PLAIN:
        return PLAIN[unit]
    steps = STEPS[unit]
    return next((step for step in reversed(steps) if largest >= step[0]), steps[0])
