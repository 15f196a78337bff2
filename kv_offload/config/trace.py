"""Resolves the effective configuration, and records the source of each value.

Keys in vLLM's `kv_connector_extra_config` override the YAML file, which overrides the defaults.
All given values are checked, even overridden ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kv_offload.config.file import ConfigFile, read_file, resolve_path, show
from kv_offload.config.host_memory import HostMemory, headroom_bytes, read_host_memory
from kv_offload.config.schema import (
    DEFAULT_CPU_BYTES,
    MAX_INT,
    SCHEMA,
    SECTIONS,
    OffloadConfig,
    as_yaml,
    keys_of,
)
from kv_offload.config.sizes import describe_bytes, format_size, parse_size
from kv_offload.config.unknown_keys import unknown_key
from kv_offload.errors import CapacityError, ConfigError, Problems

EXTRA_CONFIG = "kv_connector_extra_config"
FILE_KEY = "config_file"
VARIABLES = "KV_OFFLOAD_"
FILE_VARIABLE = f"{VARIABLES}CONFIG_FILE"
DEFAULT = "default"

_NOT_MEANT_FOR_US = re.compile(
    rf"{VARIABLES}(BENCH_.*|(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|"
    r"PORT(_[0-9]+_(TCP|UDP|SCTP).*)?))"
)
"""Matches variables of this repository's benches, and those that Kubernetes sets in containers next
to a Service named `kv-offload`: `KV_OFFLOAD_SERVICE_HOST`, `KV_OFFLOAD_PORT_8000_TCP_ADDR`."""


class Given(NamedTuple):
    """A key's value as it was read and as it was written, and its source."""

    source: str
    value: Any
    written: str

    @property
    def shown(self) -> str:
        """The value for an error message: text in quotes, anything else as it was written."""
        if self.value is None:
            return "no value"
        return show(self.value) if isinstance(self.value, str) else self.written


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A configuration, its file, and the value given for every key or omitted section."""

    config: OffloadConfig
    file: Path | None
    given: dict[str, Given]
    host: HostMemory
    replicas: int
    warnings: tuple[str, ...]
    """Settings outside the configuration that are ignored."""

    def describe_given(self) -> str:
        """Return the file and all values that differ from the defaults, as one line for the log."""
        shown = [f"{k}={v.written}" for k, v in self.given.items() if v.source != DEFAULT]
        given = f"{self.file}: {', '.join(shown)}" if self.file else ", ".join(shown)
        return f"configured by {given or 'nothing: all defaults'}"

    def describe(self) -> str:
        """Return the effective configuration as written, in one line."""
        shown = {name: given.written for name, given in self.given.items()}
        shown["cpu_bytes"] += f" ({format_size(self.config.cpu_bytes)})"
        return ", ".join(f"{name}={value}" for name, value in shown.items())

    def describe_request(self) -> str:
        """Return, for an error, the size in `cpu_bytes`: its source, as written, and in bytes."""
        given = self.given["cpu_bytes"]
        size_bytes = self.config.cpu_bytes
        text = f"{given.source}: cpu_bytes: {given.shown}: asks for {describe_bytes(size_bytes)}"
        if self.config.given_bytes:
            text += f", and remote.bytes for {describe_bytes(self.config.given_bytes)}"
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
) -> ResolvedConfig:
    """Return the effective configuration of an engine with this `kv_connector_extra_config`.

    The file is `file`, given to a command, else `extra_config["config_file"]`, else the one that
    `KV_OFFLOAD_CONFIG_FILE` names, else none. `host` replaces `read_host_memory()`. The
    data-parallel `replicas` on this host share a percentage; an absolute size is for each of them.

    One error reports all problems, but a size too large for the machine only if there are no
    others.

    Raises:
        ConfigError: a source cannot be read, or has an unknown key or a value that is not allowed,
            keys contradict each other, or a variable is named after a key.
        CapacityError: all replicas together ask for more than this machine or its cgroup has, less
            the headroom. Memory in use is ignored.
    """
    problems = Problems()
    warnings = tuple(_check_variables(environ, problems))
    read = ConfigFile(None, {}, {})
    if file is not None:
        read = read_file("", file)
    elif FILE_KEY in extra_config:
        read = read_file(f"{EXTRA_CONFIG}: {FILE_KEY}: ", extra_config[FILE_KEY])
    elif named := environ.get(FILE_VARIABLE):  # an empty variable counts as absent
        read = read_file(f"environment: {FILE_VARIABLE}: ", named)
    inline = {k: v for k, v in extra_config.items() if k != FILE_KEY}
    host = host or read_host_memory()
    whole_bytes = host.size_bytes // replicas
    given: dict[str, Given] = {}
    for source, values, texts in (
        (DEFAULT, dict.fromkeys(SECTIONS), {}),
        (str(read.path), read.values, read.texts),
        (EXTRA_CONFIG, inline, {}),
    ):
        for name, one in _flatten(source, values, texts, problems):
            given[name] = one
            if name not in SECTIONS:
                with problems:
                    _checked(name, one, whole_bytes)
    given = _complete(given, problems)
    problems.raise_all()
    effective = {
        name: _checked(name, one, whole_bytes)
        for name, one in given.items()
        if name not in SECTIONS
    }
    traced = ResolvedConfig(_nested(effective), read.path, given, host, replicas, warnings)
    with problems:
        _check_shares(traced.config, given)
    problems.raise_all()
    headroom = headroom_bytes(host)
    if traced.config.host_bytes * replicas + headroom > host.size_bytes:
        raise CapacityError(
            f"{traced.describe_request()}, but {host.source} reports "
            f"{describe_bytes(host.size_bytes)}, of which {format_size(headroom)} must stay free. "
            f"Ask for less, for example {DEFAULT_CPU_BYTES}, or give the process more memory."
        )
    return traced


def _check_variables(environ: Mapping[str, str], problems: Problems) -> Iterator[str]:
    """Yield a warning for each variable with our prefix that is not read.

    Such a variable may belong to another program, such as a start script, so it does not stop an
    engine. One that is named after a key does, with a `ConfigError`: a user who sets
    `KV_OFFLOAD_CPU_BYTES` expects that value, and the engine would use another.
    """
    for name, value in sorted(environ.items()):
        is_ours = name.startswith(VARIABLES) and not _NOT_MEANT_FOR_US.fullmatch(name)
        if not is_ours or not value or name == FILE_VARIABLE:
            continue
        meant = name.removeprefix(VARIABLES).lower()
        keys = [key for key in (*SCHEMA, *SECTIONS) if key.replace(".", "_") == meant]
        with problems:
            if keys:
                raise ConfigError(
                    f"environment: {name}: {value[:100]!r}: variables do not set keys. Write "
                    f"{keys[0]} into the file that {FILE_VARIABLE} names, or into {EXTRA_CONFIG}, "
                    f"and unset {name}."
                )
        yield (
            f"environment: {name} is not read: the plugin reads {FILE_VARIABLE} only. Unset it "
            "unless another program reads it."
        )


def _written(value: Any, text: str | None) -> str:
    """Return a value as the user wrote it, if known, shortened to one line."""
    text = value if isinstance(value, str) else text
    if text is not None:
        return show(text)[1:-1]
    return as_yaml(value) if value is None or isinstance(value, bool) else show(value)


def _flatten(
    source: str, values: Mapping[Any, Any], texts: Mapping[str, str], problems: Problems
) -> Iterator[tuple[str, Given]]:
    """Yield the values of a source, with `disk.path` for `disk: {path: ...}`.

    A section comes before its keys, with the value None if the user omits it explicitly.
    """
    for name, value in values.items():
        given = Given(source, value, _written(value, texts.get(name)))
        if name not in SECTIONS:
            with problems:
                if name not in SCHEMA or "." in name:
                    raise _unknown("", name, given)
                yield name, given
            continue
        if value is not None and not isinstance(value, Mapping):
            keys = ", ".join(f"{key}: ..." for key in keys_of(name))
            with problems:
                raise ConfigError(
                    f"{source}: {name}: {given.shown}: must be a mapping, {name}: {{{keys}}}. "
                    f"Correct it, or remove it to run without a {_WORDS[name]}."
                )
            continue
        yield name, given
        for key, inner in (value or {}).items():
            one = Given(source, inner, _written(inner, texts.get(f"{name}.{key}")))
            with problems:
                if f"{name}.{key}" not in SCHEMA:
                    raise _unknown(name, key, one)
                yield f"{name}.{key}", one


def _unknown(section: str, name: Any, given: Given) -> ConfigError:
    extra = [FILE_KEY] if given.source == EXTRA_CONFIG else []
    return unknown_key(given.source, section, _written(name, None), given.shown, extra)


def _complete(given: Mapping[str, Given], problems: Problems) -> dict[str, Given]:
    """Return the given values in the order of the schema, with defaults filled in.

    An omitted section is represented by its name alone. A missing required key is a problem.
    """
    complete: dict[str, Given] = {}
    kinds = [key.kind for key in SCHEMA.values()]
    for key in SCHEMA.values():
        if key.section and given[key.section].value is None:
            complete[key.section] = given[key.section]
            continue
        kind = complete["remote.kind"].value if "remote.kind" in complete else None
        with problems:
            if key.kind and key.kind != kind:
                if key.name in given and kind in kinds:
                    one = given[key.name]
                    raise ConfigError(
                        f"{one.source}: {key.name}: {one.shown}: belongs to remote.kind "
                        f"{key.kind}, and it is {kind}. Remove it, or change remote.kind."
                    )
            elif key.name in given:
                complete[key.name] = given[key.name]
            elif key.is_required:
                section = given[key.section]
                raise ConfigError(
                    f"{section.source}: {key.section}: {key.name} is missing. Add it: "
                    f"{key.description} Allowed: {key.allowed}. Or remove {key.section} to run "
                    f"without a {_WORDS[key.section]}."
                )
            else:
                complete[key.name] = Given(DEFAULT, key.default, key.written_default)
    return complete


def _nested(values: Mapping[str, Any]) -> OffloadConfig:
    """Build the configuration from values with flat names such as `disk.path`."""
    nested: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
    kinds: Mapping[str, Callable[..., Any]] = SECTIONS
    for section, make in kinds.items():
        names = {key: f"{section}.{key}" for key in keys_of(section)}
        if of_section := {key: values[name] for key, name in names.items() if name in values}:
            nested[section] = make(**of_section)
    return OffloadConfig(**nested)


def _checked(name: str, given: Given, whole_bytes: int) -> Any:
    """Return a value as the engine uses it. Raises `ConfigError` if it is not allowed."""
    key, source, value = SCHEMA[name], given.source, given.value
    if name in _REMOVED_VALUES and value == _REMOVED_VALUES[name][0]:
        remedy = _REMOVED_VALUES[name][1]
        raise ConfigError(f"{source}: {name}: {given.shown}: was removed: {remedy}.")
    cause: Exception
    try:
        is_none = name == "remote.bytes" and value == 0 and type(value) is int
        if name.endswith(".write_rate") and value == 0 and type(value) is int:
            word = _WORDS[key.section]
            raise ValueError(  # noqa: TRY301
                f"nothing would be written to the {word}. To run without a {word}, remove "
                f"{key.section}."
            )
        if key.takes == "size" and type(value) in (str, int, float) and not is_none:
            value = parse_size(value, whole_bytes if name == "cpu_bytes" else None)
        converted = msgspec.convert(value, key.type)
        return str(resolve_path(converted)) if key.takes == "path" and converted else converted
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter: a lone surrogate
        is_large = isinstance(value, int) and value > MAX_INT
        problem, cause = f"must be {f'{MAX_INT} at most' if is_large else key.allowed}", error
    except ValueError as error:
        problem, cause = f"{error} Allowed: {key.allowed}", error
    remedy = f"remove it to get the default, {key.written_default}"
    if key.is_required:
        remedy = f"remove {key.section} to run without a {_WORDS[key.section]}"
    raise ConfigError(
        f"{source}: {key.name}: {given.shown}: {problem}. Correct it, or {remedy}."
    ) from cause


_WORDS = {"disk": "disk", "remote": "remote store"}
"""Names of the sections in sentences."""

_REMOVED_VALUES = {
    "eviction_policy": (
        "arc",
        "use auto, the default, which keeps reused prefixes through scans of new ones too, or lru",
    ),
    "transfer_engine": (
        "dma",
        "remove the key: auto, the default, has the copy engine copy where blocks are long",
    ),
}
"""By key, a value that earlier versions allowed, and what to do now."""


def _check_shares(config: OffloadConfig, given: Mapping[str, Given]) -> None:
    """Raise `ConfigError` if one user may retain more than all users together."""
    one, every = "max_retained_share_per_salt", "max_retained_share"
    share, limit = given[one], given[every]
    if share.source != DEFAULT and config.max_retained_share_per_salt > config.max_retained_share:
        raise ConfigError(
            f"{share.source}: {one}: {share.shown}: more than {every}, {limit.shown}, which is for "
            f"all requests together. Give at most {limit.shown}, or raise {every}."
        )
