"""The picture of times to first token has what the results say, where they say it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.serving import plot
from bench.serving.plot import MARKED, PAGES, PICTURE, ROOT, draw, lines, main
from tests.bench.test_serving import document

SVG = "{http://www.w3.org/2000/svg}"


def result(*, seconds: float = 0.2, gpu: str = "a GPU") -> dict[str, Any]:
    """Two columns, two lengths: `kv-offload` takes a tenth of `off`, with a range of factor 2."""

    def of(took: float, key: str) -> dict[str, Any]:
        return {"ttft": {str(n): {key: [took * n / 1024]} for n in (1024, 8192)}}

    return {
        "machine": {"gpu": gpu, "vllm": "0.33.0"},
        "shape": {"name": "gqa8"},
        "results": {
            "off": [of(seconds, "computed")],
            "kv-offload": [of(seconds / 10, "repeated"), of(seconds / 5, "repeated")],
            "kv-offload-lru": [of(9, "repeated")],
        },
    }


def write(root: Path, name: str, content: dict[str, Any]) -> None:
    path = root / f"bench/results/{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def pages(root: Path) -> None:
    for name in PAGES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("before\n<!-- plot: ttft -->\n<!-- end plot -->\nafter\n")


def test_a_line_has_the_median_and_the_range_of_its_column_in_milliseconds():
    off, ours = lines(result())
    assert (off.column, ours.column) == ("off", "kv-offload"), "variants are not drawn"
    assert off.points[1024]["median"] == pytest.approx(200)
    assert ours.points[8192] == pytest.approx({"median": 240, "min": 160, "max": 320})


def test_a_result_of_the_bench_itself_is_drawn():
    """Rounds that failed have no times; they are left out and the rest is drawn."""
    measured = document()
    assert [line.column for line in lines(measured)] == ["off", "vllm", "kv-offload"]
    measured["results"]["vllm"] = [{"round": 1, "error": "no room"}]
    assert [line.column for line in lines(measured)] == ["off", "kv-offload"]


def test_faster_is_lower_longer_is_further_right_and_everything_is_inside():
    root = ElementTree.fromstring(draw([result()]))
    off, ours = (
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in root.iter(f"{SVG}polyline")
    )
    assert len(off) == len(ours) == 2
    assert all(ours_y > off_y for (_, off_y), (_, ours_y) in zip(off, ours, strict=True))
    assert off[0][0] < off[1][0]
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for x, y in [*off, *ours]:
        assert 0 <= x <= width
        assert 0 <= y <= height
    text = " ".join(root.itertext())
    assert "gqa8, a GPU, vLLM 0.33.0" in text
    assert "kv-offload" in text


def test_each_result_has_a_panel():
    text = draw([result(gpu="H100"), {**result(), "results": {}}, result(gpu="H200")])
    assert text.count("<polyline") == 4
    assert text.index("H100") < text.index("H200")


def test_the_picture_and_its_sources_are_put_into_the_pages(tmp_path):
    pages(tmp_path)
    write(tmp_path, "h100/serving-gqa8", result())
    write(tmp_path, "h100/decodes-gqa8", result())
    assert main(tmp_path) == 0
    readme, serving = ((tmp_path / name).read_text() for name in PAGES)
    assert "](docs/images/ttft.svg)" in readme
    assert "](../images/ttft.svg)" in serving
    assert "[h100/serving-gqa8.json](../../bench/results/h100/serving-gqa8.json)" in serving
    assert "decodes-gqa8" not in serving
    for page, text in zip(PAGES, (readme, serving), strict=True):
        for link in re.findall(r"\]\(([^)]+)\)", text):
            assert ((tmp_path / page).parent / link).is_file()
    assert main(tmp_path) == 0
    assert (tmp_path / "README.md").read_text() == readme, "drawing again changes nothing"


def test_without_results_nothing_changes(tmp_path, capsys):
    pages(tmp_path)
    write(tmp_path, "h100/serving-gqa8", {**result(), "results": {}})
    before = (tmp_path / "README.md").read_text()
    assert main(tmp_path) == 1
    assert "no bench/results/*/serving-*.json" in capsys.readouterr().err
    assert not (tmp_path / PICTURE).exists()
    assert (tmp_path / "README.md").read_text() == before


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_have_a_place_for_the_picture(page):
    assert len(MARKED.findall((ROOT / page).read_text())) == 1


def test_the_kept_picture_is_that_of_the_kept_results():
    """`python -m bench.serving.plot` draws it again."""
    kept = [json.loads(p.read_text()) for p in sorted(ROOT.glob("bench/results/*/serving-*.json"))]
    if not any(lines(one) for one in kept):
        assert not (ROOT / plot.PICTURE).exists()
        return
    assert (ROOT / plot.PICTURE).read_text() == draw(kept)
