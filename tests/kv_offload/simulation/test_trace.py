"""Reading a trace: what a line must have, and what is said where it has not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kv_offload.simulation.trace import TraceError, TraceRequest, read_trace

GOOD = {"timestamp": 12.5, "input_length": 1000, "output_length": 7, "hash_ids": [0, 4]}


def write(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_every_line_is_a_request_and_empty_lines_are_none(tmp_path):
    path = write(tmp_path, json.dumps(GOOD), "", json.dumps(GOOD | {"hash_ids": [], "more": 1}))
    assert list(read_trace(path)) == [
        TraceRequest(12.5, 1000, 7, (0, 4)),
        TraceRequest(12.5, 1000, 7, ()),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Input data was truncated"),
        ("[" * 100_000, "Expected `object`"),
        ('{"more": ' + "[" * 100_000, "maximum recursion depth"),
        (GOOD | {"timestamp": True}, r"Expected `float`, got `bool` - at `\$\.timestamp`"),
        (GOOD | {"timestamp": -1}, r"Expected `float` >= 0\.0 - at `\$\.timestamp`"),
        (GOOD | {"timestamp": float("nan")}, "JSON is malformed"),
        (GOOD | {"input_length": 1.5}, r"Expected `int`, got `float` - at `\$\.input_length`"),
        (GOOD | {"output_length": -1}, r"Expected `int` >= 0 - at `\$\.output_length`"),
        (GOOD | {"hash_ids": 7}, r"Expected `array`, got `int` - at `\$\.hash_ids`"),
        (GOOD | {"hash_ids": [-1]}, r"Expected `int` >= 0 - at `\$\.hash_ids\[0\]`"),
        (GOOD | {"hash_ids": [3, 4, 3]}, "hash_ids names a block twice"),
        (GOOD | {"block_size": 0}, r"Expected `int` >= 1 - at `\$\.block_size`"),
        *(
            ({k: v for k, v in GOOD.items() if k != missing}, f"missing required field `{missing}`")
            for missing in GOOD
        ),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, line, message):
    bad = line if isinstance(line, str) else json.dumps(line)
    path = write(tmp_path, json.dumps(GOOD), "", bad)
    requests = read_trace(path)
    next(requests)
    with pytest.raises(TraceError, match=rf"trace\.jsonl, line 3: .*{message}"):
        next(requests)


def test_a_last_line_that_is_written_or_was_cut_off_is_none(tmp_path):
    whole = json.dumps(GOOD)
    path = tmp_path / "trace.jsonl"
    for cut in (whole[:1], whole[:-9]):
        path.write_text(f"{whole}\n{cut}")
        assert len(list(read_trace(path))) == 1
    path.write_text(f"{whole}\n{whole}")
    assert len(list(read_trace(path))) == 2
    path.write_text("this is no trace")
    with pytest.raises(TraceError, match="line 1: JSON is malformed"):
        next(read_trace(path))


def test_a_file_that_is_no_text_or_not_there_is_named(tmp_path):
    with pytest.raises(TraceError, match="missing"):
        next(read_trace(tmp_path / "missing.jsonl"))
    path = tmp_path / "binary.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="binary"):
        next(read_trace(path))
