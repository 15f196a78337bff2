"""What an engine records of its requests, and what becomes of it on a disk that fails."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kv_offload.config import OffloadConfig
from kv_offload.errors import ConfigError
from kv_offload.messages import WorkerCapacity
from kv_offload.simulation import trace_recorder
from kv_offload.simulation.trace import TraceRequest, read_trace
from kv_offload.simulation.trace_recorder import MAX_WAITING, TraceRecorder
from tests.support.filesystems import as_another_user, no_file_grows_beyond
from tests.support.waiting import LIMIT_SECONDS, wait_until

MIB = 1 << 20
HASH_TOKENS = 16
PER_BLOCK = 512 // HASH_TOKENS


def request(prompt: str, blocks: float, output_tokens: int = 3) -> Any:
    """One with a block for each 512 tokens; equal prompts begin alike."""
    prompt_tokens = int(blocks * 512)
    hashes = [
        f"{prompt} {place}".encode() for place in range((prompt_tokens + output_tokens) // 16)
    ]
    return SimpleNamespace(
        num_prompt_tokens=prompt_tokens,
        num_tokens=prompt_tokens + output_tokens,
        block_hashes=hashes,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@contextlib.contextmanager
def recording(path: Path, max_bytes: int = MIB) -> Iterator[TraceRecorder]:
    recorder = TraceRecorder(path, max_bytes)
    try:
        yield recorder
    finally:
        recorder.close(LIMIT_SECONDS)


def record(path: Path, *requests: Any) -> list[TraceRequest]:
    with recording(path) as recorder:
        for one in requests:
            recorder.record(one, HASH_TOKENS)
    assert recorder.take_errors() == 0
    return list(read_trace(path))


def test_requests_are_recorded_in_the_order_in_which_they_end(path):
    recorded = record(
        path, request("a", 2.5, 700), request("b", 1), request("a", 3), request("", 0.9)
    )
    lengths = [(one.input_length, one.output_length, len(one.hash_ids)) for one in recorded]
    assert lengths == [(1280, 700, 2), (512, 3, 1), (1536, 3, 3), (460, 3, 0)]
    assert {one.block_tokens for one in recorded} == {512}
    assert recorded[0].hash_ids == recorded[2].hash_ids[:2]
    assert not set(recorded[1].hash_ids) & set(recorded[2].hash_ids)
    times = [one.timestamp for one in recorded]
    assert times == sorted(times)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_block_is_named_by_the_hash_that_covers_all_of_it(path):
    one, other = request("a", 2), request("a", 2)
    other.block_hashes[PER_BLOCK - 1] = b"other"
    mine, its = (found.hash_ids for found in record(path, one, other))
    assert mine[0] != its[0]
    assert mine[1] == its[1]


def test_large_blocks_are_recorded_as_they_are(path):
    one = request("a", 6)
    one.block_hashes = one.block_hashes[:4]
    with recording(path) as recorder:
        recorder.record(one, 784)
    (found,) = read_trace(path)
    assert (found.block_tokens, len(found.hash_ids)) == (784, 3)


def test_another_process_names_the_same_blocks_otherwise(tmp_path):
    script = (
        "from pathlib import Path; import sys;"
        "from tests.kv_offload.simulation.test_trace_recorder import record, request;"
        "record(Path(sys.argv[1]), request('a', 2))"
    )
    files = tmp_path / "one", tmp_path / "two"
    record(files[0], request("a", 2))
    subprocess.run([sys.executable, "-c", script, str(files[1])], check=True)
    here, there = (next(read_trace(file)).hash_ids for file in files)
    assert len(here) == len(there) == 2
    assert not set(here) & set(there)


def test_the_file_ends_at_its_bound(path, caplog):
    caplog.set_level(logging.INFO)
    with recording(path, 2000) as recorder:
        for number in range(100):
            recorder.record(request(str(number), 2), HASH_TOKENS)
        recorder.record(request("small", 0), HASH_TOKENS)
    assert 1800 < path.stat().st_size <= 2000
    recorded = list(read_trace(path))
    assert all(one.hash_ids for one in recorded), "it has no gap"
    assert recorder.take_errors() == 0
    (message,) = caplog.messages
    assert f"{path}: the trace ends here" in message


@pytest.mark.parametrize("room", [0, 10])
def test_a_full_disk_costs_lines_and_later_ones_are_written(path, caplog, room):
    errors: list[int] = []
    with recording(path) as recorder:
        recorder.record(request("a", 2), HASH_TOKENS)
        wait_until(lambda: path.stat().st_size)
        with no_file_grows_beyond(path.stat().st_size + room):
            for _ in range(2):
                recorder.record(request("b", 2), HASH_TOKENS)
            wait_until(lambda: errors.append(recorder.take_errors()) or sum(errors) == 2)
        recorder.record(request("c", 3), HASH_TOKENS)
    assert [len(one.hash_ids) for one in read_trace(path)] == [2, 3]
    assert recorder.take_errors() == 0
    (message,) = caplog.messages
    assert f"kv-offload: {path}: a request could not be recorded: " in message


def test_a_folder_that_vanishes_is_told(path, caplog):
    with recording(path) as recorder:
        path.unlink()
        path.parent.rmdir()
        recorder.record(request("a", 2), HASH_TOKENS)
    assert recorder.take_errors() == 1
    assert "the file was removed" in caplog.text


def test_a_disk_that_hangs_keeps_nobody_waiting(path, monkeypatch):
    """A write into a pipe that nobody reads hangs as one to a dead file server does."""
    reader, writer = os.pipe()
    hangs = SimpleNamespace(**{**vars(os), "pwrite": lambda *_: os.write(writer, bytes(MIB))})
    monkeypatch.setattr(trace_recorder, "os", hangs)
    recorder = TraceRecorder(path, MIB)
    began = time.monotonic()
    for _ in range(MAX_WAITING + 50):
        recorder.record(request("a", 1), HASH_TOKENS)
    recorder.close(0.05)
    assert time.monotonic() - began < LIMIT_SECONDS
    assert 49 <= recorder.take_errors() <= 50, "one is being written, or waits"
    os.close(reader)  # the write fails, and so do all that wait
    recorder.close(LIMIT_SECONDS)
    os.close(writer)
    # Of the first write the pipe had taken as much as it holds, which is more than the line.
    assert recorder.take_errors() >= MAX_WAITING - 1


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        TraceRecorder(path, MIB)
    return str(caught.value)


def test_a_file_that_cannot_be_begun_is_refused_with_the_remedy(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, problem in {
        tmp_path / "missing" / "trace": "No such file or directory",
        tmp_path: "Is a directory",
        pipe: "No such device or address",
    }.items():
        assert refusal(path) == (
            f"kv-offload: record_trace: {str(path)!r}: the file cannot be created: {problem}. Name "
            "one in a folder that this user may write, or leave record_trace out"
        )
    empty = tmp_path / "empty"
    empty.touch(0o644)
    record(empty, request("a", 1))
    assert empty.stat().st_mode & 0o777 == 0o600


def files(path: Path) -> dict[str, int]:
    return {file.name: len(list(read_trace(file))) for file in path.parent.iterdir()}


def test_an_engine_that_starts_again_records_beside_what_is_there(path, caplog):
    """As after a crash: a supervisor starts it with the same settings."""
    caplog.set_level(logging.INFO)
    first = path.with_name("trace.jsonl.1")
    record(path, request("a", 1))
    earlier = path.read_bytes()
    assert not caplog.messages
    with recording(path) as recorder:
        recorder.record(request("b", 1), HASH_TOKENS)
    assert caplog.messages == [f"kv-offload: {path} is taken: requests are recorded to {first}"]
    with recording(path), recording(path) as recorder:
        recorder.record(request("c", 1), HASH_TOKENS)
        recorder.record(request("d", 1), HASH_TOKENS)
    # The third engine recorded nothing. While it ran the fourth left its file alone.
    expected = {path.name: 1, first.name: 1, "trace.jsonl.2": 0, "trace.jsonl.3": 2}
    assert files(path) == expected
    assert path.read_bytes() == earlier
    with recording(path) as recorder:
        recorder.record(request("e", 1), HASH_TOKENS)
    assert files(path) == expected | {"trace.jsonl.2": 1}


def test_what_another_user_recorded_keeps_no_engine_from_its_start():
    with tempfile.TemporaryDirectory() as folder:  # it lies where every user gets
        path = Path(folder) / "trace.jsonl"
        os.chmod(folder, 0o777)
        for _ in range(2):
            record(path, request("a", 1))
        with as_another_user(), recording(path) as recorder:
            recorder.record(request("b", 1), HASH_TOKENS)
        os.chmod(folder, 0o755)
        with as_another_user():
            assert f"{path}.3': the file cannot be created: Permission denied" in refusal(path)
        assert files(path) == {path.name: 1, "trace.jsonl.1": 1, "trace.jsonl.2": 1}


def test_starts_without_end_take_no_more_than_one(path, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(30):
        with recording(path, 2000) as recorder:
            recorder.record(request("a", 2), HASH_TOKENS)
    sizes = [file.stat().st_size for file in path.parent.iterdir()]
    assert 1800 < sum(sizes) <= 2000
    assert sizes.count(0) == 1
    assert recorder.take_errors() == 0
    assert "the 1.95 KiB that record_trace_bytes allows, with earlier" in caplog.messages[-1]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(trace_recorder, "BLOCK_TOKENS", 8)
    return pytest.importorskip("tests.support.played_engine", reason="needs vLLM")


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_an_engine_goes_on_and_counts_what_is_missing(path, played):
    engine = played.PlayedEngine(plugin={"record_trace": str(path)})
    path.unlink()
    for number in range(100):
        engine.serve(str(number), [1] * 9, 4)
        if engine.totals["trace_errors"]:
            break
    assert engine.totals["trace_errors"] > 0
    engine.connector.shutdown()


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_an_engine_whose_ranks_hold_fewer_slots_records_to_one_file(path, played):
    """Its scheduler's half is built again."""
    engine = played.PlayedEngine(plugin={"record_trace": str(path)})
    fewer = WorkerCapacity(0, 2, 2, slot_bytes=1)
    engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): fewer})
    assert engine.offload.manager.num_slots == 2
    engine.connector.shutdown()
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_a_later_replica_has_a_file_of_its_own(path):
    tiers = pytest.importorskip("kv_offload.engines.vllm.start.tiers", reason="needs vLLM")
    configurations = pytest.importorskip("tests.support.configurations", reason="needs vLLM")
    vllm_config = configurations.make_vllm_config({"cpu_bytes": "1MiB"})
    vllm_config.parallel_config.data_parallel_index = 2
    config = OffloadConfig(cpu_bytes=1, record_trace=str(path))
    assert tiers.recording_file(config, vllm_config) == Path(f"{path}.replica-2")
    assert tiers.recording_file(OffloadConfig(cpu_bytes=1), vllm_config) is None
