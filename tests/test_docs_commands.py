"""Commands, configurations and arguments in README.md and docs/use are run or read as they stand.

What is in a fence is told by its language or, without one, by its first word: a program of `RUN`,
`STAND_INS`, `BUILTINS` or `NOT_RUN` makes it commands, anything else output. All commands of a page
run in one folder, in order. A block with a program of `NOT_RUN` is not run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI

from kv_offload.cache.disk_index import DiskIndex
from kv_offload.config import EXTRA_CONFIG, SCHEMA, trace_config
from kv_offload.config.disk_folder import INDEX_FILE
from kv_offload.config.host_memory import HostMemory
from kv_offload.config.sizes import parse_size
from kv_offload.engines.vllm import CONNECTOR
from kv_offload.engines.vllm.control import ControlRoutes
from kv_offload.engines.vllm.versions import check_version
from kv_offload.errors import UnsupportedError
from kv_offload.hints import read_hints
from kv_offload.tools.main import COMMANDS, main
from kv_offload.worker.pool import user_folder
from tests.kv_offload.tools.status.server import (
    HITS,
    PageHandler,
    PageServer,
    having,
    page_server,
)
from tests.support.published_models import PUBLISHED
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/use/*.md"))]
HOST = HostMemory(256 << 30, "/proc/meminfo")

RUN = {"kv-offload config", "kv-offload --version", "echo", "printf"}
STAND_INS = {"vllm", "python"}
"""They write down their `--kv-transfer-config`: what the shell makes of the page reaches them."""

BUILTINS = {"export", "cd", "ask"}
NOT_RUN = {
    *("kv-offload doctor", "kv-offload status", "kv-offload size", "kv-offload simulate"),
    "kv-offload pool",
    *("curl", "ps", "cat", "grep"),
    *(".", "make", "pip", "docker"),
}
"""They need a server, a network, Docker, a trace or a model, or their answer depends on the
machine. Commands of ours, `curl`, `ps` and `grep` run in tests below with stand-ins, those of `make
demo` and the proof in `engine/test_readme.py`, the wheel in `make wheel`. Nothing runs Docker."""


@dataclass(frozen=True)
class Block:
    language: str
    text: str

    @property
    def programs(self) -> list[str]:
        """What its commands begin with; after `kv-offload` also its command or option."""
        bare = re.sub(r"\\\n|(?<!\S)#.*|'[^']*'|\"[^\"]*\"", "", self.text)
        commands = re.split(r"[;&|(){}\n]+", re.sub(r"\b\w+=[^\s()]*", "", bare))
        return re.findall(
            r"^\s*(kv-offload (?:--)?[a-z]+\b|\S+)", "\n".join(commands), re.MULTILINE
        )

    @property
    def is_run(self) -> bool:
        first = next(iter(self.programs), "")
        known = first in {*RUN, *STAND_INS, *BUILTINS} or first.startswith("kv-offload ")
        commands = self.language in {"sh", "bash"} or (not self.language and known)
        return commands and not NOT_RUN & set(self.programs)


def blocks(page: Path) -> Iterator[Block]:
    fence = r"^( *)```(\w*)\n(.*?)^\1```$"
    for indent, language, text in re.findall(fence, page.read_text(), re.DOTALL | re.MULTILINE):
        yield Block(language, re.sub(f"^{indent}", "", text, flags=re.MULTILINE))


def check_transfer_config(text: str) -> list[dict[str, Any]]:
    """Have the plugin check its settings in a value of `--kv-transfer-config`, and return them."""
    config = json.loads(text)
    members = [config, *config.get(EXTRA_CONFIG, {}).get("connectors", ())]
    ours = [member for member in members if member["kv_connector"] == CONNECTOR]
    assert len(ours) == 1, text
    extra = ours[0].get(EXTRA_CONFIG, {})
    trace_config({k: v for k, v in extra.items() if k != "config_file"}, {}, host=HOST)
    return ours


TIER_COPIES = [
    f"{direction}_{unit}_total"
    for direction in ("promoted", "demoted")
    for unit in ("bytes", "seconds")
]

STAND_IN = """#!/bin/sh
while [ $# -gt 1 ]; do
    if [ "$1" = --kv-transfer-config ]; then echo "$2" >> "$SERVED"; exit 0; fi
    shift
done
exit 64
"""


@pytest.mark.parametrize("page", PAGES, ids=attrgetter("name"))
def test_commands_of_a_page_run(page, tmp_path):
    found = [block for block in blocks(page) if block.is_run]
    if not found:
        pytest.skip("nothing that can run here")
    unknown = {name for block in found for name in block.programs} - RUN - STAND_INS - BUILTINS
    assert not unknown, "say in RUN or NOT_RUN what is to be done with it"
    tools, folder, served = tmp_path / "tools", tmp_path / "here", tmp_path / "served"
    tools.mkdir(), folder.mkdir(), served.touch()
    cli = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kv_offload "$@"\n'
    for name, script in {"kv-offload": cli, **dict.fromkeys(STAND_INS, STAND_IN)}.items():
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    for example in configurations(page):  # what the page has the reader write
        (folder / "kv-offload.yaml").write_text(example)
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'transfer'}",
        "HOME": str(folder),
        "SERVED": str(served),
    }
    script = "\n".join(block.text for block in found)
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    for value in served.read_text().splitlines():
        check_transfer_config(value)


def configurations(page: Path) -> Iterator[str]:
    """Yield the page's examples of the YAML file."""
    for block in blocks(page):
        if block.language == "yaml":
            first, *others = yaml.safe_load_all(block.text)
            if not others and SCHEMA.keys() & first.keys():
                yield block.text


def manifests(page: Path) -> Iterator[dict[str, Any]]:
    for block in blocks(page):
        if block.language == "yaml" and "apiVersion:" in block.text:
            yield from yaml.safe_load_all(block.text)


@pytest.mark.parametrize("page", PAGES, ids=attrgetter("name"))
def test_examples_are_accepted(page, tmp_path):
    """Python is compiled, YAML read: with its keys for us or, in a manifest, for Kubernetes."""
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, str(page), "exec")
        elif block.language == "yaml":
            assert all(isinstance(part, dict) for part in yaml.safe_load_all(block.text))
    for example in configurations(page):
        file = tmp_path / "kv-offload.yaml"
        file.write_text(example)
        trace_config({"config_file": str(file)}, {}, host=HOST)
    for manifest in manifests(page):
        for name, example in manifest.get("data", {}).items():
            file = tmp_path / name
            file.write_text(example)
            trace_config({"config_file": str(file)}, {}, host=HOST)
    for value in re.findall(r"--kv-transfer-config '(\{.*?\})'", page.read_text()):
        check_transfer_config(value)


def test_the_manifest_fits_together_and_into_its_limit(tmp_path):
    """What is mounted exists, the file is where the argument says, and the page's figures agree.

    A model that was downloaded outlives its pod. What is in /dev/shm counts towards the limit.
    """
    page = ROOT / "docs/use/containers.md"
    text = page.read_text()
    config, claim, deployment = manifests(page)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    models = volumes[mounts["/root/.cache/huggingface"]]
    assert models["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    selector, labels = deployment["spec"]["selector"], deployment["spec"]["template"]["metadata"]
    assert selector["matchLabels"].items() <= labels["labels"].items()
    (built,) = re.findall(r"^FROM vllm/vllm-openai:v(\S+)$", text, re.MULTILINE)
    assert container["image"].endswith(f":{built}")
    (minutes,) = re.findall(r"here up to (\d+) minutes", text)
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 60 * int(minutes)

    arguments = container["args"]
    (ours,) = check_transfer_config(arguments[arguments.index("--kv-transfer-config") + 1])
    path = Path(ours[EXTRA_CONFIG]["config_file"])
    assert volumes[mounts[str(path.parent)]]["configMap"]["name"] == config["metadata"]["name"]
    resources = container["resources"]
    assert resources["requests"] == resources["limits"]
    limit = parse_size(resources["limits"]["memory"], 0)
    file = tmp_path / path.name
    file.write_text(config["data"][path.name])
    pool = trace_config({"config_file": str(file)}, {}, host=HostMemory(limit, "")).config.cpu_bytes
    shm = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shm["medium"] == "Memory"
    shm_bytes = parse_size(shm["sizeLimit"], 0)
    assert limit - pool - shm_bytes >= 16 << 30, "as the table of the page says"
    (shares,) = re.findall(r"memory: (\d+) for cpu_bytes, (\d+) for vLLM, (\d+) for /dev/shm", text)
    assert [int(share) << 30 for share in shares] == [pool, limit - pool - shm_bytes, shm_bytes]

    says = r"`cpu_bytes: (\d+%)` of a limit of (\S+) is (\d+ GiB)"
    ((percentage, limit_text, share),) = re.findall(says, " ".join(text.split()))
    limit = parse_size(limit_text, 0)
    assert parse_size(percentage, limit) == parse_size(share, 0) <= limit - (16 << 30)
    assert set(re.findall(r"--memory=(\S+)", text)) == {limit_text.removesuffix("Gi") + "g"}


def test_the_documented_refusal_of_a_version_is_real():
    text = (ROOT / "docs/use/operating.md").read_text()
    (shown,) = re.findall(r"^kv-offload:? (works with vLLM .*, this is .*)$", text, re.MULTILINE)
    with pytest.raises(UnsupportedError) as caught:
        check_version("0.34.0")
    assert str(caught.value).partition("works with")[1:] == shown.partition("works with")[1:]


def test_reports_are_shown_as_they_are(capsys):
    """With the checks of this doctor, and the lines of this status page; figures aside."""
    (shown,) = (b.text for b in blocks(ROOT / "docs/use/doctor.md") if b.language == "text")
    main(["doctor", "--json", "--no-measure"])
    checks = {check["name"] for check in json.loads(capsys.readouterr().out)["checks"]}
    found = re.findall(r"^  (?:ok|problem|not checked) +(.*?):", shown, re.MULTILINE)
    assert len(found) == 10
    assert set(found) <= checks

    (shown,) = (b.text for b in blocks(ROOT / "docs/use/metrics.md") if b.language == "text")
    page = having(HITS, "hit_tokens_at_twice_total", 900)
    for sample in ("tier_slots", "disk_usable", *TIER_COPIES):
        page = having(page, sample, 1)
    with page_server(page) as server:
        main(["status", server.address, "--once"])
    real = capsys.readouterr().out
    lines = re.findall(r"^ {0,2}\w[^\d\n]*\b", shown, re.MULTILINE)[1:]
    assert len(lines) >= 20
    real = re.sub(" +", " ", real)
    assert [line for line in lines if re.sub(" +", " ", line) not in real] == []


def test_every_program_that_is_named_here_is_in_a_page():
    """A rule that fits nothing would hide that a page is no longer read."""
    named = {name for page in PAGES for block in blocks(page) for name in block.programs}
    assert {"kv-offload config", "vllm", "echo", "curl", "docker", "pip", "ps"} <= named


NAMES = {"simulate", "size", "status", "simulate TRACE"}
"""Commands that are spoken of, and not run so."""


def our_commands() -> Iterator[str]:
    """Yield every `kv-offload ...` that a page shows, in a block or within a sentence."""
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))):
        shown = [block.text for block in blocks(page) if block.language in {"", "sh"}]
        prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        shown += re.findall(r"`([^`]*)`", prose)
        for text in "\n".join(shown).replace("\\\n", " ").splitlines():
            for command in re.findall(r"(?:^|[(;] ?)kv-offload ([a-z][^#)|;&]*)", text.strip()):
                yield command.strip()


def test_every_command_of_ours_that_a_page_shows_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a server, models, a trace, a disk and a pool in place of those of the pages."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kv-offload.yaml").write_text("cpu_bytes: 1MiB\n")
    (tmp_path / "disk").mkdir()
    DiskIndex(tmp_path / "disk" / INDEX_FILE, {}, {}, 8).close(20)
    shape = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    (tmp_path / "trace").write_text(json.dumps(shape))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(PUBLISHED["Llama-3.1-8B"]))
    user_folder(Path()).joinpath("chat").mkdir(parents=True)
    ran: dict[str, Any] = {}
    with page_server(HITS) as server:
        stand_ins = {
            r"localhost:8000|URL": server.address,
            r"10\.0\.0\.5:50051": "127.0.0.1:1",
            r"(?<=size )\S+|(?<=--model-config )\S+": "model",
            r"(?<=simulate )\S+": "trace",
            r"(?<=tier )\S+|(?<=--disk )\S+": "disk",
            r"--remove \S+": "--path . --remove chat",
            r"\[FILE\]|\bFILE|\S+\.yaml": "kv-offload.yaml",
        }
        for shown in sorted({*our_commands()} - NAMES):
            command = shown
            for what, stand_in in stand_ins.items():
                command = re.sub(what, stand_in, command)
            words = shlex.split(command)
            if words[0] == "doctor":
                words.append("--no-measure")  # GPUs, and half a gigabyte of the disk
            ran[shown] = main(words)
    assert set(ran.values()) <= {0, 1}, ran
    assert {shown.split()[0] for shown in ran} == set(COMMANDS)
    assert capsys.readouterr().out


class PostingHandler(PageHandler):
    """Accepts everything, and keeps what clients post: path, authorization, body."""

    posted: list[tuple[str, str | None, str]]

    def do_POST(self) -> None:  # noqa: N802 - the name of http.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self.posted.append((self.path, self.headers.get("Authorization"), body))
        self.answer("{}")


def run_blocks(programs: set[str], folder: Path, address: str = "") -> dict[str, str]:
    """Run the blocks of docs/use that have one of these programs; return outputs by page."""
    outputs = {}
    for page in PAGES[1:]:
        found = [
            block.text
            for block in blocks(page)
            if block.language in {"", "sh"} and programs & set(block.programs)
        ]
        script = "\n".join(found).replace("localhost:8000", address or "localhost:8000")
        for block in blocks(page):
            if block.language == "json":
                (folder / "prompts.jsonl").write_text(block.text)
        if found:
            done = subprocess.run(
                ["bash", "-e", "-o", "pipefail", "-c", script], cwd=folder, text=True, timeout=60,
                capture_output=True, check=False, env={**os.environ, "VLLM_API_KEY": "a key"},
            )  # fmt: skip
            assert done.returncode == 0, f"{script}\n{done.stderr}"
            outputs[page.name] = done.stdout
    return outputs


def test_requests_that_pages_send_with_curl_are_those_that_the_plugin_takes(tmp_path):
    PostingHandler.posted = []
    with PageServer(PostingHandler).running() as server:
        pages = run_blocks({"curl"}, tmp_path, server.address)
    assert {"operating.md", "requests.md", "security.md"} <= pages.keys()
    app = FastAPI()
    ControlRoutes().attach_router(app)
    ours = {route.path for route in app.routes if "kv-offload" in getattr(route, "path", "")}
    called = {path for path, *_ in PostingHandler.posted}
    assert called == {"/v1/completions", *ours}
    for path, authorization, body in PostingHandler.posted:
        if path in ours:
            assert authorization == "Bearer a key"
        else:
            request = json.loads(body)
            read_hints(request.get("kv_transfer_params", {}), request.get("cache_salt"))


@contextmanager
def process_named(name: str) -> Iterator[int]:
    process = subprocess.Popen(["bash", "-c", f"exec -a {name} sleep 60"])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_commands_that_look_for_processes_and_lines_find_them(tmp_path):
    line = "INFO kv-offload: rank 0 holds 8 slots"
    (tmp_path / "server.log").write_text(f"INFO vLLM\n{line}\n")
    with process_named("VLLM::EngineCore") as pid:
        wait_until(lambda: b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes())
        pages = run_blocks({"ps", "grep"}, tmp_path)
    assert re.search(rf"^ *{pid} +{os.getpid()} .* VLLM::EngineCore", pages["containers.md"], re.M)
    assert pages["troubleshooting.md"] == f"{line}\n"


def bench_commands() -> Iterator[str]:
    """Yield every `python -m bench...` that a page shows, with its arguments."""
    for page in sorted(ROOT.glob("docs/**/*.md")):
        text = page.read_text().replace("\\\n", " ")
        for found in re.findall(r"python -m (bench\.[^`#\n]*)", text):
            yield " ".join(found.split())


PARSE = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, sys.argv
        print("parsed:", *sys.argv)
"""


def test_commands_of_benches_that_pages_show_are_accepted():
    """Their arguments are parsed; `tests/bench` and `make test-all` run the benches small."""
    commands = {*bench_commands()}
    assert len(commands) > 10
    parsed = []
    for command in sorted(commands):
        module, *words = shlex.split(command)
        file = ROOT / module.replace(".", "/")
        source = (file / "__main__.py" if file.is_dir() else file.with_suffix(".py")).read_text()
        if words and "argparse" in source:
            parsed.append([module, *words, "--help"])
        else:
            assert words in ([], ["--pages"], ["serving-gqa8.json"]), command
    done = subprocess.run(
        [sys.executable, "-c", PARSE, json.dumps(parsed)],
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("parsed: ") == len(parsed) > 4
    benches = re.findall(
        r"bench/\w+/bench_\w+\.py", "".join(page.read_text() for page in ROOT.glob("docs/**/*.md"))
    )
    assert len(benches) >= 4
    assert [path for path in benches if not (ROOT / path).is_file()] == []
