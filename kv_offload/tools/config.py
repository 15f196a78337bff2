"""`kv-offload config`: check and print a configuration, and vLLM's argument for it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from kv_offload.config import DEFAULT, EXTRA_CONFIG, FILE_KEY, SCHEMA, ResolvedConfig, trace_config
from kv_offload.config.checks import check_disk, check_recording, check_sizes
from kv_offload.config.schema import as_yaml
from kv_offload.config.sizes import format_size
from kv_offload.engines.vllm import CONNECTOR
from kv_offload.errors import KVOffloadError, Problems
from kv_offload.tools.arguments import add_file
from kv_offload.tools.output import Report
from kv_offload.worker.pool import check_pool_folder
from kv_offload.worker.remote import check_usable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kv-offload config [--argument] [FILE]`."""
    keys = "\n".join(
        f"  {key.name} ({'' if key.is_required else 'default '}{key.written_default})\n"
        f"    {key.description}\n    Allowed: {key.allowed}."
        for key in SCHEMA.values()
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Check a configuration, print every effective value with its source, and\n"
        "print the argument that gives it to vLLM. The exit status is 2 if the file is\n"
        "wrong, else 0; a folder that no engine could use here is a warning."
    )
    parser.epilog = f"keys:\n{keys}"
    parser.add_argument(
        "--argument",
        action="store_true",
        help="print only the value of vLLM's --kv-transfer-config; nothing if the file is wrong",
    )
    add_file(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> Report:
    traced = trace_config({}, file=arguments.file)
    check_sizes(traced)
    warnings = [*traced.warnings, *_check_folders(traced)]
    for warning in warnings:
        print(f"kv-offload: warning: {warning}", file=sys.stderr)
    argument = _vllm_argument(traced)
    data = {
        "file": traced.file,
        "values": {
            name: {
                "value": _effective(traced, name),
                "written": given.written,
                "from": given.source,
            }
            for name, given in traced.given.items()
        },
        "warnings": warnings,
        "argument": json.loads(argument),
    }
    return Report(data, argument if arguments.argument else _describe(traced, argument))


def _check_folders(traced: ResolvedConfig) -> tuple[str, ...]:
    """Return why no engine could use the folders here; the file may be for another machine."""
    config, problems = traced.config, Problems()
    with problems:
        check_disk(traced)
    with problems:
        if config.remote is not None:
            check_usable(config.remote)
    with problems:
        if config.host_pool is not None:
            check_pool_folder(config.host_pool_path)
    with problems:
        if config.record_trace is not None:
            check_recording(Path(config.record_trace))
    try:
        problems.raise_all()
    except KVOffloadError as error:
        return error.args
    return ()


def _effective(traced: ResolvedConfig, name: str) -> Any:
    """Return the value of a key such as `disk.path` as the engine uses it."""
    section, _, key = name.rpartition(".")
    return getattr(getattr(traced.config, section) if section else traced.config, key)


def _describe(traced: ResolvedConfig, argument: str) -> str:
    """Return every effective value with its source, then the argument, quoted for a shell."""
    origin = "none" if traced.file is None else repr(str(traced.file))
    lines = [f"# Effective configuration; file: {origin}"]
    for name, given in traced.given.items():
        value, comment = given.written, "default" if given.source == DEFAULT else "file"
        section, _, key = name.rpartition(".")
        if section and f"{section}:" not in lines:
            lines.append(f"{section}:")
        effective = _effective(traced, name)
        takes = SCHEMA[name].takes if name in SCHEMA else ""
        if takes == "size":
            value, comment = str(effective), f"{comment}, {value} is {format_size(effective)}"
        elif takes == "path":
            value = as_yaml(effective)
        lines.append(f"{'  ' if section else ''}{key}: {value}  # {comment}")
    lines += ["", "# The argument for vLLM", f"--kv-transfer-config {shlex.quote(argument)}"]
    return "\n".join(lines)


def _vllm_argument(traced: ResolvedConfig) -> str:
    """Return the value of `--kv-transfer-config` that gives this configuration to vLLM, as JSON."""
    transfer: dict[str, Any] = {"kv_connector": CONNECTOR, "kv_role": "kv_both"}
    if traced.file is not None:
        transfer[EXTRA_CONFIG] = {FILE_KEY: str(traced.file)}
    return json.dumps(transfer, separators=(",", ":"))
