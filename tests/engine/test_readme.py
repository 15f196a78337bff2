"""The commands of README.md that prove a hit, as written, on vLLM's CPU engine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mooncake import HeldPort
from tests.support.server import end
from tests.support.small_models import write_model

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def block(*parts: str) -> str:
    """Return the only block of commands that contains all of these parts."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    blocks = [text for language, text in fences if language in ("", "sh")]
    (found,) = [commands for commands in blocks if all(part in commands for part in parts)]
    return str(found)


def commands_here(commands: str, model: Path, port: int) -> str:
    """Return commands with this environment, model and port instead of a user's."""
    for written, here in (
        ("make demo && . .venv/bin/activate\n", ""),
        (".venv/models/qwen3-float32", str(model)),
        ("localhost:8000", f"localhost:{port}"),
        ("vllm.entrypoints.openai.api_server", f"vllm.entrypoints.openai.api_server --port {port}"),
    ):
        commands = commands.replace(written, here)
    return commands


@pytest.mark.slow
def test_the_last_line_proves_a_hit(model_folder, tmp_path):
    model = write_model("qwen3", model_folder / "qwen3")
    port = HeldPort()
    proof, log_lines = prove(model, port.number, tmp_path)
    assert proof.returncode == 0, log_lines[-6000:]
    first, again, *figures = proof.stdout.splitlines()
    assert first == again
    words = re.findall(r"t\d+", first)
    assert len(words) == 8
    assert len(set(words)) > 4, "the model tells the prompt's tokens apart"
    assert all(line.startswith("vllm:host_kv_cache_") for line in figures), "nothing else is shown"
    (hits,) = [line for line in figures if line.startswith("vllm:host_kv_cache_hit_tokens_total{")]
    assert hits.endswith(" 384.0")
    assert "kv-offload: host memory holds 2097152 tokens, 16 times the engine's own" in log_lines
    said = [line.partition("kv-offload: ")[2] for line in log_lines.splitlines()]
    said = [line for line in said if line]
    assert 3 <= len(said) <= 5, said
    assert max(map(len, said)) <= 200


def prove(model: Path, port: int, folder: Path) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the commands with a server in `folder`; return the last block's run and the log."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(sys.path),
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    start = block("make demo &&", "vllm.entrypoints.openai.api_server")
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            ["bash", "-c", commands_here(start, model, port)],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        proof = subprocess.run(
            ["bash", "-c", commands_here(block("reset_prefix_cache", "ask;"), model, port)],
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        end(server)
    return proof, log.read_text()
