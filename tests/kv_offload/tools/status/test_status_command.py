"""`kv-offload status`, against a server that answers with recorded pages."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from kv_offload.metrics import KINDS, PREFIX
from tests.kv_offload.tools.status.server import PageServer, having, hits_with, page_server
from tests.support.commands import LIMIT_SECONDS, Terminal


@pytest.fixture
def server() -> Iterator[PageServer]:
    with page_server() as made:
        yield made


@pytest.mark.parametrize("arguments", [["{}", "--once"], ["http://{}/metrics"]])
def test_once_or_without_a_terminal_one_page_is_printed(server, command, arguments):
    status, output, _ = command("status", *(word.format(server.address) for word in arguments))
    assert status == 0
    assert output.startswith(f"kv-offload at http://{server.address}/metrics: small, engine 0\n")
    assert re.search(r"from host memory: not computed +864 +48\.0 %", output)
    assert "none since the start" in output
    assert "\x1b" not in output
    assert server.answered == 1


def test_json_is_one_reading(server, command):
    server.page += hits_with("slots", 512).replace('engine="0"', 'engine="1"')
    reading = json.loads(command("status", server.address, "--once", "--json").out)
    assert server.answered == 1
    assert reading["engines"] == ["0", "1"]
    assert reading["host_tokens"] == 2 * reading["by_engine"]["1"]["host_tokens"] == 2 * 864
    assert reading.keys() - reading["by_engine"]["0"].keys() == {"by_engine"}
    assert (reading["pool"]["slots"], reading["pool"]["pool_slots"]) == (2048 + 512, 2 * 2048)
    suffixes = {"gauge": "", "counter": "_total"}
    names = {f"{PREFIX}{name}{suffixes[KINDS[name]]}" for name in reading["pool"]}
    assert all(f"\n{name}{{" in server.page for name in names), "named as the metrics are"
    assert reading["stored"]["bytes"] == 2 * 27 * 32768
    assert reading["skipped"]["pool_busy"] == reading["errors"]["hook_errors"] == 0
    assert reading["load_times"].keys() == {"median_seconds", "slowest_hundredth_seconds"}


CHECKED = [
    (("--check",), {}, ""),
    (("--check",), {"oldest_copy_seconds": 61.0}, "oldest load or store: 61, more than --max-copy"),
    (("--max-copy-seconds=90",), {"oldest_copy_seconds": 61.0}, ""),
    (("--check",), {"has_remote": 1.0}, "remote store out: 1, more than --max-unread-tiers 0"),
    (("--max-unread-tiers=1",), {"has_remote": 1.0}, ""),
    (("--check",), {"failed_loads_total": 3.0}, ""),
    (("--max-load-failures=2",), {"failed_loads_total": 3.0}, "failed since the start: 3, more"),
    (("--max-load-failures=3",), {"failed_loads_total": 3.0}, ""),
    (("--max-lost-requests=0",), {"lost_requests_total": 1.0}, "a failed load ended: 1, more"),
    (("--max-errors=0",), {"hook_errors_total": 1.0}, "every kind since the start: 1, more"),
    (("--max-paused-stores=0",), {"stores_paused": 1.0}, "engines that paused stores: 1, more"),
    (("--min-hit-ratio=0.5",), {}, ""),
    (
        ("--min-hit-ratio=0.5",),
        {"lookup_tokens_total": 100_000, "hit_tokens_total": 49_000},
        "are loaded: 0.490, less than 0.5",
    ),
    (("--min-hit-ratio=0.4",), {"lookup_tokens_total": 100_000, "hit_tokens_total": 49_000}, ""),
]
"""Options, samples, and the problem that is found."""


@pytest.mark.parametrize(("options", "samples", "problem"), CHECKED)
def test_a_check_has_a_status_and_a_line_for_each_limit_that_is_passed(
    server, command, options, samples, problem
):
    for name, value in samples.items():
        server.page = having(server.page, name, value)
    done = command("status", server.address, *options)
    assert done.status == bool(problem)
    assert problem in done.out if problem else done.out == "ok\n"
    found = json.loads(command("status", server.address, *options, "--json").out)
    assert found["problems"] == done.out.splitlines() * bool(problem)
    assert "host_tokens" in found


def test_a_server_without_our_metrics_is_one_line_and_status_2(server, command):
    server.page = "vllm:a 1\n"
    status, printed, error = command("status", server.address)
    assert (status, printed) == (2, "")
    assert re.fullmatch("kv-offload: http://.* without kv-offload.*\n", error)


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ("--max-copy-seconds=nan", "of 0 or more"),
        ("--max-errors=-1", "of 0 or more"),
        ("--max-errors=few", "of 0 or more"),
        ("--min-hit-ratio=20", "from 0 to 1"),
        ("--interval=0", "from 0.1 to 86400"),
        ("--interval=inf", "from 0.1 to 86400"),
        ("--interval=soon", "from 0.1 to 86400"),
    ],
)
def test_a_number_that_is_out_of_bounds_is_refused(option, allowed, command):
    done = command("status", "localhost:1", option)
    assert done.status == 2
    assert f"is not a number {allowed}" in done.err


PROGRAM = (sys.executable, "-X", "faulthandler")


def watch(
    server: PageServer,
    readings: int,
    meanwhile: str | None = None,
    end: signal.Signals = signal.SIGINT,
) -> tuple[int, str]:
    """Run in a terminal until so many readings were taken, then press Ctrl-C."""
    answered = server.answered + readings
    program = (*PROGRAM, "-m", "kv_offload", "status", server.address, "--interval=0.1")
    with Terminal(program) as terminal:
        deadline = time.monotonic() + LIMIT_SECONDS
        while server.answered < answered:
            assert terminal.process.poll() is None, terminal.output
            assert time.monotonic() < deadline, terminal.output
            time.sleep(0.05)
            if server.answered and meanwhile is not None:
                server.page = meanwhile
        time.sleep(0.3)
        terminal.process.send_signal(end)
        status = terminal.wait()
    return status, terminal.output


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_terminal_shows_rates_until_it_is_ended(server, end):
    status, output = watch(server, readings=4, end=end)
    assert status == 0
    assert "Traceback" not in output
    assert re.search(r"last \d+\.\d s", output)
    assert "\x1b[?1049l" in output, "the terminal is as it was"
    last = output.rpartition("\x1b[?1049l")[2]
    assert "none since the start" in last, "the last page stays"


def test_a_server_that_goes_away_is_waited_for(server):
    status, output = watch(server, readings=4, meanwhile="")
    assert status == 0
    plain = re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output))
    assert "has no metrics of vLLM" in plain
    assert "Shown is what was read before; trying again." in plain
    last = re.sub(r"\s+", " ", output.rpartition("\x1b[?1049l")[2])
    assert "864" in last
    assert "trying again." in last
