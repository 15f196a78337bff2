"""Hints that requests may give in `kv_transfer_params`, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from kv_offload.errors import RequestError
from kv_offload.hints import MAX_DEPTH, NO_HINTS, Keep, RequestHints, check_depth, read_hints


@pytest.mark.parametrize(
    "params",
    [None, {}, {"do_remote_prefill": True}, [1], {"kv_offload": {}}],
    ids=["none", "empty", "another connector's", "no object", "nothing said"],
)
def test_requests_without_hints(params):
    assert read_hints(params) == NO_HINTS


def test_all_that_may_be_said():
    params = {"kv_offload": {"max_load_tokens": 4096, "retain_seconds": 1.5}}
    hints = RequestHints(max_load_tokens=4096, keep=Keep("tenant", 1.5))
    assert read_hints(params, "tenant") == hints
    assert read_hints({"kv_offload": {"store": False, "load": False}}) == RequestHints(False, False)
    longest = read_hints({"kv_offload": {"retain_seconds": 86400}, "remote_host": "x"})
    assert longest.keep == Keep(None, 86400)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "kv_offload: 5 is not an object. Allowed in it: store, load, "),
        ({"retain": 5}, "kv_offload.retain: unknown key. Remove it, or write one of store, "),
        ({5: 1}, "kv_offload.: unknown key."),
        ({"store": "no"}, "kv_offload.store: 'no' is not allowed. Give true or false"),
        ({"load": 0}, "kv_offload.load: 0 is not allowed. Give true or false"),
        ({"max_load_tokens": 0}, "max_load_tokens: 0 is not allowed. Give an integer from 1 to "),
        ({"max_load_tokens": 1.0}, "max_load_tokens: 1.0 is not allowed."),
        ({"max_load_tokens": 2**31}, "max_load_tokens: 2147483648 is not allowed."),
        ({"retain_seconds": 0}, "retain_seconds: 0 is not allowed. Give a number above 0, up to "),
        ({"retain_seconds": float("nan")}, "retain_seconds: nan is not allowed."),
        ({"retain_seconds": 86401}, "retain_seconds: 86401 is not allowed."),
        ({"retain_seconds": True}, "retain_seconds: True is not allowed."),
        ({"retain_seconds": 1, "priority": 9}, "priority: unknown key. Remove it, or write one "),
        ({"store": False, "retain_seconds": 60}, "retain_seconds: 60 next to store: false"),
        ({"load": False, "max_load_tokens": 6}, "max_load_tokens: 6 next to load: false"),
    ],
)
def test_what_is_wrong_is_refused_with_the_value_the_limit_and_the_remedy(given, message):
    with pytest.raises(RequestError) as caught:
        read_hints({"kv_offload": given})
    assert str(caught.value).startswith("kv-offload: kv_transfer_params.")
    assert message in str(caught.value)


@pytest.mark.parametrize("wrap", [lambda value: {"a": value}, lambda value: [1, value]])
def test_what_is_nested_too_deeply_for_vllm_to_send_is_refused(wrap):
    params: Any = {"other": 1}
    for _ in range(MAX_DEPTH - 1):
        params = wrap(params)
    check_depth(params)
    deep = wrap(params)
    with pytest.raises(RequestError, match=r"kv_transfer_params: nested more than 32 levels deep"):
        check_depth(deep)
    for _ in range(100_000):
        deep = wrap(deep)
    with pytest.raises(RequestError):
        check_depth(deep)
    while deep != params:  # Python frees nested objects recursively
        deep = deep["a"] if isinstance(deep, dict) else deep[1]
