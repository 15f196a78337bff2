"""`kv-offload simulate TRACE`: a trace's hit ratio by host memory size and policy."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.text import Text

from kv_offload.cache.policies import POLICIES
from kv_offload.config.file import show
from kv_offload.config.sizes import format_size
from kv_offload.errors import CapacityError, ConfigError, UnsupportedError
from kv_offload.simulation.replay import infinite, replay
from kv_offload.simulation.trace import TraceRequest, read_trace
from kv_offload.tools.output import Report, make_progress, make_table
from kv_offload.tools.sizing.command import add_shape, parse_cpu_bytes, read_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kv-offload simulate TRACE`."""
    parser.description = (
        "Replay a trace of requests through the cache manager and the eviction policies, and print "
        "the hit rate for each size of host memory. A trace has one JSON object per line, with "
        "timestamp, input_length, output_length and hash_ids. Needs neither an engine nor a GPU. "
        "The exit status is 2 if the trace, the model or an argument is wrong, else 0."
    )
    parser.add_argument("trace", metavar="TRACE", help="file of JSON lines, as from record_trace")
    parser.add_argument(
        "--cpu-bytes", metavar="SIZES", required=True, help="separated by commas: 64GiB,256GiB"
    )
    parser.add_argument(
        "--model-config",
        metavar="MODEL",
        required=True,
        help="the model's config.json, its folder, or a name in the local Hugging Face cache",
    )
    parser.add_argument(
        "--policies",
        metavar="NAMES",
        default=",".join(POLICIES),
        help="values of eviction_policy (default: %(default)s)",
    )
    add_shape(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> Report:
    # A share of this machine's memory is refused: the user is usually asking about another machine.
    give = "sizes with units, separated by commas: 64GiB,256GiB"
    sizes = [parse_cpu_bytes(text, None, give) for text in arguments.cpu_bytes.split(",")]
    policies = [*dict.fromkeys(arguments.policies.split(","))]
    if unknown := [name for name in policies if name not in POLICIES]:
        raise ConfigError(
            f"--policies: {show(unknown[0])} is not a policy: give some of {','.join(POLICIES)}"
        )
    path = Path(os.path.expanduser(arguments.trace))
    with contextlib.suppress(OSError):  # reading the file reports the problem
        if path.is_fifo():
            print(f"kv-offload: {path} is a pipe: waiting for its writer to end", file=sys.stderr)
    requests = sorted(read_trace(path), key=lambda request: request.timestamp)
    size = read_size(arguments.model_config, arguments, _block_tokens(path, requests))
    if not any(request.hash_ids for request in requests):
        raise ConfigError(
            f"{path}: no prompt fills a block of {size.block_tokens} tokens, so the trace does not "
            "show which prompts repeat: give one of longer prompts"
        )
    if size.prompt_bytes:
        raise UnsupportedError(
            f"{arguments.model_config}: windows and states are kept only at the end of a prompt, "
            "which a trace does not show. Start the engine, and look at its metrics"
        )
    fitting = {cpu_bytes: size.blocks_in(cpu_bytes) for cpu_bytes in sizes}
    if least := [cpu_bytes for cpu_bytes, blocks in fitting.items() if not blocks]:
        raise CapacityError(
            f"--cpu-bytes: {format_size(least[0])} holds no block of {size.block_tokens} "
            f"tokens, which takes {format_size(size.block_bytes)}: give more"
        )
    table = make_table("host memory", "blocks", *policies)
    endless, found = infinite(requests), []
    with make_progress() as progress:
        total = len(fitting) * len(policies) * len(requests)
        task = progress.add_task("replaying", total=total)
        for cpu_bytes, blocks in fitting.items():
            slots = min(blocks, endless.stored + 1)  # more slots would not give more hits
            ratios = {}
            for policy in policies:
                served = progress.track(requests, total, task_id=task)
                ratios[policy] = replay(served, policy, slots).hit_ratio
            found.append({"cpu_bytes": cpu_bytes, "blocks": blocks, "hit_ratios": ratios})
            table.add_row(format_size(cpu_bytes), f"{blocks:,}", *map(_percent, ratios.values()))
    table.add_row(
        "unlimited", f"{endless.stored:,}", *[_percent(endless.hit_ratio)] * len(policies)
    )
    counts = (
        f"{len(requests):,} requests, {endless.blocks:,} blocks of {size.block_tokens} tokens, "
        f"{format_size(size.block_bytes)} each"
    )
    data = {
        "requests": len(requests),
        "blocks": endless.blocks,
        "block_tokens": size.block_tokens,
        "block_bytes": size.block_bytes,
        "sizes": found,
        "unlimited": {"blocks": endless.stored, "hit_ratio": endless.hit_ratio},
    }
    return Report(data, Group(Text(counts), table))


def _block_tokens(path: Path, requests: Sequence[TraceRequest]) -> int:
    found = {request.block_tokens for request in requests}
    if len(found) != 1:
        what = "no requests" if not found else f"blocks of {sorted(found)} tokens"
        raise ConfigError(f"{path}: it has {what}: give a trace of one engine that served some")
    return found.pop()


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"
