"""The plugin's environment variable, and names that were meant to be it or to set a key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping

from kv_offload.errors import ConfigError

PREFIX = "KV_OFFLOAD_"
_FILE = "CONFIG_FILE"
FILE_VARIABLE = f"{PREFIX}{_FILE}"

_NOT_MEANT_FOR_US = re.compile(
    rf"{PREFIX}(BENCH_.*|(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_[0-9]+_(TCP|UDP|SCTP).*)?))"
)
"""What this repository's benches read, and what Kubernetes puts into every container beside a
Service named `kv-offload`: `KV_OFFLOAD_SERVICE_HOST`, `KV_OFFLOAD_PORT_8000_TCP_ADDR`."""


def check_variables(environ: Mapping[str, str], keys: Collection[str]) -> None:
    """Raise `ConfigError` for a variable named after one of the configuration's `keys`.

    Whoever sets `KV_OFFLOAD_CPU_BYTES` wants that value, and the engine would take another.
    """
    for name, value in _other_variables(environ):
        key = name.removeprefix(PREFIX).lower()
        if key in keys:
            raise ConfigError(
                f"environment: {name}: {value[:100]!r}: no variable sets a key. Write {key} into "
                f"the file that {FILE_VARIABLE} names, or into kv_connector_extra_config, and "
                f"unset {name}."
            )


def unknown_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a warning for each variable that begins like ours and is not read.

    It may be somebody else's, such as a start script's, so it stops no engine.
    """
    warnings = []
    for name, _ in _other_variables(environ):
        near = difflib.get_close_matches(name.removeprefix(PREFIX), [_FILE], n=1)
        hint = f"Did you mean {FILE_VARIABLE}?" if near else "Unset it unless another reads it."
        warnings.append(
            f"environment: {name} is not read: the plugin reads {FILE_VARIABLE} only. {hint}"
        )
    return tuple(warnings)


def _other_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in sorted(environ.items()):
        is_ours = name.startswith(PREFIX) and not _NOT_MEANT_FOR_US.fullmatch(name)
        if is_ours and value and name != FILE_VARIABLE:
            yield name, value
