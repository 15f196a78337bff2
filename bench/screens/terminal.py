"""What commands show in a terminal, as SVG."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, RenderableType
from rich.text import Text

from kv_offload.tools.doctor.report import COLUMNS
from kv_offload.tools.status.figures import Figures
from kv_offload.tools.status.read import metrics_url, read
from kv_offload.tools.status.view import page

FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""Without the font that rich would have a browser fetch: it takes its own monospaced one."""

STATUS_COLUMNS = 80


def doctor() -> str:
    """Return the report of `kv-offload doctor` with the defaults and a wrong `VLLM_PLUGINS`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment = {**kept, "VLLM_PLUGINS": "lora_resolver"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "kv_offload.tools", "doctor"]
    shown = Text.from_ansi(_in_terminal(command, environment))
    return _picture(shown, "VLLM_PLUGINS=lora_resolver kv-offload doctor", COLUMNS)


def status(server: str, seconds: float) -> str:
    """Return the page that `kv-offload status` shows with its second reading."""
    url = metrics_url(server)
    before = read(url)
    time.sleep(seconds)
    now = read(url)
    return _picture(page(url, Figures(now, before)), f"kv-offload status {server}", STATUS_COLUMNS)


def _in_terminal(command: list[str], environment: dict[str, str]) -> str:
    """Return what a command writes to a terminal, colours included.

    Its exit status says nothing of a picture: doctor's is 1 where it found a problem.
    """
    ours, its = os.openpty()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=its, stderr=subprocess.PIPE, env=environment
    ) as process:
        os.close(its)
        written = b""
        try:
            while piece := os.read(ours, 4096):
                written += piece
        except OSError:
            pass  # EIO: the command has ended
        os.close(ours)
        _, errors = process.communicate()
    assert not errors, errors.decode()
    return written.decode().replace("\r\n", "\n")


def _picture(shown: RenderableType, title: str, columns: int) -> str:
    """Return a window of a terminal; what is not on the page stays the same from run to run."""
    console = Console(
        record=True,
        width=columns,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(shown)
    return console.export_svg(title=title, code_format=FORMAT, unique_id="terminal")
