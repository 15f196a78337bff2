"""Reads GPUs and their links from NVIDIA's management library (NVML) into plain records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of this machine with its PCI Express link; None where NVML gives no value."""

    index: int
    name: str
    uuid: str
    pci_bus_id: str
    """As in /sys/bus/pci/devices: `0000:1a:00.0`."""
    generation: int | None
    """Current generation, which an idle GPU may lower. `width` is the number of lanes."""
    max_generation: int | None
    width: int | None
    max_width: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The answers of NVML; `problem` is the reason if there are none."""

    driver: str | None = None
    cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver supports."""
    gpus: tuple[Gpu, ...] = ()
    may_have_others: bool = False
    """True if NVML could not be queried: there may still be GPUs."""
    problem: str = ""
    remedy: str = ""


def read_machine() -> Machine:
    """Query NVML. A missing library or an error of NVML becomes the `problem`."""
    try:
        import pynvml
    except ImportError:
        return Machine(
            may_have_others=True,
            problem="the Python package nvidia-ml-py is not installed",
            remedy="On a machine with an NVIDIA GPU: pip install nvidia-ml-py",
        )
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Machine(
            problem=f"no NVIDIA driver answers: {error}",
            remedy="On a machine with an NVIDIA GPU: install its driver; in a container, start it "
            "with --gpus all.",
        )
    try:
        return _read(pynvml)
    except pynvml.NVMLError as error:
        problem = f"NVML gave an error: {error}"
        return Machine(may_have_others=True, problem=problem, remedy="Look at nvidia-smi.")
    finally:
        pynvml.nvmlShutdown()


def _read(nvml: Any) -> Machine:
    def ask(call: Callable[..., Any], *arguments: Any) -> Any:
        """Return an answer of NVML, or None if the machine lacks the feature."""
        try:
            return call(*arguments)
        except nvml.NVMLError:
            return None

    def read_gpu(index: int) -> Gpu:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        pci = nvml.nvmlDeviceGetPciInfo(handle)
        return Gpu(
            index=index,
            name=nvml.nvmlDeviceGetName(handle),
            uuid=nvml.nvmlDeviceGetUUID(handle),
            pci_bus_id=f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0",
            generation=ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            max_generation=ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            width=ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            max_width=ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        )

    cuda = ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
    return Machine(
        driver=ask(nvml.nvmlSystemGetDriverVersion),
        cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        gpus=tuple(map(read_gpu, range(nvml.nvmlDeviceGetCount()))),
    )
