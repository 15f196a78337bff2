"""The page that is drawn."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from rich.console import Console

from kv_offload.metrics import PREFIX
from kv_offload.tools.status.figures import ERRORS
from kv_offload.tools.status.read import Reading, parse
from kv_offload.tools.status.view import page
from tests.kv_offload.tools.status.server import HITS, START, having, hits_with


def drawn(text: str, earlier: Reading | None = None, *, width: int = 110, note: str = "") -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(page("http://here/metrics", parse(text, "here"), earlier, note, width=width))
    return console.export_text()


def test_a_recorded_page():
    text = drawn(HITS)
    assert "kv-offload at http://here/metrics: small, engine 0" in text
    for what, values in {
        "from host memory: not computed": ["864", "48.0 %"],
        "computed": ["936", "52.0 %"],
        "Tokens looked up in host memory": ["1,800"],
        "loaded: the hit rate": ["864", "48.0 %"],
        "Host memory, 64 MiB a rank": ["864 KiB", "1.3 %"],
        "slots stored": ["27"],
    }.items():
        line = next(line for line in text.splitlines() if line.strip().startswith(what))
        assert re.split(r" {2,}", line.strip())[1:3] == values, line
    assert re.search(r"time of a load: median, 99 % +0\.\d+ ms +0\.\d+ ms", text)
    assert "Not stored, in slots: nothing\nWaiting now: nothing" in text
    assert "none since the start" in text
    assert "page-locked" not in text
    assert "engine  hit rate" not in text


def test_errors_are_named_and_come_first_after_a_note():
    for name in ERRORS:
        lines = drawn(hits_with(f"{name}_total", 3.0), note="not reachable").splitlines()
        assert lines[1:3] == ["not reachable", f"Errors: {name} 3"]
        assert "none since the start" not in "".join(lines)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("skipped_pool_busy_total", 7.0, r"Not stored, in slots: pool_busy 7\n"),
        ("slots", 512.0, r"ready; more is page-locked +25\.0 %"),
        ("stores_paused", 1.0, r"engine 0\nNothing is stored: engines that paused stores: 1\n"),
        ("waiting_slots", 5.0, r"Waiting now: 5 slots to store\n"),
        ("oldest_copy_seconds", 75.25, r"Waiting now: oldest copy 75.2 s"),
    ],
)
def test_what_is_not_as_it_should_be_has_a_line(name, value, shown):
    assert re.search(shown, drawn(hits_with(name, value)))


def test_other_sizes_have_a_line_where_they_are_estimated():
    assert "4 x the size" not in drawn(HITS)
    sample = PREFIX + 'hit_tokens_at_twice_total{engine="0",model_name="small"} 900.0'
    text = drawn(f"{HITS.rstrip()}\n{sample}\n")
    assert re.search(r"at half, 2 x, 4 x the size +0\.0 % +50\.0 % +0\.0 %", text)


def with_disk(**samples: float) -> str:
    page = HITS
    for name, value in {"tier_slots": 2048, "disk_usable": 1, **samples}.items():
        page = having(page, name, value)
    return page


def test_a_disk_has_lines_of_its_own():
    assert "Disk" not in drawn(HITS)
    read = {"promoted_bytes_total": 3 << 20, "promoted_seconds_total": 1.5}
    text = drawn(with_disk(tier_slots_in_use=512, **read))
    assert re.search(r"Disk, 64 MiB a rank +16 MiB +25\.0 %", text)
    assert re.search(r"Disk: read, 2 MiB/s +3 MiB", text)
    assert re.search(r"Disk: written +0 B", text)
    assert "not what was written" not in text
    assert "were not what was written: 4\n" in drawn(with_disk(tier_mismatches_total=4))
    assert "could not be written" not in text
    assert "could not be written or read: 3\n" in drawn(with_disk(tier_slots_set_aside=3))


def test_a_disk_that_is_left_alone_is_named_also_where_another_is_used():
    alone = "not read, after an error or while a copy hangs"
    assert alone not in drawn(with_disk())
    assert alone in drawn(with_disk(disk_usable=0))
    other = with_disk(disk_usable=0).replace('engine="0"', 'engine="1"')
    assert "not read by 1 of the engines, after" in drawn(with_disk() + other)
    assert "not read" not in drawn(with_disk() + HITS.replace('engine="0"', 'engine="1"'))


def test_several_engines_stand_below_their_sum():
    other = hits_with("hook_errors_total", 1.0).replace('engine="0"', 'engine="[/red]"')
    text = drawn(HITS + other)
    assert "2 engines together" in text
    assert re.search(r"looked up in host memory +3,600", text)
    table = text.partition("engine  hit rate")[2].splitlines()[1:]
    assert sorted(line.split() for line in table if line.strip()) == [
        ["0", "48.0", "%", "864", "27", "2,048", "0"],
        ["[/red]", "48.0", "%", "864", "27", "2,048", "1"],
    ], "a name is no markup"


def test_a_narrow_terminal_loses_rates_and_bars_and_cuts_no_figure():
    page = with_disk(tier_slots_in_use=512, promoted_bytes_total=3 << 20)
    for name, value in {"hit_tokens_at_four_times_total": 900, "stored_bytes_total": 9e12}.items():
        page = having(page, name, value)
    other = having(HITS, "hit_tokens_total", 123_456_789).replace('engine="0"', 'engine="1"')
    text = drawn(page + other, replace(parse(START, "here"), taken=time.monotonic() - 5), width=40)
    assert max(map(len, text.splitlines())) <= 40
    assert "…" not in text
    assert "slots in use" not in text
    for figure in ("8.19 TiB", "25.0 %", "3 MiB", "123,457,653", "123,456,789"):
        assert figure in text, "whole, and on one line"


def test_a_page_with_every_line_fits_the_lowest_terminal_and_loses_no_figure():
    page = with_disk(promoted_bytes_total=3 << 20, promoted_seconds_total=1.5)
    for name, value in {
        "hit_tokens_at_twice_total": 900,
        "slots": 2000,
        "skipped_pool_busy_total": 7,
        "oldest_copy_seconds": 75.25,
        "stored_bytes_total": 1023 << 30,
        "lookup_tokens_total": 123_456_789_012,
    }.items():
        page = having(page, name, value)
    earlier = replace(parse(START, "here"), taken=time.monotonic() - 5)
    text = drawn(page, earlier, width=80)
    assert len(text.splitlines()) == 23
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert re.search(r"last \d+\.\d s", text)
    assert re.search(r"from host memory: not computed +864 +48\.0 % +[\d,]+/s", text)
    assert re.search(r"Copies to host memory, .*/s +1023 GiB +[\d.]+ .iB/s", text)
    assert "…" not in drawn(page, earlier, width=60), "in half a screen names wrap"
