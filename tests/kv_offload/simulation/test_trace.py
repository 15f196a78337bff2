"""Reading a trace: what a line must have, and what is said where it has not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kv_offload.simulation.trace import TraceError, TraceRequest, read_trace, split_blocks

GOOD = {"timestamp": 12.5, "input_length": 1000, "output_length": 7, "hash_ids": [0, 4]}


def write(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_every_line_is_a_request_and_empty_lines_are_none(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(GOOD), "", json.dumps(GOOD | {"hash_ids": [], "more": 1}))
    assert list(read_trace(path)) == [
        TraceRequest(12.5, 1000, 7, (0, 4)),
        TraceRequest(12.5, 1000, 7, ()),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", r"'\[1\]' is no JSON object"),
        (GOOD | {"timestamp": True}, "timestamp is True: give milliseconds, 0 or more"),
        (GOOD | {"timestamp": -1}, "timestamp is -1"),
        (GOOD | {"timestamp": float("nan")}, "timestamp is nan"),
        (GOOD | {"input_length": 1.5}, "input_length is 1.5: give a number of tokens"),
        (GOOD | {"output_length": True}, "output_length is True"),
        (GOOD | {"hash_ids": 7}, "hash_ids is not a list of integers"),
        (GOOD | {"hash_ids": [-1]}, "hash_ids is not a list of integers"),
        (GOOD | {"hash_ids": [3, 4, 3]}, "hash_ids names a block twice"),
        *(
            ({name: GOOD[name] for name in GOOD if name != missing}, f"{missing} is missing")
            for missing in GOOD
        ),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, line: Any, message: str) -> None:
    bad = line if isinstance(line, str) else json.dumps(line)
    path = write(tmp_path, json.dumps(GOOD), "", bad)
    requests = read_trace(path)
    next(requests)
    with pytest.raises(TraceError, match=rf"trace\.jsonl, line 3: {message}"):
        next(requests)


def test_a_last_line_that_is_written_or_was_cut_off_is_none(tmp_path: Path) -> None:
    whole = json.dumps(GOOD)
    path = tmp_path / "trace.jsonl"
    for cut in (whole[:1], whole[:-9]):
        path.write_text(f"{whole}\n{cut}")
        assert len(list(read_trace(path))) == 1
    path.write_text(f"{whole}\n{whole}")
    assert len(list(read_trace(path))) == 2
    path.write_text("this is no trace")
    with pytest.raises(TraceError, match="line 1: not JSON"):
        next(read_trace(path))


def test_a_file_that_is_no_text_or_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="missing"):
        next(read_trace(tmp_path / "missing.jsonl"))
    path = tmp_path / "binary.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="binary"):
        next(read_trace(path))


def test_split_blocks_keeps_prefixes_and_their_order() -> None:
    (one, other) = split_blocks(
        [TraceRequest(0, 1024, 1, (0, 4)), TraceRequest(1, 1024, 1, (0, 5))], 2
    )
    assert one.hash_ids == (0, 1, 8, 9)
    assert other.hash_ids == (0, 1, 10, 11)
