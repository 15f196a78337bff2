"""`kv-offload doctor [FILE]`: what stands in the way on this machine, on one page."""

from __future__ import annotations

import argparse
import os

from kv_offload import __version__
from kv_offload.tools.arguments import add_count, add_file
from kv_offload.tools.doctor import devices, installation, memory, nvml, report
from kv_offload.tools.output import shows_colour


def add_command(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `kv-offload doctor [FILE]`."""
    parser = subcommands.add_parser(
        "doctor",
        help="check this machine, its versions and a configuration",
        description="Check this machine, the installed versions and a configuration. Every line "
        "says what was found, what is needed and what to do. The exit status is 1 if there is a "
        "problem, 2 if an argument is wrong, else 0.",
    )
    add_file(parser)
    add_count(parser, "--replicas", of="data-parallel replicas of the engine on this machine")
    parser.add_argument(
        "--no-measure",
        action="store_true",
        help="do not copy to and from the GPUs, which takes seconds and 128 MiB of each",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    configuration, traced = memory.read_configuration(arguments.file, arguments.replicas)
    kind = "auto" if traced is None else traced.config.transfer_engine
    torch = installation.read_torch()
    rates = [report.not_checked("copy rate", "--no-measure was given")]
    if not arguments.no_measure:
        rates = [*devices.check_rates(nvml.read_machine(), torch, kind)]
    machine = nvml.read_machine()  # once more: a link that has just copied is not idle
    sections: report.Sections = {
        "Versions": [*installation.check_versions(torch, machine)],
        "GPUs": [
            *devices.check_links(machine),
            *devices.check_asked_for(machine, torch, kind),
            *rates,
            *devices.check_nodes(machine),
        ],
        "Memory": [
            configuration,
            *memory.check_memory(traced, has_gpu=devices.may_have_gpu(machine, torch)),
        ],
        "Engine": [installation.check_plugin(os.environ)],
    }
    title = f"kv-offload {__version__} doctor"
    if arguments.json:
        print(report.as_json(title, sections))
    else:
        print(report.as_text(title, sections, colour=shows_colour()))
    return int(report.counts(sections)["problem"] > 0)
