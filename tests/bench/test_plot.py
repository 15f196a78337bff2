"""The picture of times to first token has what the results say, where they say it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.serving import plot
from bench.serving.plot import MARKED, PAGES, ROOT, draw, lines, main


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
