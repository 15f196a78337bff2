"""The effective configuration, and where each of its values is from.

Keys in vLLM's `kv_connector_extra_config` win over the YAML file, which wins over the defaults.
Every value that is given is checked, also one that another source overrides.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kv_offload.config.file import ConfigFile, read_file, resolve_path, show
from kv_offload.config.host_memory import HostMemory, headroom_bytes, read_host_memory
from kv_offload.config.schema import DEFAULT_CPU_BYTES, MAX_INT, SCHEMA, OffloadConfig, as_yaml
from kv_offload.config.sizes import describe_bytes, format_size, parse_size
from kv_offload.errors import CapacityError, ConfigError

EXTRA_CONFIG = "kv_connector_extra_config"
FILE_KEY = "config_file"
VARIABLES = "KV_OFFLOAD_"
FILE_VARIABLE = f"{VARIABLES}CONFIG_FILE"
DEFAULT = "default"
ALIKE = 0.75
"""How similar to a key of ours another one must be to be suggested: `evict_policy` and
`eviction_policy` are 0.89 alike, `store_threshold` and `store_bytes`, another thing, 0.69."""

_VLLMS_KEYS = frozenset(
    ("kv_transfer_config", "kv_connector", "kv_connector_module_path", "kv_role", EXTRA_CONFIG)
)
"""Those of vLLM's argument that people write among ours."""

_NOT_MEANT_FOR_US = re.compile(
    rf"{VARIABLES}(BENCH_.*|(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|"
    r"PORT(_[0-9]+_(TCP|UDP|SCTP).*)?))"
)
"""What this repository's benches read, and what Kubernetes puts into every container beside a
Service named `kv-offload`: `KV_OFFLOAD_SERVICE_HOST`, `KV_OFFLOAD_PORT_8000_TCP_ADDR`."""


class Given(NamedTuple):
    """The value of a key: where from, as it was read, and as it was written."""

    source: str
    value: Any
    written: str

    @property
    def shown(self) -> str:
        """The value as an error shows it: text in quotation marks, all else as it was written."""
        if self.value is None:
            return "no value"
        return show(self.value) if isinstance(self.value, str) else self.written


@dataclass(frozen=True, slots=True)
class TracedConfig:
    """A configuration, its file, and what was given for every key."""

    config: OffloadConfig
    file: Path | None
    given: dict[str, Given]
    host: HostMemory
    replicas: int
    warnings: tuple[str, ...]
    """What was set beside it and is not read."""

    def describe(self) -> str:
        """Return the effective configuration as it was written, as one line for the log."""
        shown = {name: given.written for name, given in self.given.items()}
        shown["cpu_bytes"] += f" ({format_size(self.config.cpu_bytes)})"
        return ", ".join(f"{name}={value}" for name, value in shown.items())

    def describe_request(self) -> str:
        """Return what `cpu_bytes` asks for, for an error: where from, as written, in bytes."""
        given = self.given["cpu_bytes"]
        size_bytes = self.config.cpu_bytes
        text = f"{given.source}: cpu_bytes: {given.shown}: asks for {describe_bytes(size_bytes)}"
        if self.config.store_bytes:
            text += f", and store_bytes for {describe_bytes(self.config.store_bytes)}"
        if self.replicas > 1:
            all_bytes = describe_bytes(self.config.host_bytes * self.replicas)
            text += f" for each of {self.replicas} replicas on this host, {all_bytes} in all"
        return text


def trace_config(
    extra_config: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    *,
    file: str | None = None,
    host: HostMemory | None = None,
    replicas: int = 1,
) -> TracedConfig:
    """Return the effective configuration of an engine with this `kv_connector_extra_config`.

    The file is `file`, which a command was given, else `extra_config["config_file"]`, else what
    `KV_OFFLOAD_CONFIG_FILE` names, else none. `host` stands in for `read_host_memory()`. The
    data-parallel `replicas` on this host divide a percentage; each takes an absolute size.

    Raises:
        ConfigError: a source cannot be read, or has an unknown key or a value that is not allowed,
            keys contradict each other, or a variable is named after a key.
        CapacityError: all replicas together ask for more than this machine or its cgroup has, less
            the headroom. What is free now is not looked at.
    """
    warnings = tuple(_check_variables(environ))
    read = ConfigFile(None, {}, {})
    if file is not None:
        read = read_file("", file)
    elif FILE_KEY in extra_config:
        read = read_file(f"{EXTRA_CONFIG}: {FILE_KEY}: ", extra_config[FILE_KEY])
    elif named := environ.get(FILE_VARIABLE):  # an empty variable is an absent one
        read = read_file(f"environment: {FILE_VARIABLE}: ", named)
    inline = {k: v for k, v in extra_config.items() if k != FILE_KEY}
    layers: tuple[tuple[str, Mapping[Any, Any], Mapping[str, str]], ...] = (
        (DEFAULT, {key.name: key.default for key in SCHEMA.values()}, {}),
        (str(read.path), read.values, read.texts),
        (EXTRA_CONFIG, inline, {}),
    )
    host = host or read_host_memory()
    effective: dict[str, Any] = {}
    given: dict[str, Given] = {}
    for source, values, texts in layers:
        for name, value in values.items():
            one = Given(source, value, _written(value, texts.get(name)))
            effective[name] = _checked(name, one, host.size_bytes // replicas)
            given[name] = one
    traced = TracedConfig(OffloadConfig(**effective), read.path, given, host, replicas, warnings)
    _check_tiers(traced.config, given)
    _check_shares(traced.config, given)
    headroom = headroom_bytes(host)
    if traced.config.host_bytes * replicas + headroom > host.size_bytes:
        raise CapacityError(
            f"{traced.describe_request()}, but {host.source} says that there are "
            f"{describe_bytes(host.size_bytes)}, of which {format_size(headroom)} must stay free. "
            f"Ask for less, for example {DEFAULT_CPU_BYTES}, or give the process more."
        )
    return traced


def _check_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable that begins like ours and is not read.

    It may be somebody else's, such as a start script's, so it stops no engine. One that is named
    after a key does, as a `ConfigError`: whoever sets `KV_OFFLOAD_CPU_BYTES` wants that value, and
    the engine would take another.
    """
    for name, value in sorted(environ.items()):
        is_ours = name.startswith(VARIABLES) and not _NOT_MEANT_FOR_US.fullmatch(name)
        if not is_ours or not value or name == FILE_VARIABLE:
            continue
        key = name.removeprefix(VARIABLES).lower()
        if key in SCHEMA:
            raise ConfigError(
                f"environment: {name}: {value[:100]!r}: no variable sets a key. Write {key} into "
                f"the file that {FILE_VARIABLE} names, or into {EXTRA_CONFIG}, and unset {name}."
            )
        yield (
            f"environment: {name} is not read: the plugin reads {FILE_VARIABLE} only. Unset it "
            "unless another reads it."
        )


def _written(value: Any, text: str | None) -> str:
    """Return a value as the user wrote it, as far as that is known, on one line and shortened."""
    text = value if isinstance(value, str) else text
    if text is not None:
        return show(text)[1:-1]
    return as_yaml(value) if value is None or isinstance(value, bool) else show(value)


def _checked(name: Any, given: Given, whole_bytes: int) -> Any:
    key, source, value = SCHEMA.get(name), given.source, given.value
    removed, remedy = _REMOVED.get(name, (None, ""))
    if remedy and (removed is None or removed == value):
        raise ConfigError(f"{source}: {name}: {given.shown}: was removed: {remedy}.")
    if key is None:
        shown = _written(name, None)
        raise ConfigError(f"{source}: {shown}: {given.shown}: unknown key. {_hint(source, shown)}")
    cause: Exception
    try:
        is_none = name == "store_bytes" and value == 0 and type(value) is int
        if name in _NOTHING_WRITTEN and value == 0 and type(value) is int:
            raise ValueError(_NOTHING_WRITTEN[name])  # noqa: TRY301
        if key.takes == "size" and type(value) in (str, int, float) and not is_none:
            value = parse_size(value, whole_bytes if name == "cpu_bytes" else None)
        converted = msgspec.convert(value, key.type)
        return str(resolve_path(converted)) if key.takes == "path" and converted else converted
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter of half a letter
        is_large = isinstance(value, int) and value > MAX_INT
        problem, cause = f"must be {f'{MAX_INT} at most' if is_large else key.allowed}", error
    except ValueError as error:
        problem, cause = f"{error} Allowed: {key.allowed}", error
    raise ConfigError(
        f"{source}: {key.name}: {given.shown}: {problem}. Correct it, or remove it to get "
        f"the default, {key.written_default}."
    ) from cause


def _check_tiers(config: OffloadConfig, given: Mapping[str, Given]) -> None:
    """Raise `ConfigError` for a tier that is described in part, and for two tiers."""
    for what, needed in _TIERS.items():
        named = [name for name in needed if getattr(config, name) is not None]
        missing = [name for name in needed if name not in named]
        if named and missing:
            one = given[named[0]]
            raise ConfigError(
                f"{one.source}: {named[0]}: {one.shown}: {missing[0]} is missing. Add "
                f"{missing[0]}: {needed[missing[0]]}, or remove {' and '.join(named)} to run "
                f"without a {what}."
            )
    if config.disk_path is not None and config.store is not None:
        raise ConfigError(
            f"{given['store'].source}: store: {given['store'].shown}: an engine has one tier below "
            "host memory, and disk_path names a disk. Remove store, store_master and store_bytes, "
            "or disk_path and disk_bytes."
        )


_REMOVED: Mapping[str, tuple[str | None, str]] = {
    "eviction_policy": (
        "arc",
        "use auto, the default, which keeps reused prefixes through scans of new ones too, or lru",
    ),
    "store_after_uses": (
        None,
        "remove the key. eviction_policy: auto, the default, prefers prefixes that are used again; "
        "to write less to a disk, lower disk_write_rate",
    ),
    "transfer_engine": (
        "dma",
        "remove the key: auto, the default, has the copy engine copy where blocks are long",
    ),
}
"""What earlier versions had: by key, the value that was removed (None for the whole key), and what
to do now."""


def _check_shares(config: OffloadConfig, given: Mapping[str, Given]) -> None:
    """Raise `ConfigError` where one user may retain more than all of them together."""
    one, every = "max_retained_share_per_salt", "max_retained_share"
    share, limit = given[one], given[every]
    if share.source != DEFAULT and config.max_retained_share_per_salt > config.max_retained_share:
        raise ConfigError(
            f"{share.source}: {one}: {share.shown}: more than {every}, {limit.shown}, which is for "
            f"all requests together. Give at most {limit.shown}, or raise {every}."
        )


_TIERS = {
    "disk": {
        "disk_bytes": "what the engine may take of that disk, for example 500GiB",
        "disk_path": "a folder on a local disk",
    },
    "store": {
        "store": "mooncake",
        "store_master": "the address of its master, for example 10.0.0.5:50051",
        "store_bytes": "the memory that this engine gives to it, for example 64GiB, or 0",
    },
}
"""Keys that are given all or none, and what each of them is."""


_NOTHING_WRITTEN = {
    f"{tier}_write_rate": f"nothing would be written to the {tier}. To run without a {tier}, "
    f"remove {', '.join(keys)}."
    for tier, keys in _TIERS.items()
}
"""By a rate, the answer to one of 0."""

_OTHERS_KEYS = {
    "cpu_bytes_to_use": "cpu_bytes",
    "cpu_bytes_to_use_per_rank": "cpu_bytes",
    "disk_capacity_bytes": "disk_bytes",
    "offload_prompt_only": "store_blocks",
    "kv_offloading_size": "cpu_bytes",
    "num_cpu_blocks": "cpu_bytes",
    "swap_space": "cpu_bytes",
    "max_local_cpu_size": "cpu_bytes",
    "lmcache_max_local_cpu_size": "cpu_bytes",
    "local_disk": "disk_path",
    "lmcache_local_disk": "disk_path",
    "max_local_disk_size": "disk_bytes",
    "lmcache_max_local_disk_size": "disk_bytes",
    "remote_url": "store_master",
    "lmcache_remote_url": "store_master",
    "store_threshold": "eviction_policy",
    "cache_policy": "eviction_policy",
}
"""Ours by keys of vLLM's connectors and of LMCache."""


def _hint(source: str, unknown: str) -> str:
    """Say what to do about an unknown key."""
    known = [*SCHEMA, FILE_KEY] if source == EXTRA_CONFIG else [*SCHEMA]
    if unknown.replace("-", "_") in _VLLMS_KEYS:
        return (
            "It belongs into vLLM's argument --kv-transfer-config. Here only the plugin's own keys "
            f"are read: {', '.join(known)}."
        )
    written = unknown.lower().replace("-", "_")
    near = difflib.get_close_matches(written, known, n=1, cutoff=ALIKE)
    hint = f"Did you mean {near[0]}? " if near else ""
    if ours := _OTHERS_KEYS.get(written):
        hint = f"It is a key of another connector; here it is {ours}. "
    return f"{hint}Correct or remove it; the keys are {', '.join(known)}."
