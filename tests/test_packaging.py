"""What an installation brings, and which module may import which."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.support.processes import run_code

ROOT = Path(__file__).parent.parent
PLUGIN_GROUP = "vllm.general_plugins"

# -- imports -----------------------------------------------------------------------------------

LEAVES = frozenset(
    {"", "config", "engine", "errors", "measurement", "messages", "metrics", "kv_hints", "hints"}
)
"""Modules at the top of `kv_offload`, which every room may import; `""` is the package itself."""

ALLOWED = {
    "cache": LEAVES | {"kv_swap"},
    "scheduler": LEAVES | {"cache", "simulation", "tiers"},
    "tiers": LEAVES | {"cache", "scheduler"},
    "simulation": LEAVES | {"cache"},
    "worker": LEAVES | {"cache", "kv_swap"},
    "engines": LEAVES | {"cache", "scheduler", "simulation", "tiers", "worker", "kv_swap"},
    "tools": LEAVES | {"cache", "engines", "simulation", "worker", "kv_swap"},
    "__main__": frozenset({"tools"}),
    # The leaves among themselves.
    **dict.fromkeys(LEAVES, frozenset[str]()),
    "config": frozenset({"errors"}),
    "hints": frozenset({"config", "errors"}),
    "kv_hints": frozenset({"hints"}),
}
"""Which room of `kv_offload` may import which, `TYPE_CHECKING` imports aside."""

ENGINE = "kv_offload.engines.vllm"
CONSTANTS = (f"{ENGINE}.CONNECTOR", f"{ENGINE}.versions")
"""All that the tools import of an engine: they run where the engine is broken."""


def runtime_imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the full names that a module imports, inside functions too, not under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from runtime_imports(other, package)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(name, package) if node.level else name
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
        else:
            yield from runtime_imports(node, package)


def modules(package: str) -> Iterator[tuple[str, set[str]]]:
    """Yield every file of a package as (`name` below the package, names that it imports)."""
    for file in sorted((ROOT / package).rglob("*.py")):
        parts = file.relative_to((ROOT / package).parent).with_suffix("").parts
        name = ".".join(parts[1:]).removesuffix("__init__").removesuffix(".")
        tree = ast.parse(file.read_text())
        yield name, set(runtime_imports(tree, ".".join(parts[:-1])))


def forbidden(name: str, imports: set[str]) -> list[str]:
    """Return what is wrong with the imports of one module of `kv_offload`."""
    room = name.partition(".")[0]
    if room not in ALLOWED:
        return [f"kv_offload.{name} is in no room: say in ALLOWED what it may import"]
    wrong = set()
    for target in imports:
        top, _, rest = target.partition(".")
        other = rest.partition(".")[0] if top == "kv_offload" else top
        is_room = other in ALLOWED if top == "kv_offload" else top == "kv_swap"
        if is_room and other not in ALLOWED[room] | {room, ""}:
            wrong.add(f"kv_offload.{name} imports {other}")
        if top == "vllm" and room != "engines":
            wrong.add(f"kv_offload.{name} imports vllm")
        is_constant = target.startswith(CONSTANTS) or target == "kv_offload.engines.vllm"
        if room == "tools" and other == "engines" and not is_constant:
            wrong.add(f"kv_offload.{name} imports {target}")
    return sorted(wrong)


def test_kv_offload_imports_only_in_the_allowed_directions():
    found = [line for name, imports in modules("kv_offload") for line in forbidden(name, imports)]
    assert found == []


SWAP_ROOMS = {
    "memory": {"cuda", "host", "tiers"},
    "cuda": {"host", "tiers"},
    "host": {"cuda", "tiers"},
    "tiers": {"cuda", "host"},
}
"""Which room of `kv_swap` must not import which."""


def test_kv_swap_imports_only_in_the_allowed_directions():
    """It knows neither kv_offload nor vLLM, and memory knows no device."""
    wrong = []
    for name, imports in modules("transfer/kv_swap"):
        closed = {f"kv_swap.{room}" for room in SWAP_ROOMS.get(name.partition(".")[0], ())}
        wrong += [
            f"kv_swap.{name} imports {target}"
            for target in sorted(imports)
            if target.partition(".")[0] in {"kv_offload", "vllm"}
            or ".".join(target.split(".")[:2]) in closed
        ]
    assert wrong == []


def test_benches_use_only_the_support_of_the_tests_and_only_their_own_tests_use_them():
    used = {name for _, names in modules("bench") for name in names if name.startswith("tests")}
    assert used
    assert {".".join(name.split(".")[:2]) for name in used} == {"tests.support"}
    users = [name for name, names in modules("tests") if any(n.startswith("bench.") for n in names)]
    assert users
    assert [name for name in users if not name.startswith("bench.")] == []


@pytest.mark.parametrize("package", ["kv_offload", "transfer/kv_swap"])
def test_no_modules_import_each_other_in_a_circle(package):
    """Packages aside: importing a module imports those that it lies in."""
    top = package.rpartition("/")[2]
    graph = {f"{top}.{name}": imports for name, imports in modules(package) if name}
    within = {
        name: {target for target in imports & graph.keys() if not name.startswith(f"{target}.")}
        for name, imports in graph.items()
    }
    assert sum(map(len, within.values())) > len(within)
    TopologicalSorter(within).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("worker.worker", "from kv_offload import scheduler", "scheduler"),
        ("worker.worker", "from .. import scheduler", "scheduler"),
        ("worker.worker", "from kv_offload.engines.vllm import versions", "engines"),
        ("tools.doctor.versions", "from kv_offload.engines.vllm.versions import NEWEST", None),
        ("tools.doctor.versions", "import kv_offload.engines.vllm.plugin", f"{ENGINE}.plugin"),
        ("cache.manager", "def f():\n  import vllm.config", "vllm"),
        ("cache.policies.lru", "from ...config import X", None),
        ("scheduler.scheduler", "import kv_swap.engine", "kv_swap"),
        ("scheduler.scheduler", "if TYPE_CHECKING:\n  import vllm", None),
        ("engines.vllm.plugin", "import vllm", None),
        ("errors", "from kv_offload.config import X", "config"),
    ],
)
def test_the_import_rules_catch_a_forbidden_edge(name, source, message):
    package = ".".join(["kv_offload", *name.split(".")[:-1]])
    found = forbidden(name, set(runtime_imports(ast.parse(source), package)))
    assert found == ([] if message is None else [f"kv_offload.{name} imports {message}"])
    assert forbidden("brand_new", set()) != []


def test_importing_the_packages_is_light():
    """vLLM loads the plugin in every process, the API front end included."""
    code = (
        "import sys, kv_swap.factory\n"
        "import kv_offload.tools.main, kv_offload.config, kv_offload.engines.vllm.plugin\n"
        "import kv_offload.cache.manager, kv_offload.cache.prefix\n"
        "print(sorted({'torch', 'cupy', 'vllm'} & sys.modules.keys()))"
    )
    assert run_code(code) == "[]\n"


def test_everything_but_the_engines_imports_without_vllm():
    names = [name for name, _ in modules("kv_offload") if name]
    others = [name for name in names if name.partition(".")[0] != "engines"]
    code = (
        "import importlib, sys; sys.modules['vllm'] = None  # importing it raises\n"
        "for name in {}: importlib.import_module('kv_offload.' + name)"
    )
    run_code(code.format(others))
    with pytest.raises(subprocess.CalledProcessError):  # the control
        run_code(code.format(["engines.vllm.connector"]))


# -- the installed distribution and the wheel --------------------------------------------------


def test_the_installed_distribution_registers_the_plugin():
    try:
        points = distribution("kv-offload").entry_points
    except PackageNotFoundError:
        pytest.skip("kv-offload is not installed, only on the path")
    found = [point for point in points if point.group == PLUGIN_GROUP]
    assert [(point.name, point.value) for point in found] == [
        ("kv_offload", "kv_offload.engines.vllm.plugin:register")
    ]
    assert callable(found[0].load())


def pip(*arguments: str) -> str:
    """Run pip of this Python, without a network, and return what it prints."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, "--no-index"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the wheel of a source tree into an empty folder."""
    try:
        distribution("pip"), distribution("hatchling")
    except PackageNotFoundError as error:
        pytest.skip(f"needs pip, and hatchling as the extra `dev` brings it: {error}")
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


def files_in(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_packages_all_device_code_and_the_dashboard(wheel):
    names = files_in(wheel)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"kv_offload", "kv_swap"}
    sources = {
        f"kv_swap/{file.relative_to(ROOT)}" for file in (ROOT / "csrc").rglob("*") if file.is_file()
    }
    assert {"kv_swap/csrc/swap_vector.cu", "kv_swap/csrc/swap_bulk.cu"} <= sources
    assert sources <= names
    for folder, package in ((ROOT, "kv_offload"), (ROOT / "transfer", "kv_swap")):
        assert {str(f.relative_to(folder)) for f in (folder / package).rglob("*.py")} <= names
    dashboard = {"kv_offload/grafana/kv-offload.json", "kv_offload/grafana/alerts.yml"}
    typed = {"kv_offload/py.typed", "kv_swap/py.typed"}
    data = {name for name in names if not name.endswith(".py") and ".dist-info/" not in name}
    assert data - sources == typed | dashboard


@pytest.mark.engine
def test_installing_the_wheel_beside_vllm_changes_no_other_package(wheel):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs a vLLM engine, which is not installed")
    report = json.loads(pip("install", "--dry-run", "--quiet", "--report=-", str(wheel)))
    assert {item["metadata"]["name"] for item in report["install"]} <= {"kv-offload"}
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        requires = archive.read(metadata).decode()
    heavy = re.findall(r"^Requires-Dist: (?:torch|vllm|cupy).*", requires, re.MULTILINE)
    assert [line for line in heavy if "extra ==" not in line] == []


# -- the sdist and the image -------------------------------------------------------------------


def test_what_the_pages_name_is_in_the_sdist(tmp_path):
    """Links, cited tests and the files of every `make` target; a wheel is built from it, too."""
    pytest.importorskip("build", reason="needs build, as the extra `dev` brings it")
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir"]
    subprocess.run([*command, str(tmp_path), str(ROOT)], capture_output=True, check=True)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / built.name.removesuffix(".tar.gz")
    pages = [sys.executable, "-m", "pytest", "-q", "tests/test_docs.py"]
    done = subprocess.run(pages, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    used = {"Makefile", "mkdocs.yml", ".ci/run", ".dockerignore", ".gitignore"}
    assert [name for name in sorted(used) if not (source / name).is_file()] == []


def docker_ignores(path: str) -> bool:
    """Say whether `docker build` leaves a file out: a pattern matches it or a folder above it."""
    patterns = re.findall(r"^[^#\n].*", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert not [line for line in patterns if re.search(r"[!?\[\\]|^/|/$", line)], "not read here"
    written = [re.escape(p).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*") for p in patterns]
    return bool(re.match(f"({'|'.join(written)})(/|$)", path))


def test_the_wheel_of_an_image_is_that_of_the_checkout(wheel, tmp_path):
    """Built from what `docker build` is sent: nothing that an installation needs is ignored."""
    sent = tmp_path / "sent"

    def ignored(folder: str, names: list[str]) -> list[str]:
        at = Path(folder).relative_to(ROOT)
        return [name for name in names if docker_ignores((at / name).as_posix())]

    shutil.copytree(ROOT, sent, ignore=ignored, symlinks=True)
    size_bytes = sum(file.lstat().st_size for file in sent.rglob("*"))
    assert size_bytes < 64 << 20, "an environment, or another large folder, is sent"
    (tmp_path / "wheel").mkdir()
    assert files_in(build_wheel(sent, tmp_path / "wheel")) == files_in(wheel)
