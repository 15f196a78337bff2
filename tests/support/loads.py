"""Set whether loads are synchronous, instead of letting their expected time decide."""

from __future__ import annotations

from typing import Any

from kv_offload.scheduler.loads.admissions import may_be_synchronous


def set_synchronous_loads(offload: Any, allowed: bool) -> None:
    """Make no load synchronous, or all those that are short enough where the groups allow it."""
    admissions = offload._admissions
    admissions._may_be_synchronous = allowed and may_be_synchronous(admissions._prefixes.groups)
