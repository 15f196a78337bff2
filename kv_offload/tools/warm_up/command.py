"""`kv-offload warm-up`: its arguments, progress and summary."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from kv_offload.errors import RequestError
from kv_offload.tools.arguments import add_count
from kv_offload.tools.status.figures import Figures
from kv_offload.tools.status.read import metrics_url, read
from kv_offload.tools.warm_up.client import KEY_VARIABLE, Client, Result
from kv_offload.tools.warm_up.prompts import read_prompts
from kv_offload.wishes import KEY, read_wishes

AT_ONCE = 8
PROGRESS_SECONDS = 1.0
SETTLE_SECONDS = 30.0
"""How long the summary waits for the last stores; a busy server has always some."""
SHOWN_ERRORS = 5


def add_command(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `kv-offload warm-up URL FILE`."""
    parser = subcommands.add_parser(
        "warm-up",
        help="have a running server compute or load a list of prompts",
        description="Send each prompt of a file to a running server, which computes it, or loads "
        "it from host memory or its disk, and answers with one token. The exit status is 1 if the "
        "server refused a prompt, and 2 if there is no server or the file is wrong. The key of "
        f"the server is read from {KEY_VARIABLE}.",
    )
    parser.add_argument("url", metavar="URL", help="the server: localhost:8000")
    parser.add_argument(
        "file",
        metavar="FILE",
        help='JSON Lines: {"prompt": "..."} or {"messages": [...]}, with what else the request '
        "needs",
    )
    parser.add_argument("--model", metavar="NAME", help="which model (default: the server's first)")
    parser.add_argument(
        "--retain-seconds", type=float, metavar="S", help="have the server retain them so long"
    )
    parser.add_argument("--priority", type=int, metavar="N", help="priority of what is retained")
    add_count(parser, "--at-once", of="prompts under way at a time", default=AT_ONCE)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    prompts = read_prompts(arguments.file)
    url = metrics_url(arguments.url)
    before = Figures(read(url))
    client = Client(url.removesuffix("/metrics"))
    more = {"model": arguments.model or client.model(), **_wishes(arguments)}
    began = time.monotonic()
    results: list[Result] = []
    shown = began
    for result in client.send(prompts, more, arguments.at_once):
        results.append(result)
        if time.monotonic() - shown >= PROGRESS_SECONDS:
            shown = time.monotonic()
            print(f"{len(results)} of {len(prompts)} prompts", file=sys.stderr)
    seconds = time.monotonic() - began
    _summarise(results, seconds)
    failed = sorted((r for r in results if r.error), key=lambda result: result.prompt.line)
    for result in failed[:SHOWN_ERRORS]:
        print(f"{arguments.file}, line {result.prompt.line}: {result.error}", file=sys.stderr)
    if len(failed) > SHOWN_ERRORS:
        print(f"and {len(failed) - SHOWN_ERRORS} more", file=sys.stderr)
    _show_figures(before, _settled(url))  # last: the server may have gone meanwhile
    return 1 if failed else 0


def _wishes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what is added to bodies. Raises `RequestError` as the server would."""
    given = {"retain_seconds": arguments.retain_seconds, "priority": arguments.priority}
    params = {KEY: {name: value for name, value in given.items() if value is not None}}
    try:
        read_wishes(params)
    except RequestError as error:
        raise RequestError(f"--retain-seconds or --priority: {error.args[0]}") from error
    return {"kv_transfer_params": params} if params[KEY] else {}


def _settled(url: str) -> Figures:
    """Return the server's figures once it has stored what waits."""
    deadline = time.monotonic() + SETTLE_SECONDS
    stored = None
    while True:
        time.sleep(0.5)  # its figures follow the last step
        figures = Figures(read(url))
        stored, before = figures.values["stored_slots"], stored
        waits = any(figures.some("running_stores", "waiting_slots").values())
        if (not waits and stored == before) or time.monotonic() > deadline:
            return figures


def _summarise(results: list[Result], seconds: float) -> None:
    tokens = sum(result.tokens for result in results)
    done = sum(not result.error for result in results)
    print(f"{done} of {len(results)} prompts with {tokens:,} tokens in {seconds:.1f} s", flush=True)


def _show_figures(before: Figures, after: Figures) -> None:
    def grown(name: str) -> float:
        return after.values[name] - before.values[name]

    print(f"  from host memory            {grown('host_tokens'):>14,.0f} tokens")
    print(f"  from the engine's own cache {grown('gpu_tokens'):>14,.0f} tokens")
    print(f"  stored to host memory       {grown('stored_slots'):>14,.0f} slots")
    print(f"  retained now                {after.values['retained_slots']:>14,.0f} slots")
    if refused := grown("unretained_slots"):
        print(f"  without room to be retained {refused:>14,.0f} slots (max_retained_share)")
    print("The last lines are the server's figures, with what its users did meanwhile.")
