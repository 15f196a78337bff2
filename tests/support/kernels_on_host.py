"""Compile kernels for a CPU, with tests/transfer/cuda/on_host in place of CUDA."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kv_swap.cuda.kernel_families import KernelFamily
from kv_swap.cuda.swap import compile_options, source_directory

ON_HOST = Path(__file__).parents[1] / "transfer/cuda/on_host"


def compile_kernels(family: KernelFamily, folder: Path) -> Any:
    """Return the library of a kernel family, built in an empty folder; skip without g++."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++, which compiles the kernels for a CPU")
    for source in (source_directory(), source_directory() / "include", ON_HOST):
        for file in source.iterdir():
            if file.is_file():
                shutil.copy(file, folder)
    options = [option for option in compile_options(family) if option.startswith(("-D", "-std"))]
    options += ["-O2", "-w", "-shared", "-fPIC", "-include", "cuda.h"]
    # Some distributions compile everything like this.
    options += ["-D_FORTIFY_SOURCE=3", "-D_GLIBCXX_ASSERTIONS"]
    options += ["-fno-extern-tls-init"]  # for shared memory, which nothing initialises
    source = Path(family.source).with_suffix(".cpp").name
    subprocess.run(["g++", *options, "-o", "kernels.so", source], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernels.so"))
