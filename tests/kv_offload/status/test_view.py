"""The page that is drawn."""

from __future__ import annotations

import re

from rich.console import Console

from kv_offload.status.figures import ERRORS, figures
from kv_offload.status.read import parse
from kv_offload.status.view import page
from tests.kv_offload.status.server import recorded

COUNTER = 'vllm:host_kv_cache_{}_total{{engine="0",model_name="small"}} '


def drawn(text: str, before: str | None = None, *, width: int = 110, note: str = "") -> str:
    earlier = None if before is None else parse(before, "here")
    now = parse(text, "here")
    each = [figures(now, earlier, [engine]) for engine in now.engines]
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(page("http://here/metrics", figures(now, earlier), each, note))
    return console.export_text()


def having(name: str, value: str) -> str:
    """Return a recorded page in which a counter has this value."""
    start = re.escape(COUNTER.format(name))
    text, found = re.subn(
        f"^{start}.*$", COUNTER.format(name) + value, recorded("hits"), flags=re.M
    )
    assert found == 1
    return text


def test_a_recorded_page() -> None:
    text = drawn(recorded("hits"))
    assert "kv-offload at http://here/metrics: small, engine 0" in text
    for what, values in {
        "from host memory: not computed": ["864", "48.0 %"],
        "computed": ["936", "52.0 %"],
        "looked up": ["1,800"],
        "loaded: the hit rate": ["864", "48.0 %"],
        "in use: 864 KiB of 64 MiB on one rank": ["27 slots", "1.3 %"],
    }.items():
        line = next(line for line in text.splitlines() if line.strip().startswith(what))
        assert re.split(r" {2,}", line.strip())[1:] == values, line
    assert re.search(r"a load takes 0\.\d+ ms, 99 %: 0\.\d+ ms", text)
    assert text.count("  nothing") == 2, "nothing is skipped, nothing waits"
    assert "none since the start" in text
    assert "page-locked" not in text
    assert "engine  hit rate" not in text


def test_rates_stand_beside_the_totals() -> None:
    text = drawn(recorded("hits"), recorded("start"))
    assert re.search(r"last \d+\.\d s", text)
    assert re.search(r"from host memory: not computed +864 +48\.0 % +[\d,]+/s", text)
    assert re.search(r"to host memory, at .*/s +864 KiB +[\d.]+ .iB/s", text)


def test_what_was_not_stored_is_named_with_its_reason() -> None:
    text = drawn(having("skipped_pool_busy", "7.0"))
    assert re.search(r"every slot of host memory was being read or written +7", text)


def test_errors_are_named_with_what_they_mean() -> None:
    for name in ERRORS:
        text = drawn(having(name, "3.0"))
        assert re.search(rf"{name}: .* 3", text)
        assert "none since the start" not in text


def test_a_pool_that_is_not_ready_says_so() -> None:
    text = recorded("hits").replace(
        'vllm:host_kv_cache_slots{engine="0",model_name="small"} 2048.0',
        'vllm:host_kv_cache_slots{engine="0",model_name="small"} 512.0',
    )
    assert re.search(r"ready; the rest is being page-locked.* 512 slots +25\.0 %", drawn(text))


def test_what_waits_is_named() -> None:
    text = recorded("hits").replace(
        'vllm:host_kv_cache_waiting_slots{engine="0",model_name="small"} 0.0',
        'vllm:host_kv_cache_waiting_slots{engine="0",model_name="small"} 5.0',
    )
    assert re.search(r"slots of ended requests that wait to be stored +5", drawn(text))


def test_several_engines_stand_below_their_sum() -> None:
    one = recorded("hits")
    text = drawn(one + having("hook_errors", "1.0").replace('engine="0"', 'engine="1"'))
    assert "2 engines together" in text
    assert re.search(r"looked up +3,600", text)
    table = text.partition("engine  hit rate")[2].splitlines()[1:]
    assert [line.split() for line in table if line.strip()] == [
        ["0", "48.0", "%", "864", "27", "2,048", "0"],
        ["1", "48.0", "%", "864", "27", "2,048", "1"],
    ]


def test_a_name_of_an_engine_is_no_markup() -> None:
    one = recorded("hits")
    text = drawn(one + one.replace('engine="0"', 'engine="[/red]"'))
    assert re.search(r"\[/red\] +48.0 %", text)


def test_what_is_wrong_comes_first() -> None:
    lines = drawn(having("hook_errors", "1.0"), note="not reachable").splitlines()
    assert lines[1] == "not reachable"
    assert "hook_errors" in lines[4]


def test_a_page_of_a_healthy_server_fits_the_lowest_terminal() -> None:
    assert len(drawn(recorded("hits"), recorded("start"), width=80).splitlines()) <= 24


def test_a_narrow_terminal_loses_no_figure() -> None:
    text = drawn(recorded("hits"), recorded("start"), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "864 KiB" in text
    assert "1,800" in text
