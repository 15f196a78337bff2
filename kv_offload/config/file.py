"""Reads files that users name, and turns every mistake in the YAML file into a `ConfigError`."""

from __future__ import annotations

import os
import re
import reprlib
import shlex
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kv_offload.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
"""All keys with comments take a few kilobytes; a larger file is probably a file of weights."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100
_REPR.maxlevel = 2

_NO_SPACE = re.compile(
    r"^(\w+)[ \t]*(?:=|:(?=\S))[ \t]*([^\n#=:]+?)[ \t\r]*(?:#.*)?$", re.MULTILINE
)
"""Matches lines such as `cpu_bytes=1GiB` or `cpu_bytes:1GiB`, which YAML reads as text."""

_NOT_DECIMAL = re.compile(r"^[-+]?0[0-9_]|:")
"""Matches integers that YAML 1.1 reads in base 8 or 60: `010` is 8, `1:30` is 90."""


_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
"""Matches a shell variable in a path."""


def show(value: Any) -> str:
    """Return a value, shortened, for an error message. Never raises."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python refuses to print that many digits
        return "a huge integer"


def resolve_path(path: str) -> Path:
    """Return a user's path as an absolute path. Raises `ValueError` if no file can have it."""
    if "\0" in path:
        raise ValueError("a path cannot contain a null character.")
    expanded = os.path.expanduser(path)
    if path.startswith("~") and expanded == path:
        raise ValueError("there is no user of that name. Write the path itself.")
    resolved = Path(expanded).absolute()
    if (variable := _VARIABLE.search(path)) and not os.path.lexists(resolved):
        raise ValueError(
            f"{variable[0]} is not expanded as in a shell. Write the path itself, or ~ for "
            "your home."
        )
    return resolved


def read_small(path: Path, most_bytes: int, what: str) -> bytes:
    """Return the contents of a regular file of at most `most_bytes`.

    `what` describes the file in errors: "a config.json". Raises `OSError`, and `ValueError` for a
    file that is not regular or is too large.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # a pipe would block, a device may never end
        raise ValueError("it is not a regular file")
    if found.st_size > most_bytes:
        raise ValueError(f"it has {found.st_size:,} bytes, but {what} has at most {most_bytes:,}")
    return path.read_bytes()


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A YAML file, or none: its absolute path, and its top-level mapping."""

    path: Path | None
    values: Mapping[Any, Any]
    texts: Mapping[str, str]
    """Scalars as written in the file, before YAML converted them: `yes`, `0x1f`, `1_000`. A
    section's keys include its name: `disk.bytes`."""


def read_file(named_by: str, value: Any) -> ConfigFile:
    """Read a YAML file. `named_by` says where the user gave `value` as its path.

    Raises `ConfigError`, with line and column if the content is wrong.
    """
    remedy = "Give the path of a YAML file that this process can read."
    if value == "-":
        raise ConfigError(
            f"{named_by}'-': standard input is not read, because the engine reads the file again "
            f"when it starts. {remedy} For a file of this name write ./-"
        )
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{named_by}{show(value)}: not a path. {remedy}")
    try:
        path = resolve_path(value)
        content = read_small(path, MAX_FILE_BYTES, "a configuration")
    except (OSError, ValueError) as error:
        problem = str(error).removesuffix(".")
        raise ConfigError(
            f"{named_by}{show(value)}: cannot be read: {problem}. {remedy}"
        ) from error
    return ConfigFile(path, *_parse(path, content))


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but duplicate keys are errors; PyYAML itself keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        # `!!map x` makes a node that is not a mapping; PyYAML refuses it below.
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in lines:
                given = show(value.value) if isinstance(value, yaml.ScalarNode) else f"a {value.id}"
                first = lines[key.value]
                raise _wrong(
                    key, f"{key.value}: {given}: duplicate key, first given in line {first}"
                )
            lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep=deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError) as error:
            # PyYAML itself raises these for `2024-13-45`, `!!bool x` or `!!timestamp x`.
            kind = node.tag.rpartition(":")[2]
            raise _wrong(node, f"{show(node.value)} is not a valid {kind}") from error
        if type(value) is int and _NOT_DECIMAL.search(node.value):
            meant = f"{show(node.value)} means {show(value)} in YAML"
            raise _wrong(node, f"{meant}: write the number you mean")
        return value


def _wrong(node: yaml.Node, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _scalars(mapping: yaml.Node, section: str = "") -> Iterator[tuple[str, str]]:
    for key, value in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if isinstance(value, yaml.ScalarNode):
            yield f"{section}{key.value}", value.value
        elif isinstance(value, yaml.MappingNode) and not section:
            yield from _scalars(value, f"{key.value}.")


def _parse(path: Path, content: bytes) -> tuple[Mapping[Any, Any], Mapping[str, str]]:
    """Return the top-level mapping of a YAML file, and its scalars as written."""
    line, column = 1, 1
    mistake = None
    try:
        loader = _Loader(content.decode("utf-8"))
        root = loader.get_single_node()
        if root is None:
            return {}, {}
        values = loader.construct_document(root)
        if values is None:
            return {}, {}
        if isinstance(values, dict):
            return values, dict(_scalars(root))
        problem = f"the top level is {show(values)}, but it must be a mapping of keys to values"
        mistake = _NO_SPACE.search(content.decode("utf-8")) if isinstance(values, str) else None
    except UnicodeDecodeError as error:
        line, column = _position(content[: error.start].decode("utf-8"))
        problem = f"byte 0x{content[error.start]:02x} is not UTF-8"
    except yaml.reader.ReaderError as error:
        line, column = _position(content.decode("utf-8")[: error.position])
        problem = f"character {error.character:#x} is not allowed in YAML"
    except yaml.MarkedYAMLError as error:
        if error.problem_mark is not None:
            line, column = error.problem_mark.line + 1, error.problem_mark.column + 1
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        if isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError):
            mistake = _NO_SPACE.search(content.decode("utf-8"))
    except RecursionError:
        problem = "nested too deeply"
    if mistake is not None:
        line, column = _position(mistake.string[: mistake.start()])
        name, value = mistake.groups()
        problem = f"{show(mistake[0])}: write `{name}: {value}`, with a space after the colon"
    raise ConfigError(
        f"{path}, line {line}, column {column}: {problem}. "
        f"Correct the file; `kv-offload config {shlex.quote(str(path))}` checks it."
    )


def _position(before: str) -> tuple[int, int]:
    return before.count("\n") + 1, len(before) - before.rfind("\n")
