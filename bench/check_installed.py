"""Checks an installed kv-offload from outside the checkout: `check_installed.py CHECKOUT`.

The installation must have the checkout's device code, dashboard and alert rules, byte for byte, and
importing it must not import torch, cupy or vllm.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(checkout: Path) -> None:
    """Raise `SystemExit` with the problem if there is one."""
    import kv_swap

    import kv_offload
    import kv_offload.engines.vllm.plugin
    import kv_offload.tools.main

    package = Path(kv_offload.__file__).parent
    if package.parent == checkout.resolve():
        raise SystemExit(f"{package} is the checkout, not an installed package")
    heavy = {"torch", "cupy", "vllm"} & sys.modules.keys()
    if heavy:
        raise SystemExit(f"importing kv_offload imported {sorted(heavy)}")
    check_copies(checkout / "csrc", Path(kv_swap.__file__).parent / "csrc")
    check_copies(checkout / "docs/grafana", package / "grafana")
    print(
        f"kv-offload {kv_offload.__version__} in {package}: device code and dashboard complete, "
        "imports light"
    )


def check_copies(folder: Path, installed: Path) -> None:
    """Raise `SystemExit` unless every file of a folder is installed unchanged."""
    sources = [file for file in folder.rglob("*") if file.is_file()]
    if not sources:
        raise SystemExit(f"{folder} has no files: give the folder of the checkout")
    for source in sources:
        copy = installed / source.relative_to(folder)
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            raise SystemExit(f"{copy} is missing or differs from {source}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
