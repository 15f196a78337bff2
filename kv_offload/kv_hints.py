"""A router's hints about a request's KV: vLLM's envelope of versioned actions.

    {"protocol_version": "0.1", "message_id": "m", "actions": [{"action_id": "a",
     "action_type": "kv.retain", "action_version": "1.0",
     "payload": {"ttl_seconds": 600}}]}

vLLM 0.33 and later carry it as `kv_hints` of a request, without giving actions a meaning. Dynamo
also puts it into `kv_transfer_params.kv_hint`. The actions are those of Dynamo and SGLang, version
1.0:

- `kv.retain`: retain the blocks of this request, as with `retain_seconds`, without priorities.
- `kv.evict`, `kv.deref`: the session ends, so store nothing more of this request.
- `kv.prefetch`: read lower tiers while the request is queued; done without the hint, too.
- `kv.demote`: write blocks to lower tiers; done without the hint, too.

Hints are advice. Actions of other types and versions are for other components, such as `kv.fetch`
for engines that read from each other; malformed actions change nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kv_offload.hints import Keep, RequestHints, is_allowed

KEY = "kv_hint"
"""The key under which Dynamo puts the envelope in `kv_transfer_params`."""

MAX_ACTIONS = 64
"""Maximum number of actions of one envelope that are read."""

VERSION = "1"
"""Major version of the supported actions."""

ENDS = ("kv.evict", "kv.deref")
ALWAYS_DONE = ("kv.prefetch", "kv.demote")


def find_envelope(request: Any) -> Any:
    """Return the envelope of a request, or None."""
    found = getattr(request, "kv_hints", None)
    params = request.kv_transfer_params
    if found is None and isinstance(params, Mapping):
        found = params.get(KEY)
    return found


def apply_kv_hints(
    envelope: Any, hints: RequestHints, owner: str | None
) -> tuple[RequestHints, int, int]:
    """Add a router's actions to the client's hints, which win in case of conflict.

    `owner` retains the blocks. Returns the hints, and the numbers of followed and ignored actions.
    """
    actions = _get(envelope, "actions")
    if not isinstance(actions, Sequence) or isinstance(actions, str | bytes):
        return hints, 0, 1
    followed = 0
    for action in actions[:MAX_ACTIONS]:
        hinted = _apply(action, hints, owner)
        if hinted is not None:
            hints, followed = hinted, followed + 1
    return hints, followed, len(actions) - followed


def _apply(action: Any, hints: RequestHints, owner: str | None) -> RequestHints | None:
    """Return the hints after one action; None if it is not followed."""
    kind, version = _get(action, "action_type"), _get(action, "action_version")
    payload = _get(action, "payload")
    is_known = isinstance(version, str) and version.partition(".")[0] == VERSION
    if not is_known or not isinstance(payload, Mapping):
        return None
    # Block hashes alone are not followed: other requests of the session may share their blocks.
    if payload.get("include_current_request", True) is not True:
        return None
    if payload.get("execute_at", "request_completion") != "request_completion":
        return None
    if kind in ALWAYS_DONE:
        return hints
    if kind in ENDS:
        return dataclasses.replace(hints, store=hints.store and hints.keep is not None)
    if kind != "kv.retain":
        return None
    seconds = payload.get("ttl_seconds", 0)
    if not is_allowed("retain_seconds", seconds) or hints.keep is not None or not hints.store:
        return None
    return dataclasses.replace(hints, keep=Keep(owner, float(seconds)))


def _get(part: Any, name: str) -> Any:
    """Return a field of a vLLM struct or of a JSON object; None if it is absent."""
    return part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)
