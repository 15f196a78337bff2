"""The plugin's environment variable, and names that were meant to be it or to set a key."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from kv_offload.errors import ConfigError

PREFIX = "KV_OFFLOAD_"
FILE_VARIABLE = f"{PREFIX}CONFIG_FILE"

_NOT_MEANT_FOR_US = re.compile(
    rf"{PREFIX}(BENCH_.*|(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_[0-9]+_(TCP|UDP|SCTP).*)?))"
)
"""What this repository's benches read, and what Kubernetes puts into every container beside a
Service named `kv-offload`: `KV_OFFLOAD_SERVICE_HOST`, `KV_OFFLOAD_PORT_8000_TCP_ADDR`."""


def check_variables(environ: Mapping[str, str], keys: Collection[str]) -> tuple[str, ...]:
    """Return a warning for each variable that begins like ours and is not read.

    It may be somebody else's, such as a start script's, so it stops no engine. One that is named
    after one of the configuration's `keys` does, as a `ConfigError`: whoever sets
    `KV_OFFLOAD_CPU_BYTES` wants that value, and the engine would take another.
    """
    warnings = []
    for name, value in sorted(environ.items()):
        is_ours = name.startswith(PREFIX) and not _NOT_MEANT_FOR_US.fullmatch(name)
        if not is_ours or not value or name == FILE_VARIABLE:
            continue
        key = name.removeprefix(PREFIX).lower()
        if key in keys:
            raise ConfigError(
                f"environment: {name}: {value[:100]!r}: no variable sets a key. Write {key} into "
                f"the file that {FILE_VARIABLE} names, or into kv_connector_extra_config, and "
                f"unset {name}."
            )
        warnings.append(
            f"environment: {name} is not read: the plugin reads {FILE_VARIABLE} only. Unset it "
            "unless another reads it."
        )
    return tuple(warnings)
