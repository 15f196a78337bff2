"""The environments of the Makefile's targets."""

from __future__ import annotations

import subprocess
import sys

from bench.environment import ROOT


def test_a_missing_library_stops_before_anything_is_installed(tmp_path):
    """In a process of its own: `ctypes` is made to find no library, as on a minimal system."""
    script = (
        "import ctypes, sys\n"
        "def none(name): raise OSError(name)\n"
        "ctypes.CDLL = none\n"
        "from bench import environment\n"
        "environment.ROOT = environment.Path(sys.argv[1])\n"
        "sys.argv[1:] = ['run', '--', '-c', '']\n"
        "environment.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: vLLM's CPU engine needs libnuma.so.1")
    assert not any(tmp_path.iterdir())
