"""The pictures of the docs, made from what runs: `python -m bench.screens`.

It starts a vLLM server with the plugin on the CPU, with a small model of random weights, has
conversations with it while a Prometheus scrapes it, and writes into `--out`:

    doctor.svg      what `kv-offload doctor` says on this machine, with a wrong `VLLM_PLUGINS`
    status.svg      the page of `kv-offload status`, read during the conversations
    dashboard.svg   the panels of docs/grafana/kv-offload.json, from Prometheus's answers to them

It needs vLLM's CPU engine, the packages of `[dev]`, and `prometheus`, as Debian's package of that
name brings it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bench.screens.conversations import talk
from bench.screens.dashboard import draw
from bench.screens.terminal import doctor, status
from tests.support.dashboard import DASHBOARD
from tests.support.prometheus import PROGRAM, scraping
from tests.support.server import serving

HOST_CACHE = "48MiB"
"""Little enough to fill up, and more than the 16 MiB of the engine's own cache."""

BETWEEN_READINGS = 2.0
"""Seconds, as `kv-offload status` waits."""


def say(message: str) -> None:
    """Print a line of progress."""
    print(message, file=sys.stderr, flush=True)


def make(out: Path, seconds: float) -> None:
    """Write the pictures of a server that had conversations for this long."""
    out.mkdir(parents=True, exist_ok=True)
    say("running kv-offload doctor")
    (out / "doctor.svg").write_text(doctor())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        say("starting a server")
        with serving(folder, cpu_bytes=HOST_CACHE) as server, scraping(server, folder) as asked:
            say(f"having conversations for {seconds:.0f} s")
            start = time.time()
            talking = threading.Thread(target=talk, args=(server, seconds))
            talking.start()
            time.sleep(max(0.0, seconds - 2 * BETWEEN_READINGS))
            (out / "status.svg").write_text(status(server, BETWEEN_READINGS))
            talking.join()
            draw(DASHBOARD["panels"], asked, (start, time.time()), out / "dashboard.svg")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the pictures and return the exit status."""
    parser = argparse.ArgumentParser(description="Make the pictures of the docs.")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="folder for them")
    parser.add_argument(
        "--seconds", type=float, default=120, help="how long conversations go on (default 120)"
    )
    options = parser.parse_args(arguments)
    if PROGRAM is None:
        say("there is no program `prometheus` on the PATH: install Debian's package of that name")
        return 1
    make(options.out, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
