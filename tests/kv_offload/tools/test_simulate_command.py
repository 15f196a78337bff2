"""`kv-offload simulate` as a user runs it, on traces whose hits can be counted by hand."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.kv_offload.tools.conftest import Command
from tests.support.published_models import PUBLISHED

BLOCK_BYTES = 131_072 * 512  # of Llama-3.1-8B, as docs/use/sizing.md says
TURNS = [[1, 2], [3, 4], [1, 2, 5], [3, 4, 6]]


def trace_of(prompts: list[list[int]], **more: Any) -> str:
    """Return a trace of these blocks, with its last line first: lines are sorted by time."""
    lines = [
        json.dumps(
            {
                "timestamp": at,
                "input_length": 512 * len(ids),
                "output_length": 1,
                "hash_ids": ids,
                **more,
            }
        )
        for at, ids in enumerate(prompts)
    ]
    return "\n".join(lines[-1:] + lines[:-1])


@pytest.fixture
def simulate(tmp_path: Path, command: Command) -> Command:
    def run(trace: str, sizes: str, *options: str, model: str = "Llama-3.1-8B") -> Any:
        (tmp_path / "trace.jsonl").write_text(trace)
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[model]))
        where = ["--cpu-bytes", sizes, "--model-config", tmp_path]
        return command("simulate", tmp_path / "trace.jsonl", *where, *options)

    return run


def test_hits_by_size_beside_unlimited_memory(simulate):
    sizes = f"{2 * BLOCK_BYTES}B,{6 * BLOCK_BYTES}B"
    done = simulate(trace_of(TURNS), sizes, "--policies", "lru")
    assert [" ".join(line.split()) for line in done.out.splitlines()] == [
        "4 requests, 10 blocks of 512 tokens, 64 MiB each",
        "host memory blocks lru",
        "128 MiB 2 0.0 %",
        "384 MiB 6 40.0 %",
        "unlimited 6 40.0 %",
    ]
    assert done.status == 0


def test_more_memory_than_any_machine_has_is_as_good_as_unlimited(simulate):
    last, unlimited = simulate(trace_of(TURNS), "8000000TiB").out.splitlines()[-2:]
    assert last.split()[2] == "131,072,000,000"
    assert last.split()[3:] == unlimited.split()[2:]


def test_options_decide(simulate):
    """A cache of 1 byte a number halves a block; policies that are asked for are shown, once."""
    trace = trace_of([[1, 2]] * 3, block_size=16)
    options = ("--kv-cache-dtype", "fp8", "--policies", "lru,lru")
    out = simulate(trace, "1MiB,2MiB", *options).out
    assert "6 blocks of 16 tokens, 1 MiB each" in out
    rows = [" ".join(line.split()) for line in out.splitlines()[-2:]]
    assert rows == ["2 MiB 2 66.7 %", "unlimited 2 66.7 %"]


@pytest.mark.parametrize(
    ("sizes", "options", "model", "problem"),
    [
        ("64", (), "Llama-3.1-8B", "Did you mean 64GiB"),
        ("25%", (), "Llama-3.1-8B", "Give sizes with units, separated by"),
        ("1MiB", (), "Llama-3.1-8B", "1 MiB holds no block of 512 tokens, which takes 64 MiB"),
        (
            "1GiB",
            ("--policies", "lru,best"),
            "Llama-3.1-8B",
            "'best' is not a policy: give some of",
        ),
        ("1GiB", (), "gpt-oss-120b", "windows and states are kept only at the end of a prompt"),
    ],
)
def test_what_is_wrong_is_said_with_the_remedy(simulate, sizes, options, model, problem):
    done = simulate(trace_of(TURNS), sizes, *options, model=model)
    assert done.status == 2
    assert problem in done.err


@pytest.mark.parametrize(
    ("trace", "problem"),
    [
        ("", "it has no requests"),
        (trace_of([[], []]), "no prompt fills a block of 512 tokens"),
        ('{"timestamp": 0}', "line 1: Object missing required field `input_length`"),
    ],
)
def test_a_trace_that_cannot_be_replayed(simulate, trace, problem):
    done = simulate(trace, "1GiB")
    assert done.status == 2
    assert problem in done.err


@pytest.mark.parametrize(
    ("path", "problem"),
    [("nowhere", "No such file or directory"), ("x" * 300, "File name too long")],
)
def test_a_trace_that_is_not_there(command, path, problem):
    done = command("simulate", path, "--cpu-bytes=1GiB", "--model-config=nowhere")
    assert done.status == 2
    assert f"{path}: cannot be read: {problem}. Give a file of JSON" in done.err


def test_a_pipe_is_read_and_said_to_be_waited_for(tmp_path, simulate, command):
    sizes = f"{6 * BLOCK_BYTES}B"
    of_file = simulate(trace_of(TURNS), sizes)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(trace_of(TURNS),))
    writer.start()
    done = command("simulate", pipe, "--cpu-bytes", sizes, "--model-config", tmp_path)
    writer.join()
    assert (done.status, done.out) == (0, of_file.out)
    assert done.err == f"kv-offload: {pipe} is a pipe: waiting for its writer to end\n"
    assert of_file.err == ""


def test_traces_of_two_block_sizes_are_refused(simulate):
    done = simulate(f"{trace_of(TURNS)}\n{trace_of(TURNS, block_size=16)}", "1GiB")
    assert done.status == 2
    assert "blocks of [16, 512] tokens" in done.err
