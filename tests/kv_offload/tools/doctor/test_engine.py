from typing import Any

import pytest

from kv_offload.tools.doctor import engine


@pytest.mark.parametrize(
    ("environ", "is_installed", "has_vllm", "state"),
    [
        ({}, True, True, "ok"),
        ({"VLLM_PLUGINS": "lora,kv_offload"}, True, True, "ok"),
        ({"VLLM_PLUGINS": "lora"}, True, True, "problem"),
        ({"VLLM_PLUGINS": ""}, True, True, "problem"),
        ({}, False, True, "problem"),
        ({}, True, False, "not checked"),
        ({"VLLM_PLUGINS": "lora"}, True, False, "problem"),
        ({}, False, False, "problem"),
    ],
)
def test_whether_vllm_loads_the_plugin(
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    is_installed: bool,
    has_vllm: bool,
    state: str,
) -> None:
    def entry_points(**chosen: str) -> list[Any]:
        assert chosen == {"group": "vllm.general_plugins", "name": "kv_offload"}
        return [object()] * is_installed

    monkeypatch.setattr(engine, "entry_points", entry_points)
    monkeypatch.setattr(engine, "installed", lambda *names: dict.fromkeys(names[:has_vllm], "0.32"))
    check = engine.check_plugin(environ)
    assert (check.name, check.state) == ("plugin", state)
    assert bool(check.remedy) == (state == "problem")
