import pytest

from kv_offload.doctor.engine import check_engine, check_hash, check_plugin


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
    check = check_plugin(environ, is_installed)
    assert check.state == state
    assert bool(check.remedy) == (state == "problem")


@pytest.mark.parametrize("seed", [None, "random", "0"])
def test_no_hash_is_a_problem(seed: str | None) -> None:
    assert check_hash({} if seed is None else {"PYTHONHASHSEED": seed}).state == "ok"


def test_every_subject_has_a_line() -> None:
    names = [check.name for check in check_engine({})]
    assert names == ["plugin", "prefix caching", "reproducible hash"]
