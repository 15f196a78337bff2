"""The serving bench: its statistics and tables, and a small run on a real engine without a GPU."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.serving import __main__ as serving
from bench.serving import runs
from bench.serving.process import EngineError
from bench.serving.report import save, tables, unproven
from bench.serving.settings import CONNECTORS, EngineSettings
from bench.serving.shapes import SHAPES, Shape
from bench.serving.stats import percentiles, ratio_interval, spread

ROOT = Path(__file__).parents[2]
SMALL = SHAPES["small"]
ON_GPU = {"median": 0.009, "min": 0.008, "max": 0.01}


# -- statistics --------------------------------------------------------------------------------


def test_the_interval_is_students_of_the_logs() -> None:
    # mean 0 and deviation s of 4 logs: half = 3.182 s / 2
    found = ratio_interval([math.exp(x) for x in (-0.1, 0.1, -0.1, 0.1)])
    half = 3.182 * 0.11547 / 2
    assert found["pairs"] == 4
    assert found["ratio"] == pytest.approx(1.0)
    assert found["low"] == pytest.approx(math.exp(-half), rel=1e-4)
    assert found["high"] == pytest.approx(math.exp(half), rel=1e-4)
    with pytest.raises(ValueError, match="1 pairs have no interval"):
        ratio_interval([1.0])


def test_spread_and_percentiles() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    found = percentiles([float(value) for value in range(101)])
    assert found == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0, "count": 101}


# -- shapes ------------------------------------------------------------------------------------


def test_a_cache_serves_whole_blocks_and_may_leave_the_last_to_be_computed() -> None:
    # 16 tokens x 32 layers x K and V x 8 heads x 128 x 2 bytes = 2 MiB
    shape = SHAPES["gqa8"]
    assert shape.block_bytes(2) == 2 << 20
    found = [shape.loadable_bytes(n, 2) for n in (1, 16, 17, 8192)]
    blocks = [(least >> 21, most >> 21) for least, most in found]
    assert blocks == [(0, 0), (0, 1), (1, 1), (511, 512)]
    assert shape.batch_prompts * shape.batch_tokens // 16 << 21 <= shape.host_bytes


@pytest.mark.parametrize(
    ("name", "token_bytes", "of_two_ranks"),
    [
        ("gqa8", 131_072, 131_072),
        ("mqa", 16_384, 2 * 16_384),  # each rank has one head at least
        # 27 layers x (512 + 64) x 2 bytes, whatever the heads are; both ranks load all of it
        ("mla", 31_104, 2 * 31_104),
    ],
)
def test_ranks_divide_the_heads_and_each_has_all_of_a_latent_vector(
    name: str, token_bytes: int, of_two_ranks: int
) -> None:
    one, two = (SHAPES[name].on_ranks(ranks) for ranks in (1, 2))
    assert (one.token_bytes(2), two.token_bytes(2)) == (token_bytes, of_two_ranks)
    assert two.block_bytes(2) == two.block_tokens * of_two_ranks
    assert (one.sharing_ranks, two.sharing_ranks) == (1, 2 if name == "mla" else 1)
    # More host memory only where it keeps more.
    assert two.host_gib == one.host_gib * (2 if name == "mqa" else 1)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["gqa8", "mqa", "mla"])
def test_a_connector_that_keeps_the_copies_of_all_ranks_has_room_for_the_prompts(
    name: str, ranks: int
) -> None:
    shape = SHAPES[name].on_ranks(ranks)
    assert shape.batch_prompts * shape.batch_tokens * shape.token_bytes(2) <= shape.host_bytes


def test_every_connector_is_asked_for_the_same_host_memory() -> None:
    asked = {}
    for name in list(CONNECTORS)[1:]:
        config = EngineSettings(SMALL, name, options={"eviction_policy": "lru"}).transfer_config
        assert config is not None
        extra = config["kv_connector_extra_config"]
        asked[name] = extra.get("cpu_bytes", extra.get("cpu_bytes_to_use"))
        ours = name in ("kv-offload", "kv-offload-packed")
        assert ("eviction_policy" in extra) == ours
        assert extra.get("pack_kv", False) == (name == "kv-offload-packed")
    assert asked == dict.fromkeys(asked, 256 << 20)
    assert EngineSettings(SMALL, "off").transfer_config is None


def test_what_is_ever_used_again_fits_the_limits_cache() -> None:
    for shape in SHAPES.values():
        load, limit = shape.conversations, EngineSettings(shape, "limit")
        own = load.most_tokens - load.system_tokens
        assert limit.cache_blocks * shape.block_tokens > load.count * own
        assert limit.cache_blocks > EngineSettings(shape, "kv-offload").cache_blocks
        assert load.most_tokens < shape.max_model_len
        loaded_again = load.count * (load.system_tokens + load.history_tokens[0])
        assert loaded_again > shape.gpu_blocks * shape.block_tokens // 2


# -- the report --------------------------------------------------------------------------------


def document(loaded: int) -> dict[str, Any]:
    def times(milliseconds: float) -> dict[str, Any]:
        return {"repeated": spread([milliseconds / 1e3]), "computed": spread([1.0])}

    lengths = [str(length) for length in SHAPES["gqa8"].prompt_tokens]
    loads = [{"least_bytes": 90, "most_bytes": 100, "loaded_bytes": loaded}]
    return {
        "machine": {"gpu": "a GPU", "vllm": "0.26.0", "commit": "abc"},
        "shape": {"name": "gqa8", "host_gib": 50, "prompt_tokens": SHAPES["gqa8"].prompt_tokens},
        "results": {
            "off": {
                "starts": [30.0, 20.0],
                # 64 blocks of 2 MiB at 1 GiB/s, and 5 ms
                "link": {"bytes_per_second": 1 << 30, "decode_step": 0.005},
                "ttft": {length: times(200) | {"in GPU cache": ON_GPU} for length in lengths},
            },
            "kv-offload": {
                "starts": [21.0],
                "ttft": {length: times(143) | {"loads": loads} for length in lengths},
            },
            "vllm": {"starts": [], "error": "vllm, start: no room"},
        },
        "pairs": None,
    }


def test_the_table_has_the_floor_and_what_failed_and_times_without_a_gpu_tell_nothing() -> None:
    measured, warning = document(100), "the times show that the bench works, and nothing else"
    text = tables(measured)
    assert "| 1,024 | 200.0 | 143.0 | 9.0 | 130.0 |" in text
    assert "- failed: vllm, start: no room" in text
    assert "not proven" not in text
    assert "| off | 20.0 (20.0 to 20.0) |" in text
    assert warning not in text
    del measured["machine"]["gpu"]
    assert warning in tables(measured)


def test_ranks_share_the_floor_and_have_a_file_of_their_own(tmp_path: Path) -> None:
    measured = document(100)
    measured["shape"]["tensor_parallel"] = 2
    assert "| 1,024 | 200.0 | 143.0 | 9.0 | 67.5 |" in tables(measured)
    assert save(measured, tmp_path).name == "serving-gqa8-tp2.json"
    alone = {"alone": [50e9, 48e9], "at once": [50e9, 24e9]}
    measured["host"] = {"rates": {"load": {"blocks": alone}}}
    assert "| load, blocks | 50.0 / 48.0 | 50.0 / 24.0 | 1.00 / 0.50 |" in tables(measured)


def test_the_bytes_of_a_token_are_said_and_on_which_rank() -> None:
    measured = document(100)
    assert "131,072 bytes of KV per token\n" in tables(measured)
    measured["shape"]["tensor_parallel"] = 2
    assert "131,072 bytes of KV per token, 65,536 on each of 2 ranks" in tables(measured)
    measured["shape"]["name"] = "mla"
    assert "31,104 bytes of KV per token, the same on all 2 ranks" in tables(measured)


@pytest.mark.parametrize(("name", "carried"), [("gqa8", "32.8"), ("mla", "15.6")])
def test_what_hits_take_is_compared_with_each_link_alone(name: str, carried: str) -> None:
    measured = document(100)
    measured["shape"] |= {"name": name, "tensor_parallel": 2, "batch_prompts": 48}
    measured["shape"]["batch_tokens"] = 8192
    rates = {"tokens_per_second": spread([500_000.0])}
    measured["results"]["kv-offload"]["throughput"] = {"0": rates, "100": rates | {"loads": []}}
    alone = {"alone": [float(carried) * 1e9, float(carried) * 2e9], "at once": [1e9, 1e9]}
    measured["host"] = {"rates": {"load": {"blocks": alone, "one piece": alone}}}
    text = tables(measured)
    assert "|  | GB/s | of blocks, alone | of one piece, alone |" in text
    assert f"| kv-offload | {carried} | 1.00 / 0.50 | 1.00 / 0.50 |" in text


def test_a_gpu_whose_link_could_not_be_measured_is_named() -> None:
    measured = document(100)
    measured["host"] = {"rates": {}, "error": "links: EOFError: "}
    assert "- failed: links: EOFError" in tables(measured)


def test_bytes_that_did_not_come_back_are_named() -> None:
    assert unproven(document(100)) == []
    assert unproven(document(90)) == []
    problems = unproven(document(101))
    assert len(problems) == 4
    assert problems[0] == "NOT PROVEN: kv-offload, ttft 1024: 101 bytes were loaded, not 90 to 100"
    assert len(unproven(document(89))) == 4


ANSWERS = {"serving": "How long until the first token", "conversations": "How long do 48"}
"""What a kept result answers, by the first word of its name."""


@pytest.mark.parametrize(
    "path",
    sorted(p for word in ANSWERS for p in (ROOT / "bench/results").glob(f"*/{word}-*.json")),
    ids=lambda path: path.stem,
)
def test_kept_results_can_be_shown_and_prove_their_loads(path: Path) -> None:
    kept = json.loads(path.read_text())
    assert unproven(kept) == []
    assert ANSWERS[path.stem.partition("-")[0]] in tables(kept)


# -- which engine is asked for what ------------------------------------------------------------


class FakeProcess:
    """Answers at once, until the bench is stopped."""

    answered: list[tuple[str, str, dict[str, Any]]]
    stop_after: int
    alive: set[Any]

    def __init__(self, settings: EngineSettings) -> None:
        self.connector, self.counted = settings.connector, {}
        self.alive.add(self)

    def ask(self, name: str, **more: Any) -> Any:
        if self.connector == "vllm":
            raise EngineError("vllm", f"{name}: no room")
        if len(self.answered) == self.stop_after:
            raise KeyboardInterrupt
        self.answered.append((self.connector, name, more))
        if name == "conversations":
            times = dict.fromkeys(("mean", "p50", "p90", "p99"), 0.1)
            return {"seconds": 1.0, "first_token": times, "between_tokens": times,
                    "loads": [{"least_bytes": 1, "most_bytes": 1, "loaded_bytes": 1}]}  # fmt: skip
        return 20.0

    def close(self) -> None:
        self.alive.discard(self)

    kill = close


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeProcess]:
    FakeProcess.answered, FakeProcess.alive, FakeProcess.stop_after = [], set(), 99
    monkeypatch.setattr(runs, "EngineProcess", FakeProcess)
    monkeypatch.setattr(runs, "machine", dict)
    return FakeProcess


WORDS = ["--connectors", "kv-offload,vllm", "--sections"]


def test_a_run_that_is_stopped_has_written_every_answer_and_says_what_is_missing(
    fake: type[FakeProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = [*WORDS, "conversations", "--out", str(tmp_path)]
    assert serving.main(everything) == 0
    whole = len(fake.answered)
    for answers in range(whole):
        fake.answered, fake.stop_after = [], answers
        assert serving.main(everything) == 1
        written = json.loads((tmp_path / "serving-small.json").read_text())
        held = [len(r.get("conversations", ())) for r in written["results"].values()]
        assert sum(held) == sum(name == "conversations" for _, name, _ in fake.answered)
        missing = [label for label in written["missing"] if not label.startswith("vllm")]
        assert len(missing) == 4 - sum(held)
        assert ("- missing: " + ", ".join(written["missing"])) in capsys.readouterr().out
        assert not fake.alive
    assert missing == ["limit conversations 2"]


def test_what_was_written_before_is_there_when_the_bench_is_killed(
    fake: type[FakeProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "save", None)  # what the end of a run would write
    fake.stop_after = 3
    with pytest.raises(TypeError):
        serving.main([*WORDS, "conversations", "--out", str(tmp_path)])
    written = json.loads((tmp_path / "serving-small.json").read_text())
    assert len(written["results"]["kv-offload"]["conversations"]) == 1
    assert written["missing"][0] == "vllm conversations 1"


def test_an_engine_that_fails_leaves_the_others_their_rounds(fake: type[FakeProcess]) -> None:
    assert serving.main([*WORDS, "conversations"]) == 0
    held = [(connector, more) for connector, name, more in fake.answered if name == "conversations"]
    assert held == [(c, {"seed": turn}) for turn in (0, 1) for c in ("kv-offload", "limit")]


# -- a real engine -----------------------------------------------------------------------------


def on_an_engine(test: Callable[..., None]) -> Callable[..., None]:
    missing = importlib.util.find_spec("vllm") is None
    skip = pytest.mark.skipif(missing, reason="needs vLLM, which is not installed")
    marks = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("default")]
    return functools.reduce(lambda marked, mark: mark(marked), [skip, *marks], test)


@on_an_engine
def test_a_small_run_measures_everything_and_proves_its_loads(tmp_path: Path) -> None:
    sections = "ttft,throughput,latency,pairs"
    words = ["--connectors", "off,kv-offload,vllm", "--sections", sections, "--out", str(tmp_path)]
    command = [sys.executable, "-m", "bench.serving", *words]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "serving-small.json").read_text())
    assert found["shape"]["name"] == "small"
    assert {"platform", "python", "vllm", "commit", "date"} <= found["machine"].keys()
    on_gpu = "gpu" in found["machine"]
    # vLLM's own connector refuses to run without a GPU; the others are measured all the same.
    assert ("error" in found["results"]["vllm"]) != on_gpu
    assert ("- failed: vllm" in run.stdout) != on_gpu
    assert found["pairs"]["pairs"] == SMALL.pairs
    off, ours = found["results"]["off"], found["results"]["kv-offload"]
    assert found["missing"] == [f"vllm {name}" for name in (*sections.split(",")[:3], "memory")]
    for result in (off, ours):
        assert len(result["starts"]) == 2, "one more for the pairs"
        assert set(result["ttft"]) == {str(length) for length in SMALL.prompt_tokens}
        for phase in ("alone", "storing", "loading"):
            watched = result["latency"][phase]
            assert watched["between_tokens"]["count"] >= SMALL.decodes * (watched["steps"] - 1)
    for length in SMALL.prompt_tokens:
        assert_loaded(ours["ttft"][str(length)], length, SMALL.repeats, on_gpu)
    assert ours["throughput"]["100"]["loads"][0]["loaded_bytes"] > 0
    assert ours["throughput"]["50"]["loads"][0]["loaded_bytes"] > 0
    assert ours["latency"]["loading"]["loads"][0]["loaded_bytes"] > 0
    assert ours["latency"]["storing"]["loads"][0]["loaded_bytes"] == 0
    assert ours["latency"]["storing"]["connector_per_step"]["mean"] > 0
    assert ours["memory"]["pool_bytes"] == SMALL.host_bytes
    assert "| 100 % hits | as 0 % hits |" in run.stdout


@on_an_engine
@pytest.mark.parametrize("name", ["small", "small-mla"])
def test_two_ranks_load_what_they_must(tmp_path: Path, name: str) -> None:
    words = ["--shape", name, "--tensor-parallel", "2", "--sections", "ttft"]
    words += ["--connectors", "kv-offload", "--out", str(tmp_path)]
    assert serving.main(words) == 0
    found = json.loads((tmp_path / f"serving-{name}-tp2.json").read_text())
    assert found["host"]["memory_by_node"]
    ours = found["results"]["kv-offload"]
    on_gpu = "gpu" in found["machine"]
    shape = SHAPES[name].on_ranks(2)
    for length in shape.prompt_tokens:
        assert_loaded(ours["ttft"][str(length)], length, shape.repeats, on_gpu, shape)
    # Whole slots: of equal bytes as many as if there were one rank.
    item_bytes = 2 if on_gpu else 4
    slot_bytes = shape.block_bytes(item_bytes) // shape.sharing_ranks
    assert ours["memory"]["pool_bytes"] == shape.host_bytes // slot_bytes * slot_bytes
    # Each block is copied to host memory once, and from there to every rank.
    counted = ours["counted"]["ttft"]
    assert counted["stored_bytes"] == counted["stored_slots"] * slot_bytes


@on_an_engine
def test_engines_start_and_hold_conversations_by_turns_which_come_back_from_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "STARTS", 1)
    words = ["--sections", "start,conversations", "--connectors", "off,kv-offload"]
    words += ["--rounds", "1"]
    assert serving.main([*words, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "serving-small.json").read_text())["results"]
    began = re.findall(r"\] (\S+): starting an engine", capfd.readouterr().err)
    assert began == ["off", "kv-offload", "limit", *["off", "kv-offload"] * 2]
    assert all(seconds > 0.1 for result in found.values() for seconds in result["starts"])
    load = SMALL.conversations
    for result in found.values():
        (held,) = result["conversations"]
        assert held["turns"] == load.count * load.turns
        assert held["between_tokens"]["count"] == held["turns"] * (load.answer_tokens[0] - 1)
        assert 0 < held["first_token"]["p50"] < held["first_token"]["p99"] < held["seconds"]
    (ours,) = found["kv-offload"]["conversations"]
    assert 0 < ours["loads"][0]["least_bytes"] <= ours["loads"][0]["loaded_bytes"]


def assert_loaded(
    measured: dict[str, Any], length: int, repeats: int, on_gpu: bool, shape: Shape = SMALL
) -> None:
    least, most = shape.loadable_bytes(length, 2 if on_gpu else 4)
    assert len(measured["loads"]) == repeats
    for load in measured["loads"]:
        assert (load["least_bytes"], load["most_bytes"]) == (least, most)
        assert least <= load["loaded_bytes"] <= most
