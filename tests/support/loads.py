"""Chooses for a test whether loads are synchronous; otherwise their expected time decides."""

from __future__ import annotations

from typing import Any

from kv_offload.scheduler.loads.admissions import may_be_synchronous


def set_synchronous_loads(offload: Any, allowed: bool) -> None:
    """Have no load be synchronous, or those that are short enough, as far as groups allow that."""
    admissions = offload._admissions
    admissions._may_be_synchronous = allowed and may_be_synchronous(admissions._prefixes.groups)
