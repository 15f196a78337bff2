from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import importlib, pkgutil, sys

class Refuse:
    names = ("vllm", "torch", "cupy", "kv_swap", *(
        f"kv_offload.{room}" for room in ("scheduler", "worker", "engines", "tools")
    ))

    def find_spec(self, name, path=None, target=None):
        if name.startswith(self.names):
            raise ModuleNotFoundError(f"{name} is refused")

sys.meta_path.insert(0, Refuse())
package = importlib.import_module("kv_offload.cache")
for module in pkgutil.walk_packages(package.__path__, "kv_offload.cache."):
    importlib.import_module(module.name)
    print(module.name)
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )


def test_the_cache_needs_no_engine_no_device_and_no_other_room() -> None:
    done = run(SCRIPT)
    assert done.returncode == 0, done.stderr
    modules = {f"kv_offload.cache.{name}" for name in ("manager", "prefix", "policies.arc")}
    assert modules <= {*done.stdout.split()}


@pytest.mark.parametrize("name", ["vllm", "torch", "kv_offload.scheduler.scheduler"])
def test_a_refused_import_is_noticed(name: str) -> None:
    done = run(f"{SCRIPT}\nimport {name}")
    assert done.returncode != 0
    assert "is refused" in done.stderr
