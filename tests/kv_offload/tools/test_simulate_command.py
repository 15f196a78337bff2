"""`kv-offload simulate` as a user runs it, on traces whose hits can be counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kv_offload.tools.main import main
from tests.support.published_models import PUBLISHED

BLOCK_BYTES = 131_072 * 512  # of Llama-3.1-8B, as docs/use/sizing.md says
TURNS = [[1, 2], [3, 4], [1, 2, 5], [3, 4, 6]]


def write_trace(folder: Path, prompts: list[list[int]], **more: Any) -> Path:
    """Write a trace of these blocks, with its last line first: lines are sorted by time."""
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
    trace = folder / "trace.jsonl"
    trace.write_text("\n".join(lines[-1:] + lines[:-1]))
    return trace


def run(folder: Path, trace: Path, sizes: str, *options: str, model: str = "Llama-3.1-8B") -> int:
    (folder / "config.json").write_text(json.dumps(PUBLISHED[model]))
    where = ["--cpu-bytes", sizes, "--model-config", str(folder)]
    return main(["simulate", str(trace), *where, *options])


def test_hits_by_size_beside_endless_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path, TURNS)
    sizes = f"{2 * BLOCK_BYTES}B,{6 * BLOCK_BYTES}B"
    assert run(tmp_path, trace, sizes, "--policies", "lru") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "4 requests, 10 blocks of 512 tokens, 64 MiB each",
        "host memory blocks lru",
        "128 MiB 2 0.0 %",
        "384 MiB 6 40.0 %",
        "endless 6 40.0 %",
    ]


def test_more_memory_than_any_machine_has_is_as_good_as_endless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the trace does not fill takes no memory here."""
    assert run(tmp_path, write_trace(tmp_path, TURNS), "8000000TiB") == 0
    last, endless = capsys.readouterr().out.splitlines()[-2:]
    assert last.split()[2] == "131,072,000,000"
    assert last.split()[3:] == endless.split()[2:]


def test_options_decide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache of 1 byte a number halves a block; at the second use only the third hits."""
    trace = write_trace(tmp_path, [[1, 2]] * 3, block_size=16)
    options = ("--kv-cache-dtype", "fp8", "--store-after-uses", "2", "--policies", "lru")
    assert run(tmp_path, trace, "1MiB,2MiB", *options) == 0
    out = capsys.readouterr().out
    assert "6 blocks of 16 tokens, 1 MiB each" in out
    assert " ".join(out.splitlines()[-2].split()) == "2 MiB 2 33.3 %"


@pytest.mark.parametrize(
    ("sizes", "options", "model", "problem"),
    [
        ("64", (), "Llama-3.1-8B", "Did you mean 64GiB"),
        ("25%", (), "Llama-3.1-8B", "Give sizes with units, with commas"),
        ("1MiB", (), "Llama-3.1-8B", "1 MiB holds no block of 512 tokens, which takes 64 MiB"),
        ("1GiB", ("--policies", "lru,best"), "Llama-3.1-8B", "'best' is no policy: give some of"),
        ("1GiB", (), "gpt-oss-120b", "of windows and states only the end of a prompt is kept"),
    ],
)
def test_what_is_wrong_is_said_with_the_remedy(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sizes: str,
    options: tuple[str, ...],
    model: str,
    problem: str,
) -> None:
    trace = write_trace(tmp_path, TURNS)
    assert run(tmp_path, trace, sizes, *options, model=model) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it has no requests"),
        ('{"timestamp": 0}', "line 1: Object missing required field `input_length`"),
    ],
)
def test_a_trace_that_cannot_be_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    assert run(tmp_path, trace, "1GiB") == 2
    assert problem in capsys.readouterr().err


def test_traces_of_two_block_sizes_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path, TURNS)
    first = trace.read_text()
    second = write_trace(tmp_path, TURNS, block_size=16).read_text()
    trace.write_text(f"{first}\n{second}")
    assert run(tmp_path, trace, "1GiB") == 2
    assert "blocks of [16, 512] tokens" in capsys.readouterr().err
