"""The links between host memory and the GPUs of a host: what each carries alone, and all at once.

usage: python -m bench.links [--gpus 2]

Each GPU has a process, as ranks have. It copies scattered blocks as the plugin does, and one large
piece as a whole: first alone, one GPU after the other, then while all others do the same.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.machine import output_of

PAGE_BYTES = 32 << 10
"""A page of a rank of two, of a model with 8 KV heads of 128 in blocks of 16 tokens."""
BLOCKS = 512
"""Half a GiB, in the 32 layers of a bed."""
ROUNDS = 12
WAYS = ("blocks", "one piece")
DIRECTIONS = ("load", "store")
ANSWER_SECONDS = 120
END_SECONDS = 10
DRIVER = Path("/dev/nvidiactl")
"""There where a driver of NVIDIA's is."""
UNDERLINED = re.compile(r"\x1b\[\d*m")
"""What nvidia-smi prints around its header, also where no terminal reads it."""

Rates = dict[str, dict[str, dict[str, list[float]]]]


def host_of(gpus: int) -> dict[str, Any]:
    """Return how GPUs, memory and processors of this host are linked, and the rates of its links.

    Rates are bytes per second by direction, way, and `alone` or `at once`, with one for each GPU.
    Empty without GPUs, and where a GPU's process fails: then `error` says so.
    """
    nodes = Path("/sys/devices/system/node").glob("node[0-9]*/meminfo")
    facts: dict[str, Any] = {
        "topology": UNDERLINED.sub("", output_of("nvidia-smi", "topo", "-m") or ""),
        "memory_by_node": {
            path.parent.name: path.read_text().split("MemTotal:")[1].split("\n")[0].strip()
            for path in sorted(nodes)
        },
    }
    facts |= {"gpus": [], "rates": {}}
    if not DRIVER.exists():
        return facts
    processes, pipes = [], []
    spawn = multiprocessing.get_context("spawn")
    for gpu in range(gpus):
        ours, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=_copy, args=(gpu, theirs)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        facts["gpus"] = [_answer(pipe) for pipe in pipes]
        facts["rates"] = _rates(pipes)
    except (EOFError, OSError) as error:  # of a process that has ended, or does not answer
        facts["error"] = f"links: {type(error).__name__}: {error}"
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.join(END_SECONDS)
            process.kill()
    return facts


def _rates(pipes: list[Connection]) -> Rates:
    rates: Rates = {}
    for direction in DIRECTIONS:
        for way in WAYS:
            alone = []
            for pipe in pipes:
                pipe.send((direction, way))
                alone.append(_answer(pipe))
            for pipe in pipes:
                pipe.send((direction, way))
            at_once = [_answer(pipe) for pipe in pipes]
            rates.setdefault(direction, {})[way] = {"alone": alone, "at once": at_once}
    return rates


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(ANSWER_SECONDS):
        raise TimeoutError(f"a GPU's process did not answer within {ANSWER_SECONDS} s")
    return pipe.recv()


def _copy(gpu: int, pipe: Connection) -> None:
    """Copy as asked, on one GPU; the first answer says which that is."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Before CUDA is looked for.
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    from kv_swap.cuda.device import CudaRegistrar
    from kv_swap.engine import Direction

    from bench.swap.bed import Case, CudaBed, scattered

    bed = CudaBed(PAGE_BYTES, BLOCKS)
    bus = CudaRegistrar(bed.device).pci_bus_id.lower()
    node = Path(f"/sys/bus/pci/devices/{bus}/numa_node")
    pipe.send(
        {
            "name": bed.torch.cuda.get_device_name(0),
            "pci_bus_id": bus,
            "numa_node": node.read_text().strip() if node.exists() else None,
            "arena_by_node": _pages_by_node(bed.arena.address),
        }
    )
    while True:
        try:
            direction, way = pipe.recv()
        except EOFError:
            break
        job = scattered(Direction(direction), BLOCKS, BLOCKS)
        nbytes = len(job.pairs) * bed.layout.slot_bytes
        case = Case(bed.engine, job, nbytes, {})
        seconds = case.seconds.setdefault("engine", [])
        for _ in range(ROUNDS):
            if way == "blocks":
                case.run()
            else:
                started = time.perf_counter()
                bed.copy(job.direction, slice(nbytes)).synchronize()
                seconds.append(time.perf_counter() - started)
        pipe.send(nbytes / statistics.median(seconds[2:]))


def _pages_by_node(address: int) -> dict[str, int]:
    """Return how many pages of the mapping at an address lie on which NUMA node, if Linux says.

    Linux may show a mapping and those beside it as one.
    """
    maps = Path("/proc/self/numa_maps")
    found: dict[str, int] = {}
    for line in maps.read_text().splitlines() if maps.exists() else ():
        start, *words = line.split()
        if int(start, 16) > address:
            break
        found = {k: int(v) for k, _, v in (w.partition("=") for w in words) if k[:1] == "N"}
    return found


def table(rates: Rates) -> str:
    """Return the rates as Markdown, in GB/s."""
    lines = ["| | alone | all at once | of alone |", "| --- | ---: | ---: | ---: |"]
    for direction, ways in rates.items():
        for way, found in ways.items():
            alone, at_once = found["alone"], found["at once"]
            cells = [" / ".join(f"{rate / 1e9:.1f}" for rate in of) for of in (alone, at_once)]
            shares = (b / a for a, b in zip(alone, at_once, strict=True))
            cells.append(" / ".join(f"{share:.2f}" for share in shares))
            lines.append(f"| {direction}, {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    """Measure, print the table, and then all that was found as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("--gpus", type=int, default=2)
    found = host_of(parser.parse_args(words).gpus)
    print(table(found["rates"]))
    print(json.dumps(found, indent=1))
    sys.exit(found.get("error"))


if __name__ == "__main__":
    main()
