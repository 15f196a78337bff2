"""What an installation brings, and which module may import which."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLUGIN_GROUP = "vllm.general_plugins"

# -- imports -----------------------------------------------------------------------------------

LEAVES = {"config", "errors", "metadata", "sizes"}
"""What every module of `kv_offload` that is none of them may import."""

ALLOWED = {
    # leaves
    "": set(),
    "errors": set(),
    "sizes": {"errors"},
    "host_memory": {"errors"},
    "config": {"errors", "host_memory", "sizes"},
    "metadata": set(),
    "prefix": LEAVES,
    # the engine's side
    "engine_compat": LEAVES,
    "engine_hooks": LEAVES | {"engine_compat"},
    "hook_errors": {"engine_compat"},
    "replicas": {"engine_compat"},
    "capacity": LEAVES | {"engine_compat", "host_memory", "transfer"},
    "weight_hooks": LEAVES | {"engine_compat"},
    "metrics": LEAVES | {"store_planner"},
    "support": LEAVES | {"engine_compat", "prefix"},
    # plugin -> connector -> {scheduler, worker}; the connector is named there, not imported
    "plugin": {"engine_compat"},
    "cli": LEAVES | {"calibrate", "plugin"},
    "calibrate": {"transfer"},
    "connector": LEAVES
    | {"capacity", "engine_compat", "engine_hooks", "hook_errors", "metrics", "plugin"}
    | {"replicas", "scheduler", "sharing", "support", "weight_hooks", "worker"},
    # scheduler -> cache_manager -> policies
    "scheduler": LEAVES
    | {"cache_manager", "engine_compat", "load_choice", "load_mode", "load_planner", "metrics"}
    | {"policies", "prefix", "step_watch", "store_budget", "store_leftovers", "store_planner"},
    # what was measured, and what follows from it
    "rates": set(),
    "step_clock": set(),
    "guard": {"engine_compat", "step_clock"},
    "step_watch": {"guard", "rates", "step_clock"},
    "load_mode": {"rates"},
    "load_choice": {"rates", "step_watch"},
    "load_planner": LEAVES | {"cache_manager", "policies", "prefix", "rates"},
    "store_planner": LEAVES
    | {"cache_manager", "policies", "prefix", "store_budget", "store_jobs", "store_leftovers"},
    "store_jobs": LEAVES | {"cache_manager", "policies"},
    "store_budget": set(),
    "store_leftovers": set(),
    "cache_manager": LEAVES | {"policies"},
    "policies": LEAVES,
    # worker -> transfer
    "worker": LEAVES
    | {"capacity", "engine_compat", "kv_layout", "layer_waves", "metrics", "rates", "sharing"}
    | {"transfer"},
    "sharing": LEAVES | {"engine_compat", "transfer"},
    "layer_waves": set(),
    "kv_layout": LEAVES | {"engine_compat", "transfer"},
}
"""Who may import whom in `kv_offload`, `TYPE_CHECKING` imports aside.

`""` is the package itself, which all may import; a package inside it counts as one module.
"""

MAY_IMPORT_VLLM = {
    "connector",
    "engine_compat",
    "engine_hooks",
    "metadata",
    "metrics",
    "plugin",
    "weight_hooks",
}


def runtime_imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the full names that a module imports, inside functions too, not under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from runtime_imports(other, package)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join(
                [*(above if node.level else ()), *([node.module] if node.module else ())]
            )
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        else:
            yield from runtime_imports(node, package)


def modules(package: str) -> Iterator[tuple[str, set[str]]]:
    """Yield every file of a package as (`name` below the package, names that it imports)."""
    for file in sorted((ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[1:]).removesuffix("__init__").removesuffix(".")
        tree = ast.parse(file.read_text())
        yield name, set(runtime_imports(tree, ".".join(parts[:-1])))


def own_edges(name: str, imports: set[str]) -> set[str]:
    """Return the top-level modules of `kv_offload`, and `transfer`, that a module imports."""
    edges = set()
    for target in imports:
        top, _, rest = target.partition(".")
        if top == "transfer":
            edges.add("transfer")
        elif top == "kv_offload":
            first = rest.partition(".")[0]
            if (ROOT / "kv_offload" / f"{first}.py").exists() or first in ALLOWED:
                edges.add(first)
            else:  # a name of the package itself, such as __version__
                edges.add("")
    return edges - {name.partition(".")[0]}


def forbidden(name: str, imports: set[str]) -> list[str]:
    """Return what is wrong with the imports of one module of `kv_offload`."""
    house = name.partition(".")[0]
    if house not in ALLOWED:
        return [f"kv_offload.{name} is new: say in ALLOWED what it may import"]
    # `from kv_offload.x import y` names the package too; that is no edge of its own.
    edges = own_edges(name, imports) - {""} - ALLOWED[house]
    wrong = [f"kv_offload.{name} imports {edge}" for edge in sorted(edges)]
    if house not in MAY_IMPORT_VLLM and any(i.partition(".")[0] == "vllm" for i in imports):
        wrong.append(f"kv_offload.{name} imports vllm")
    return wrong


def test_kv_offload_imports_only_in_the_allowed_directions() -> None:
    assert [
        line for name, imports in modules("kv_offload") for line in forbidden(name, imports)
    ] == []


def test_transfer_knows_neither_kv_offload_nor_vllm() -> None:
    wrong = [
        f"transfer.{name} imports {target}"
        for name, imports in modules("transfer")
        for target in sorted(imports)
        if target.partition(".")[0] in {"kv_offload", "vllm"}
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("worker", "from kv_offload.scheduler import X", "kv_offload.worker imports scheduler"),
        ("worker", "from kv_offload import scheduler", "kv_offload.worker imports scheduler"),
        ("worker", "from . import scheduler", "kv_offload.worker imports scheduler"),
        ("cache_manager", "import vllm.config", "kv_offload.cache_manager imports vllm"),
        ("cache_manager", "def f():\n  import vllm", "kv_offload.cache_manager imports vllm"),
        ("scheduler", "import transfer.engine", "kv_offload.scheduler imports transfer"),
        ("policies.lru", "from ..config import X", None),
        ("policies.lru", "from ..scheduler import X", "kv_offload.policies.lru imports scheduler"),
        ("scheduler", "if TYPE_CHECKING:\n  import vllm", None),
        ("cli", "from kv_offload import __version__", None),
        ("brand_new", "", "kv_offload.brand_new is new: say in ALLOWED what it may import"),
    ],
)
def test_the_import_rules_catch_a_forbidden_edge(
    name: str, source: str, message: str | None
) -> None:
    package = ".".join(["kv_offload", *name.split(".")[:-1]])
    found = forbidden(name, set(runtime_imports(ast.parse(source), package)))
    assert found == ([] if message is None else [message])


def test_importing_the_packages_is_light() -> None:
    """vLLM loads the plugin in every process, the API front end included."""
    script = (
        "import sys, kv_offload, kv_offload.cli, kv_offload.plugin, transfer, transfer.host; "
        "print(sorted({'torch', 'cupy', 'vllm'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# -- the installed distribution and the wheel --------------------------------------------------


def test_the_installed_distribution_registers_the_plugin() -> None:
    try:
        points = distribution("kv-offload").entry_points
    except PackageNotFoundError:
        pytest.skip("kv-offload is not installed, only on the path")
    found = [point for point in points if point.group == PLUGIN_GROUP]
    assert [(point.name, point.value) for point in found] == [
        ("kv_offload", "kv_offload.plugin:register")
    ]
    assert callable(found[0].load())


def pip(*arguments: str) -> str:
    """Run pip of this Python, without a network, and return what it prints."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, "--no-index"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        distribution("pip"), distribution("hatchling")
    except PackageNotFoundError as error:
        pytest.skip(f"needs pip, and hatchling as the extra `dev` brings it: {error}")
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_two_packages_and_all_device_code(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "kv_offload",
        "transfer",
    }
    sources = {
        f"transfer/{file.relative_to(ROOT)}"
        for file in (ROOT / "csrc").rglob("*")
        if file.is_file()
    }
    assert {"transfer/csrc/swap_vector.cu", "transfer/csrc/swap_bulk.cu"} <= sources
    assert sources <= names
    python = {
        str(file.relative_to(ROOT))
        for package in ("kv_offload", "transfer")
        for file in (ROOT / package).rglob("*.py")
    }
    assert python <= names
    data = {name for name in names if not name.endswith(".py") and ".dist-info/" not in name}
    assert data - sources <= {"kv_offload/py.typed", "transfer/py.typed"}


@pytest.mark.engine
def test_installing_the_wheel_beside_vllm_changes_no_other_package(wheel: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs a vLLM engine, which is not installed")
    report = json.loads(pip("install", "--dry-run", "--quiet", "--report=-", str(wheel)))
    assert {item["metadata"]["name"] for item in report["install"]} <= {"kv-offload"}
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        requires = archive.read(metadata).decode()
    heavy = ("Requires-Dist: torch", "Requires-Dist: vllm", "Requires-Dist: cupy")
    assert not [
        line for line in requires.splitlines() if line.startswith(heavy) and "extra ==" not in line
    ]
