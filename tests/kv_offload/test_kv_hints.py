"""A router's KV hints: which actions are followed; malformed ones change nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kv_offload.hints import NO_HINTS, Keep, RequestHints
from kv_offload.kv_hints import MAX_ACTIONS, apply_kv_hints, find_envelope


def action(kind: str, version: str = "1.0", **payload: Any) -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}


def envelope(*actions: Any) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}


DYNAMO = {"execute_at": "request_completion", "include_current_request": True}
"""What Dynamo's example policy adds to each payload, next to the session's block hashes."""


@pytest.mark.parametrize(
    ("hint", "hints"),
    [
        (action("kv.retain", ttl_seconds=2.5, priority=3), RequestHints(keep=Keep("me", 2.5))),
        (
            action("kv.retain", ttl_seconds=60, priority=99, block_hashes=["11"], **DYNAMO),
            RequestHints(keep=Keep("me", 60.0)),
        ),
        (action("kv.retain", "1.7", ttl_seconds=1), RequestHints(keep=Keep("me", 1.0))),
        (
            action("kv.evict", block_hashes=["11", "18446744073709551615"], **DYNAMO),
            RequestHints(False),
        ),
        (action("kv.deref"), RequestHints(False)),
        (action("kv.prefetch"), NO_HINTS),
        (action("kv.demote", session_id="agent-42"), NO_HINTS),
    ],
)
def test_what_is_followed(hint, hints):
    assert apply_kv_hints(envelope(hint), NO_HINTS, "me") == (hints, 1, 0)
    typed = SimpleNamespace(actions=[SimpleNamespace(**hint)])
    assert apply_kv_hints(typed, NO_HINTS, "me") == (hints, 1, 0), "vLLM's own structs"


@pytest.mark.parametrize(
    "hint",
    [
        action("kv.fetch", source_control_endpoint="tcp://127.0.0.1:1", block_hashes=[11]),
        action("kv.retain", "2.0", ttl_seconds=60),
        action("kv.retain"),
        *(action("kv.retain", ttl_seconds=bad) for bad in (0, -1, float("nan"), 1e9, "60", True)),
        action("kv.evict", execute_at="now"),
        action("kv.evict", include_current_request=False),
        {**action("kv.evict"), "payload": None},
        {**action("kv.evict"), "action_version": 1},
        {},
        None,
        "kv.evict",
        7,
    ],
)
def test_what_is_not_followed_changes_nothing_and_hides_nothing(hint):
    assert apply_kv_hints(envelope(hint), NO_HINTS, None) == (NO_HINTS, 0, 1)
    found = apply_kv_hints(envelope(hint, action("kv.evict")), NO_HINTS, None)
    assert found == (RequestHints(store=False), 1, 1)


@pytest.mark.parametrize("bad", [{}, {"actions": None}, {"actions": "kv.evict"}, "nonsense", 3, []])
def test_an_envelope_without_actions_changes_nothing(bad):
    assert apply_kv_hints(bad, NO_HINTS, None) == (NO_HINTS, 0, 1)


def test_the_number_of_actions_is_bounded():
    many = [action("kv.prefetch")] * 1000 + [action("kv.evict")]
    found = apply_kv_hints(envelope(*many), NO_HINTS, None)
    assert found == (NO_HINTS, MAX_ACTIONS, 1001 - MAX_ACTIONS)


def test_what_the_client_asked_for_counts():
    asked = RequestHints(keep=Keep("me", 5.0))
    for hint in (action("kv.retain", ttl_seconds=60), action("kv.evict")):
        assert apply_kv_hints(envelope(hint), asked, "me")[0] == asked
    unwanted = RequestHints(store=False)
    found = apply_kv_hints(envelope(action("kv.retain", ttl_seconds=60)), unwanted, "me")
    assert found == (unwanted, 0, 1)


def test_where_the_envelope_is():
    both = {"kv_hint": {"from": "dynamo"}}
    assert find_envelope(SimpleNamespace(kv_transfer_params=both)) == {"from": "dynamo"}
    request = SimpleNamespace(kv_transfer_params=both, kv_hints={"from": "vLLM 0.33"})
    assert find_envelope(request) == {"from": "vLLM 0.33"}
    assert find_envelope(SimpleNamespace(kv_transfer_params=None, kv_hints=None)) is None
