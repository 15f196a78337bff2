"""The command line, `kv-offload`. A subcommand is a function that adds its parser and its `run`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from kv_offload import __version__
from kv_offload.config import (
    DEFAULT,
    EXTRA_CONFIG,
    FILE_KEY,
    FILE_VARIABLE,
    SCHEMA,
    TracedConfig,
    trace_config,
)
from kv_offload.engines.vllm.plugin import CONNECTOR
from kv_offload.errors import KVOffloadError
from kv_offload.sizes import format_size


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status: 2, with a message, for what the user can mend.

    Raises:
        SystemExit: from argparse, for `--help`, `--version` and arguments that it refuses.
    """
    parser = argparse.ArgumentParser(
        prog="kv-offload", description="A second, larger KV cache in host memory for vLLM engines."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_config_command(subcommands)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except KVOffloadError as error:
        print(f"kv-offload: {error}", file=sys.stderr)
        return 2
    return status


def add_config_command(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `kv-offload config [FILE]`."""
    keys = "\n".join(
        f"  {key.name} (default {key.default})\n    {key.description}\n    Allowed: {key.allowed}."
        for key in SCHEMA.values()
    )
    parser = subcommands.add_parser(
        "config",
        help="check a configuration and print it with the argument for vLLM",
        description="Check a configuration, print every effective value with its source, "
        "and print the argument that gives it to vLLM.",
        epilog=f"keys:\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help=f"YAML file (default: the file named by {FILE_VARIABLE}, if any)",
    )
    parser.set_defaults(run=_run_config)


def _run_config(arguments: argparse.Namespace) -> int:
    extra_config = {} if arguments.file is None else {FILE_KEY: arguments.file}
    traced = trace_config(extra_config)
    origin = "none" if traced.file is None else repr(str(traced.file))
    print(f"# Effective configuration; file: {origin}")
    for name, value in traced.config.to_dict().items():
        source, written = traced.given[name]
        comment = "default" if source == DEFAULT else "file"
        if name == "cpu_bytes":
            comment += f", {written} is {format_size(value)}"
        print(f"{yaml.safe_dump({name: value}).strip()}  # {comment}")
    print(f"\n# The argument for vLLM\n{_vllm_argument(traced)}")
    return 0


def _vllm_argument(traced: TracedConfig) -> str:
    """Return the argument that gives this configuration to vLLM, quoted for a shell."""
    transfer: dict[str, Any] = {"kv_connector": CONNECTOR, "kv_role": "kv_both"}
    if traced.file is not None:
        transfer[EXTRA_CONFIG] = {FILE_KEY: str(traced.file)}
    return f"--kv-transfer-config {shlex.quote(json.dumps(transfer, separators=(',', ':')))}"
