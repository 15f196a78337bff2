"""Check an installed kv-offload from outside the checkout: `check_installed.py CSRC`.

Its device code is there, byte for byte that of the folder CSRC, and importing it brings neither
torch, cupy nor vllm.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(csrc: Path) -> None:
    """Raise `SystemExit` with what is wrong."""
    import kv_swap

    import kv_offload
    import kv_offload.cli.main
    import kv_offload.engines.vllm.plugin

    package = Path(kv_offload.__file__).parent
    if package.parent == csrc.resolve().parent:
        raise SystemExit(f"{package} is the checkout, not an installed package")
    heavy = {"torch", "cupy", "vllm"} & sys.modules.keys()
    if heavy:
        raise SystemExit(f"importing kv_offload brought {sorted(heavy)}")
    installed = Path(kv_swap.__file__).parent / "csrc"
    for source in (file for file in csrc.rglob("*") if file.is_file()):
        copy = installed / source.relative_to(csrc)
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            raise SystemExit(f"{copy} is missing or differs from {source}")
    print(f"kv-offload {kv_offload.__version__} in {package}: device code complete, imports light")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
