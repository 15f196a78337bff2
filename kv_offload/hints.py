"""A request's hints about its blocks in `kv_transfer_params`, and their validation.

    {"kv_offload": {"store": true, "max_load_tokens": 4096, "retain_seconds": 600}}

Other keys of `kv_transfer_params` belong to other connectors and are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kv_offload.config.file import show
from kv_offload.errors import RequestError

KEY = "kv_offload"
"""The key of a request's hints in its `kv_transfer_params`."""

MAX_DEPTH = 32
"""Maximum nesting depth of `kv_transfer_params`; connectors use three levels. At a depth of 470 the
core of vLLM 0.32 fails to pickle them for its ranks and exits."""
MAX_RETAIN_SECONDS = 24 * 3600
MAX_TOKENS = 2**31 - 1
_ALLOWED = {
    "store": "true or false",
    "load": "true or false",
    "max_load_tokens": f"an integer from 1 to {MAX_TOKENS}; to load nothing, load: false",
    "retain_seconds": f"a number above 0, up to {MAX_RETAIN_SECONDS} (a day)",
}


@dataclass(frozen=True, slots=True)
class Keep:
    """Retain blocks for `owner`, the request's `cache_salt`, for `seconds` after each use."""

    owner: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The hints of one request; the defaults change nothing."""

    store: bool = True
    load: bool = True
    max_load_tokens: int | None = None
    keep: Keep | None = None

    def load_limit(self, start_tokens: int, limit_tokens: int) -> int:
        """Return the token up to which loading is allowed, at most `limit_tokens`."""
        if self.max_load_tokens is None:
            return limit_tokens
        return min(limit_tokens, start_tokens + self.max_load_tokens)


NO_HINTS = RequestHints()


def read_hints(params: Any, owner: str | None = None) -> RequestHints:
    """Parse a request's `kv_transfer_params`.

    Raises `RequestError` for an unknown key or a value outside its limits.
    """
    if not isinstance(params, Mapping) or KEY not in params:
        return NO_HINTS
    given = params[KEY]
    if not isinstance(given, Mapping):
        raise RequestError(
            f"kv_transfer_params.{KEY}: {show(given)} is not an object. Allowed in it: "
            f"{', '.join(_ALLOWED)}"
        )
    for name, value in given.items():
        if name not in _ALLOWED:
            raise RequestError(
                f"kv_transfer_params.{KEY}.{show(name)[1:-1]}: unknown key. Remove it, or write "
                f"one of {', '.join(_ALLOWED)}"
            )
        if not is_allowed(name, value):
            raise RequestError(
                f"kv_transfer_params.{KEY}.{name}: {show(value)} is not allowed. Give "
                f"{_ALLOWED[name]}"
            )
    _check_together(given)
    seconds = given.get("retain_seconds")
    keep = None if seconds is None else Keep(owner, float(seconds))
    return RequestHints(
        given.get("store", True), given.get("load", True), given.get("max_load_tokens"), keep
    )


def check_depth(params: Any) -> None:
    """Raise `RequestError` if `kv_transfer_params`, of any connector, are nested too deeply.

    Takes time linear in their number of values.
    """
    level = [params]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise RequestError(
        f"kv_transfer_params: nested more than {MAX_DEPTH} levels deep. Give fewer levels: much "
        "deeper ones would end vLLM's engine"
    )


def _children(value: Any) -> Iterator[Any]:
    """Yield the objects and lists directly inside a JSON value."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    yield from (child for child in value if isinstance(child, Mapping | list | tuple))


def is_allowed(name: str, value: Any) -> bool:
    """Return whether a hint may have a value."""
    if name in ("store", "load"):
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if name == "retain_seconds":
        return 0 < value <= MAX_RETAIN_SECONDS  # also refuses NaN
    return isinstance(value, int) and 1 <= value <= MAX_TOKENS


def _check_together(given: Mapping[str, Any]) -> None:
    """Raise `RequestError` if two hints contradict each other."""
    for name, contradicts in (("max_load_tokens", "load"), ("retain_seconds", "store")):
        if name in given and given.get(contradicts) is False:
            raise RequestError(
                f"kv_transfer_params.{KEY}.{name}: {show(given[name])} next to {contradicts}: "
                "false, which rules it out. Remove one of the two"
            )
