import pytest

from kv_offload.doctor.engine import check_engine, check_plugin


@pytest.mark.parametrize(
    ("environ", "is_installed", "state"),
    [
        ({}, True, "ok"),
        ({"VLLM_PLUGINS": "lora,kv_offload"}, True, "ok"),
        ({"VLLM_PLUGINS": "lora"}, True, "problem"),
        ({"VLLM_PLUGINS": ""}, True, "problem"),
        ({}, False, "problem"),
    ],
)
def test_whether_vllm_loads_the_plugin(
    environ: dict[str, str], is_installed: bool, state: str
) -> None:
    check = check_plugin(environ, is_installed, has_vllm=True)
    assert check.state == state
    assert bool(check.remedy) == (state == "problem")


def test_without_vllm_nobody_looks_for_the_plugin() -> None:
    assert check_plugin({}, is_installed=True, has_vllm=False).state == "not checked"
    wrong = {"VLLM_PLUGINS": "lora"}
    assert check_plugin(wrong, is_installed=True, has_vllm=False).state == "problem"
    assert check_plugin({}, is_installed=False, has_vllm=False).state == "problem"


def test_every_subject_has_a_line() -> None:
    assert [check.name for check in check_engine({})] == ["plugin"]
