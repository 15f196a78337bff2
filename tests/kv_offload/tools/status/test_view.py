"""The page that is drawn."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from kv_offload.metrics import PREFIX
from kv_offload.tools.status.figures import ERRORS
from kv_offload.tools.status.read import parse
from kv_offload.tools.status.view import page
from tests.kv_offload.tools.status.server import HITS, START, having, hits_with


def drawn(text: str, before: str | None = None, *, width: int = 110, note: str = "") -> str:
    earlier = None if before is None else parse(before, "here")
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(page("http://here/metrics", parse(text, "here"), earlier, note))
    return console.export_text()


def test_a_recorded_page() -> None:
    text = drawn(HITS)
    assert "kv-offload at http://here/metrics: small, engine 0" in text
    for what, values in {
        "from host memory: not computed": ["864", "48.0 %"],
        "computed": ["936", "52.0 %"],
        "looked up": ["1,800"],
        "loaded: the hit rate": ["864", "48.0 %"],
        "in use: 864 KiB of 64 MiB on one rank": ["27 slots", "1.3 %"],
        "slots stored": ["27"],
    }.items():
        line = next(line for line in text.splitlines() if line.strip().startswith(what))
        assert re.split(r" {2,}", line.strip())[1:] == values, line
    assert re.search(r"a load takes 0\.\d+ ms, 99 %: 0\.\d+ ms", text)
    assert text.count("  nothing") == 2, "nothing is skipped, nothing waits"
    assert "none since the start" in text
    assert "page-locked" not in text
    assert "engine  hit rate" not in text


def test_an_error_is_named_with_what_it_means_and_comes_first_behind_a_note() -> None:
    for name in ERRORS:
        lines = drawn(hits_with(f"{name}_total", 3.0), note="not reachable").splitlines()
        assert lines[1] == "not reachable"
        assert re.search(rf"{name}: .* 3", " ".join(lines[4:6]))
        assert "none since the start" not in "".join(lines)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("skipped_pool_busy_total", 7.0, r"every slot of host memory was being read or written +7"),
        ("slots", 512.0, r"ready; the rest is being page-locked.* 512 slots +25\.0 %"),
        ("stores_paused", 1.0, r"Not stored, in slots\s+nothing is stored: .* +1\s+Waiting now"),
        ("waiting_slots", 5.0, r"slots of ended requests that wait to be stored +5"),
        ("oldest_copy_seconds", 75.25, r"Waiting now\s+age of the oldest load or store +75.2 s"),
    ],
)
def test_what_is_not_as_it_should_be_has_a_line(name: str, value: float, shown: str) -> None:
    assert re.search(shown, drawn(hits_with(name, value)))


def test_other_sizes_have_lines_where_they_are_estimated() -> None:
    assert "another host memory" not in drawn(HITS)
    sample = PREFIX + 'hit_tokens_at_twice_total{engine="0",model_name="small"} 900.0'
    assert re.search(r"twice as large +900 +50\.0 %", drawn(f"{HITS.rstrip()}\n{sample}\n"))


def with_disk(**samples: float) -> str:
    page = HITS
    for name, value in {"tier_slots": 2048, "disk_usable": 1, **samples}.items():
        page = having(page, name, value)
    return page


def test_a_disk_has_lines_of_its_own() -> None:
    assert "Disk" not in drawn(HITS)
    read = {"promoted_bytes_total": 3 << 20, "promoted_seconds_total": 1.5}
    text = drawn(with_disk(tier_slots_in_use=512, **read))
    shown = r"Disk\s+in use: 16 MiB of 64 MiB on one rank +512 slots +25\.0 %"
    assert re.search(shown, text)
    assert re.search(r"read from it, at 2 MiB/s +3 MiB", text)
    assert re.search(r"written to it +0 B", text)
    assert "not what was written" not in text
    assert re.search(r"not what was written +4", drawn(with_disk(tier_mismatches_total=4)))
    assert "set aside" not in text
    aside = drawn(with_disk(tier_slots_set_aside=3))
    assert re.search(r"set aside, which could not be written or read +3 slots", aside)


def test_a_disk_that_is_left_alone_is_named_also_beside_one_that_is_used() -> None:
    alone = "not read, after an error or while a copy hangs"
    assert alone not in drawn(with_disk())
    assert alone in drawn(with_disk(disk_usable=0))
    other = with_disk(disk_usable=0).replace('engine="0"', 'engine="1"')
    assert "not read by 1 of the engines, after" in drawn(with_disk() + other)
    assert "not read" not in drawn(with_disk() + HITS.replace('engine="0"', 'engine="1"'))


def test_several_engines_stand_below_their_sum() -> None:
    other = hits_with("hook_errors_total", 1.0).replace('engine="0"', 'engine="[/red]"')
    text = drawn(HITS + other)
    assert "2 engines together" in text
    assert re.search(r"looked up +3,600", text)
    table = text.partition("engine  hit rate")[2].splitlines()[1:]
    assert sorted(line.split() for line in table if line.strip()) == [
        ["0", "48.0", "%", "864", "27", "2,048", "0"],
        ["[/red]", "48.0", "%", "864", "27", "2,048", "1"],
    ], "a name is no markup"


def test_a_page_of_a_healthy_server_fits_the_lowest_terminal_and_loses_no_figure() -> None:
    text = drawn(HITS, START, width=80)
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"last \d+\.\d s", text)
    assert re.search(r"from host memory: not computed +864 +48\.0 % +[\d,]+/s", text)
    assert re.search(r"to host memory, at .*/s +864 KiB +[\d.]+ .iB/s", text)
