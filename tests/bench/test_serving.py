"""The serving bench: its statistics and tables, and a small run on a real engine without a GPU."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.serving import __main__ as serving
from bench.serving import report, runs
from bench.serving.process import EngineError
from bench.serving.report import MARKED, PAGES, filled, table, tables, unproven
from bench.serving.settings import COLUMNS, WITHOUT_CONNECTOR, EngineSettings
from bench.serving.shapes import SHAPES
from bench.serving.stats import percentiles, spread

ROOT = Path(__file__).parents[2]
SMALL = SHAPES["small"]


# -- statistics and shapes ---------------------------------------------------------------------


def test_spread_and_percentiles():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    found = percentiles([float(value) for value in range(101)])
    assert found.pop("mean") == 50.0
    assert found == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0, "count": 101}


def test_a_cache_serves_whole_blocks_and_may_leave_the_last_to_be_computed():
    # 16 tokens x 32 layers x K and V x 8 heads x 128 x 2 bytes = 2 MiB
    shape = SHAPES["gqa8"]
    assert shape.token_bytes(2) == 131_072
    assert shape.block_bytes(2) == 2 << 20
    found = [shape.loadable_bytes(n, 2) for n in (1, 16, 17, 8192)]
    blocks = [(least >> 21, most >> 21) for least, most in found]
    assert blocks == [(0, 0), (0, 1), (1, 1), (511, 512)]


@pytest.mark.parametrize("name", ["gqa8", "mqa"])
def test_the_batch_just_fits_into_host_memory_once_the_old_prompts_have_left(name):
    shape = SHAPES[name]
    prompt_bytes = shape.batch_tokens * shape.token_bytes(2)
    assert shape.batch_prompts * prompt_bytes <= shape.host_bytes
    assert (shape.batch_prompts + shape.old_prompts) * prompt_bytes > shape.host_bytes


def test_every_connector_gets_the_same_host_memory_and_the_default_nothing_else():
    extra = {}
    for column in COLUMNS:
        if column in WITHOUT_CONNECTOR:
            assert EngineSettings(SMALL, column).transfer_config is None
            continue
        config = EngineSettings(SMALL, column).transfer_config
        assert config is not None
        extra[column] = config["kv_connector_extra_config"]
    memory = 256 << 20
    assert extra == {
        "vllm": {"cpu_bytes_to_use": memory},
        "kv-offload": {"cpu_bytes": memory},
        "kv-offload-lru": {"cpu_bytes": memory, "eviction_policy": "lru"},
        "kv-offload-packed": {"cpu_bytes": memory, "pack_kv": True},
    }


# -- the report --------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["nofile"], []])
def test_a_result_that_is_not_there_is_named_without_a_traceback(words):
    with pytest.raises(SystemExit, match="give the file of a result"):
        report.main(words)


def document(loaded: int = 100) -> dict[str, Any]:
    """Return a result of two rounds; of `off` of one."""
    shape = SHAPES["gqa8"]
    load = {"least_bytes": 90, "most_bytes": 100, "loaded_bytes": loaded}
    tokens = shape.batch_prompts * shape.batch_tokens

    def measured(turn: int, milliseconds: float, rate: float, offloads: bool) -> dict[str, Any]:
        loads = [load] if offloads else []
        name = "repeated" if offloads else "in GPU cache"
        times = {"computed": [0.2], name: [milliseconds / 1e3], "loads": loads}
        throughput: dict[str, Any] = {"0": [{"seconds": 10.0}]}
        if offloads:
            sent = {"seconds": tokens / rate, "cached_tokens": tokens // 2, "loads": load}
            throughput["100"] = [sent]
        return {
            "round": turn + 1,
            "start_seconds": 20.0,
            "throughput": throughput,
            "ttft": {str(length): times for length in shape.prompt_tokens},
            # 64 blocks of 2 MiB at 1 GiB/s, and 5 ms
            "link": {"load": float(1 << 30), "store": float(1 << 30), "decode_step": 0.005},
        }

    return {
        "machine": {"gpu": "a GPU", "vllm": "0.33.0", "commit": "abc"},
        "shape": {
            "name": "gqa8",
            "prompt_tokens": shape.prompt_tokens,
            "batch_prompts": shape.batch_prompts,
            "batch_tokens": shape.batch_tokens,
        },
        "results": {
            "off": [measured(0, 9, 0, offloads=False)],
            "vllm": [measured(turn, 150 - turn, 7000, offloads=True) for turn in (0, 1)],
            "kv-offload": [measured(turn, 143 + turn, 8000, offloads=True) for turn in (0, 1)],
            "kv-offload-lru": [{"round": 1, "error": "kv-offload-lru, start: no room"}],
        },
        "missing": [],
    }


def test_the_tables_have_the_range_the_floor_the_least_lead_and_what_failed():
    measured, warning = document(), "the times show that the bench works, and nothing else"
    text = tables(measured)
    cells = "| 200.0 | 149.5 (149.0 to 150.0) | 143.5 (143.0 to 144.0) | 9.0 | 130.0 | 1.03 |"
    assert f"| 1,024 {cells}" in text
    assert "| 100 % hits | as 0 % hits | 7.0 | 8.0 | 1.14 |" in text
    assert "| tokens not computed then, % | - | 50.0 | 50.0 |  |" in text
    # 8,000 tokens of 131,072 bytes a second of 1 GiB
    assert "| 100 % hits, share of a contiguous copy | - | 0.85 | 0.98 |  |" in text
    assert "- failed: kv-offload-lru, start: no room" in text
    assert "131,072 bytes of KV per token\n" in text
    assert warning not in text
    del measured["machine"]["gpu"]
    assert warning in tables(measured)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_those_of_the_results(page):
    """`python -m bench.serving.report --pages` writes them."""
    assert filled(page) == page.read_text()


def test_a_table_that_differs_from_its_result_is_found(tmp_path, monkeypatch):
    """The control."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    page = tmp_path / "page.md"
    text = "before\n<!-- table: summary_ttft of kept -->\n| 1 |\n<!-- end -->\nafter\n"
    page.write_text(text)
    assert filled(page) == text, "there is no result yet"
    (tmp_path / "h100").mkdir()
    (tmp_path / "h100/kept.json").write_text(json.dumps(document()))
    written = filled(page)
    shown = table(document(), "summary_ttft")
    assert written.startswith(
        f"before\n<!-- table: summary_ttft of kept -->\n\n{shown}\n\ngpu a GPU, vllm 0.33.0"
    )
    assert "a contiguous load moves 1.1 GB/s" in written
    assert written.endswith(": [h100/kept.json](h100/kept.json)\n\n<!-- end -->\nafter\n")
    page.write_text(written)
    assert filled(page) == written


def test_bytes_that_did_not_come_back_are_named():
    assert unproven(document(100)) == []
    assert unproven(document(90)) == []
    problems = unproven(document(101))
    assert len(problems) == 2 * 5, "of four lengths and a batch in two rounds; a peer's are not"
    assert problems[0] == (
        "NOT PROVEN: kv-offload, round 1, throughput 100 pass 1: 101 bytes were loaded, not 90 to "
        "100"
    )
    assert len(unproven(document(89))) == 10


@pytest.mark.parametrize(
    "path",
    sorted(p for p in report.RESULTS.glob("*/*.json") if "rounds" in json.loads(p.read_text())),
    ids=lambda path: path.stem,
)
def test_kept_results_prove_their_loads_and_are_shown(path):
    assert unproven(json.loads(path.read_text())) == []
    shown = {match[3] for page in PAGES for match in MARKED.finditer(page.read_text())}
    assert path.stem in shown


# -- which engine is asked for what ------------------------------------------------------------


class FakeProcess:
    """Answers at once, until the bench is stopped."""

    answered: list[tuple[str, str]]
    stop_after: int
    alive: set[Any]

    def __init__(self, settings: EngineSettings) -> None:
        self.column, self.counted = settings.column, {}
        self.alive.add(self)

    def ask(self, name: str) -> Any:
        if self.column == "vllm":
            raise EngineError("vllm", f"{name}: no room")
        if len(self.answered) == self.stop_after:
            raise KeyboardInterrupt
        self.answered.append((self.column, name))
        if name == "ttft":
            times = {"computed": [0.1], "repeated": [0.1], "in GPU cache": [0.1], "loads": []}
            return {str(length): times for length in SMALL.prompt_tokens}
        if name == "link":
            return {"load": None, "store": None, "decode_step": 0.1}
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


WORDS = ["--columns", "off,vllm,kv-offload", "--once", "off", "--rounds", "2", "--sections", "ttft"]


def test_engines_are_started_by_turns_and_one_that_fails_leaves_the_others_theirs(fake):
    assert serving.main(WORDS) == 0
    assert [column for column, name in fake.answered if name == "start"] == [
        *("off", "kv-offload", "kv-offload")
    ]
    asked = [name for column, name in fake.answered if column == "off"]
    assert asked == ["start", "pool", "ttft", "link"]
    assert not fake.alive


def test_every_other_round_goes_the_opposite_way():
    words = ["--columns", "vllm,kv-offload", "--rounds", "3", "--sections", "decodes,ttft"]
    visits = runs.plan(serving.parse(words), "")
    columns = [visit.settings.column for visit in visits]
    assert columns == ["vllm", "kv-offload", "kv-offload", "vllm", "vllm", "kv-offload"]
    assert {visit.asked for visit in visits} == {("pool", "ttft", "decodes", "link")}


def test_a_run_that_is_stopped_has_written_every_answer_and_says_what_is_missing(
    fake, tmp_path, capsys
):
    path = tmp_path / "serving-small.json"
    everything = [*WORDS, "--out", str(path)]
    assert serving.main(everything) == 0
    whole = len(fake.answered)
    assert whole == 3 * 4
    for answers in range(whole):
        fake.answered, fake.stop_after = [], answers
        assert serving.main(everything) == 1
        written = json.loads(path.read_text())
        held = [one for of in written["results"].values() for one in of if "ttft" in one]
        assert len(held) == sum(name == "ttft" for _, name in fake.answered)
        missing = [label for label in written["missing"] if not label.startswith("vllm")]
        assert len(missing) == 9 - sum(name != "start" for _, name in fake.answered)
        assert ("- missing: " + ", ".join(written["missing"])) in capsys.readouterr().out
        assert not fake.alive
    # The second round goes the opposite way, so a peer is the last that is asked.
    assert missing == ["kv-offload link 2"]


def test_what_was_written_before_is_there_when_the_bench_is_killed(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "save", None)  # what the end of a run would write
    fake.stop_after = 3
    path = tmp_path / "serving-small.json"
    with pytest.raises(TypeError):
        serving.main([*WORDS, "--out", str(path)])
    written = json.loads(path.read_text())
    assert "ttft" in written["results"]["off"][0]
    assert written["missing"][0] == "off link 1"


# -- a real engine -----------------------------------------------------------------------------


def on_an_engine(test: Callable[..., None]) -> Callable[..., None]:
    missing = importlib.util.find_spec("vllm") is None
    skip = pytest.mark.skipif(missing, reason="needs vLLM, which is not installed")
    marks = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("default")]
    return functools.reduce(lambda marked, mark: mark(marked), [skip, *marks], test)


@on_an_engine
def test_a_small_run_measures_everything_and_proves_its_loads(tmp_path):
    path = tmp_path / "serving.json"
    words = ["--columns", "off,vllm,kv-offload", "--rounds", "2", "--once", "off,vllm"]
    command = [sys.executable, "-m", "bench.serving", *words, "--out", str(path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    began = re.findall(r"\] (\S+): starting an engine, round (\d)", run.stderr)
    assert began == [("off", "1"), ("vllm", "1"), ("kv-offload", "1"), ("kv-offload", "2")]
    found = json.loads(path.read_text())
    assert {"platform", "python", "vllm", "commit", "date"} <= found["machine"].keys()
    on_gpu = "gpu" in found["machine"]
    # vLLM's own connector refuses to run without a GPU; the others are measured all the same.
    (peer,), (off,) = found["results"]["vllm"], found["results"]["off"]
    assert ("error" in peer) != on_gpu
    assert ("- failed: vllm" in run.stdout) != on_gpu
    assert any(label.startswith("vllm") for label in found["missing"]) != on_gpu
    ours = found["results"]["kv-offload"]
    for result in (off, *ours):
        assert result["start_seconds"] > 0.1
        assert set(result["ttft"]) == {str(length) for length in SMALL.prompt_tokens}
        for phase in ("alone", "storing", "loading"):
            watched = result["decodes"][phase]
            assert watched["between_tokens"]["count"] >= SMALL.decodes * (watched["steps"] - 1)
    item_bytes = 2 if on_gpu else 4
    for result in ours:
        for length in SMALL.prompt_tokens:
            least, most = SMALL.loadable_bytes(length, item_bytes)
            loads = result["ttft"][str(length)]["loads"]
            assert len(loads) == SMALL.repeats
            for load in loads:
                assert (load["least_bytes"], load["most_bytes"]) == (least, most)
                assert least <= load["loaded_bytes"] <= most
        tokens = SMALL.batch_prompts * SMALL.batch_tokens
        for hits in ("100", "50"):
            for sent in result["throughput"][hits]:
                assert sent["loads"]["loaded_bytes"] > 0
                assert 0.4 * int(hits) / 100 * tokens < sent["cached_tokens"] < tokens
        assert result["decodes"]["loading"]["loads"][0]["loaded_bytes"] > 0
        assert result["decodes"]["storing"]["loads"][0]["loaded_bytes"] == 0
        assert result["decodes"]["storing"]["connector_per_step"]["mean"] > 0
    assert "| 100 % hits | as 0 % hits |" in run.stdout
