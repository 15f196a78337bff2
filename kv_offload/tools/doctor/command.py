"""`kv-offload doctor [FILE]`: report, on one page, what would stop an engine here."""

from __future__ import annotations

import argparse
import os
import re
from functools import partial
from pathlib import Path

from kv_offload import __version__
from kv_offload.config import RemoteConfig, checks, trace_config
from kv_offload.config.schema import ADDRESS
from kv_offload.tools.arguments import add_count, add_file, path
from kv_offload.tools.doctor import disk, gpus, installation, memory, remote, report
from kv_offload.tools.output import Report, shows_colour


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kv-offload doctor [FILE]`."""
    parser.description = (
        "Check this machine, the installed versions and a configuration. Every line says what was "
        "found, what is needed and what to do. The exit status is 1 if there is a problem, 2 if an "
        "argument or the file is wrong, else 0."
    )
    add_file(parser)
    add_count(parser, "--replicas", of="data-parallel replicas of the engine on this machine")
    parser.add_argument(
        "--no-measure",
        action="store_true",
        help="do not copy to and from the GPUs, the disk and the remote store, which takes "
        "seconds, 128 MiB of each GPU, 512 MiB of the disk and 64 MiB of the remote store",
    )
    parser.add_argument(
        "--disk",
        metavar="PATH",
        type=path,
        help="folder of a disk to check and measure (default: the configuration's disk.path)",
    )
    parser.add_argument(
        "--remote",
        metavar="ADDRESS",
        type=_address,
        help="HOST:PORT of a mooncake_master to check, with a round trip of 64 MiB (default: the "
        "configuration's remote)",
    )
    parser.set_defaults(run=_run)


def _address(text: str) -> str:
    if not re.search(ADDRESS, text):
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port, such as 10.0.0.5:50051")
    return text


def _run(arguments: argparse.Namespace) -> Report:
    traced = trace_config({}, file=arguments.file, replicas=arguments.replicas)
    checks.check_sizes(traced)
    config, measures = traced.config, not arguments.no_measure
    torch = installation.read_torch()
    has_gpu = torch is not None and torch.cuda is not None
    sections: report.Sections = {
        "Versions": [*installation.check_versions(torch)],
        "GPUs": [*gpus.check_gpus(torch, config, measures=measures)],
        "Memory": [*memory.check_memory(traced, has_gpu=has_gpu)],
        "Engine": [installation.check_plugin(os.environ)],
    }
    if config.record_trace is not None:
        recording = partial(checks.check_recording, Path(config.record_trace))
        made = f"{config.record_trace} can be made"
        sections["Engine"].append(report.accepted("recording", made, recording))
    folder = arguments.disk
    if folder is None and config.disk is not None:
        folder = Path(config.disk.path)
    if folder is not None:
        sections["Disk"] = [*disk.check_disk(folder, traced, measures=measures)]
    store = config.remote
    if arguments.remote is not None:
        store = RemoteConfig(kind="mooncake", address=arguments.remote, bytes=0)
    if store is not None:
        sections["Remote"] = [*remote.check_remote(store, os.environ, measures=measures)]
    title = f"kv-offload {__version__} doctor"
    page = report.as_text(title, sections, colour=shows_colour())
    status = int(report.counts(sections)["problem"] > 0)
    return Report(report.as_data(title, sections), page, status)
