import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

import kv_offload
from kv_offload.config import SCHEMA, trace_config
from kv_offload.config.host_memory import HostMemory
from tests.support.commands import COMMAND, PYTHON, run_in_shell

DOCS = Path(__file__).parents[3] / "docs/use/configuration.md"
PRINT_LAST = "import sys; print(sys.argv[-1])"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def transfer_config(output):
    option, value = shlex.split(output.splitlines()[-1])
    assert option == "--kv-transfer-config"
    return json.loads(value)


def test_a_file_gives_values_sources_and_the_argument(tmp_path, command, monkeypatch):
    file = tmp_path / "kv.yaml"
    disk = "disk: {path: kv, bytes: 2MB}\n"
    file.write_text(f"cpu_bytes: 0x100000\neviction_policy: lru\nkeep_on_sleep: yes\n{disk}")
    status, output, _ = command("config", "kv.yaml")
    assert status == 0
    lines = output.splitlines()
    assert lines[0] == f"# Effective configuration; file: '{file}'"
    assert lines[1] == "cpu_bytes: 1048576  # file, 0x100000 is 1 MiB"
    assert lines[4] == "eviction_policy: lru  # file"
    assert {"store_blocks: all  # default", "keep_on_sleep: yes  # file"} <= set(lines)
    assert f"  path: {tmp_path}/kv  # file" in lines
    assert "  bytes: 2000000  # file, 2MB is 1.91 MiB" in lines
    assert {"disk:", "remote: null  # default"} <= set(lines)
    assert "  write_rate: 1073741824  # default, 1GiB is 1 GiB" in lines
    values = yaml.safe_load(output.split("\n\n")[0])
    assert trace_config(values, {}).config == trace_config({"config_file": "kv.yaml"}, {}).config
    argument = {
        "kv_connector": "KVOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"config_file": str(file)},
    }
    assert transfer_config(output) == argument
    assert json.loads(command("config", "--argument", "kv.yaml").out) == argument, "alone"
    monkeypatch.setenv("KV_OFFLOAD_CONFIG_FILE", "kv.yaml")
    assert transfer_config(command("config").out) == argument


def test_a_variable_that_is_not_read_is_a_warning(command, monkeypatch):
    monkeypatch.setenv("KV_OFFLOAD_CONFIG", "kv.yaml")
    output = command("config", "--argument")
    alone = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both"}
    assert json.loads(output.out) == alone, "without a file"
    assert output.err.startswith("kv-offload: warning: environment: KV_OFFLOAD_CONFIG is not read")
    assert output.err.count("\n") == 1


def test_folders_that_no_engine_could_use_here_are_warnings(tmp_path, command):
    """The file may be meant for another machine."""
    missing = tmp_path / "missing"
    (tmp_path / "kv.yaml").write_text(
        f"cpu_bytes: 2MiB\nhost_pool: chat\nhost_pool_path: {missing}\n"
        f"disk: {{path: {missing}/kv, bytes: 2MiB}}\n"
        f"remote: {{kind: folder, path: {missing}, bytes: 2MiB}}\n"
        f"record_trace: {missing}/trace.jsonl\n"
    )
    output = command("config", "kv.yaml")
    assert output.status == 0
    warned = [line.split(": ")[2] for line in output.err.splitlines()]
    assert warned == ["disk.path", "remote.path", "host_pool_path", "record_trace"]
    missing.mkdir()
    assert "disk.path" not in command("config", "kv.yaml").err


def test_the_documented_run_is_real(tmp_path, command, monkeypatch):
    machine = HostMemory(64 << 30, "/proc/meminfo")
    monkeypatch.setattr("kv_offload.config.trace.read_host_memory", lambda: machine)
    docs = DOCS.read_text()
    example, *_ = re.findall(r"```yaml\n(.*?)```", docs, re.DOTALL)
    (printed,) = re.findall(r"```\n(# Effective.*?)```", docs, re.DOTALL)
    (tmp_path / "kv-offload.yaml").write_text(example)
    found = command("config", "kv-offload.yaml").out.replace(str(tmp_path), "/srv")
    begin, end = printed.split("...\n")
    assert found.startswith(begin)
    assert found.endswith(end)


@pytest.mark.parametrize("name", ["it's here.yaml", 'a"b$HOME`x`.yaml', "ü\n.yaml", "\udcff.yaml"])
def test_awkward_paths_survive_the_shell(tmp_path, command, name):
    (tmp_path / name).write_text("")
    line = command("config", name).out.splitlines()[-1]
    done = run_in_shell(tmp_path, f'{PYTHON} -c "{PRINT_LAST}" {line}', shell="sh")
    extra_config = json.loads(done.stdout)["kv_connector_extra_config"]
    assert extra_config == {"config_file": str(tmp_path / name)}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("kv.yaml", "evict_policy: lru", "{}/kv.yaml: evict_policy: 'lru': unknown key. Did you"),
        ("kv.yaml", "cpu_bytes: 100%", "{}/kv.yaml: cpu_bytes: '100%': asks for"),
        ("kv.yaml", "cpu_bytes: 8B", "{}/kv.yaml: cpu_bytes: '8B': asks for 8 bytes, less than 1"),
        ("kv.yaml", "disk: {path: kv, bytes: 900TiB}", "{}/kv.yaml: disk.bytes: '900TiB': asks"),
        ("kv.yaml", "a: [", "{}/kv.yaml, line 1, column 5"),
        ("-", "", "'-': standard input is not read, "),
    ],
)
def test_errors_are_one_message_and_status_2(tmp_path, command, name, content, message):
    (tmp_path / "kv.yaml").write_text(content)
    output = command("config", name)
    assert (output.status, output.out) == (2, "")
    assert output.err.startswith(f"kv-offload: {message.format(tmp_path)}")
    assert output.err.count("\n") == 1


SERVE = 'ARGUMENT=$({command} config --argument kv-offload.yaml) && {serve} "$ARGUMENT"'
"""The way of README.md."""


@pytest.mark.parametrize("page", ["README.md", "docs/use/configuration.md"])
def test_the_pages_start_a_server_in_the_way_that_is_tested(page):
    start = SERVE.format(command="kv-offload", serve="").removesuffix(' "$ARGUMENT"')
    text = (DOCS.parents[2] / page).read_text()
    assert re.search(re.escape(start) + r"(VLLM_SERVER_DEV_MODE=1 )?vllm serve ", text)


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_wrong_file_starts_no_server(tmp_path, shell):
    def serve():
        script = SERVE.format(command=COMMAND, serve=f'{PYTHON} -c "{PRINT_LAST}"')
        return run_in_shell(tmp_path, script, shell)

    (tmp_path / "kv-offload.yaml").write_text("eviction_polcy: lru\n")
    done = serve()
    assert (done.returncode, done.stdout) == (2, "")
    assert "Did you mean eviction_policy?" in done.stderr
    (tmp_path / "kv-offload.yaml").write_text("eviction_policy: lru\n")
    done = serve()
    assert done.returncode == 0, "the control"
    extra_config = json.loads(done.stdout)["kv_connector_extra_config"]
    assert trace_config(extra_config, {}).config.eviction_policy == "lru"


def test_version_and_help(command):
    assert command("--version") == (0, f"kv-offload {kv_offload.__version__}\n", "")
    output = command("config", "--help").out
    for key in SCHEMA.values():
        default = "required" if key.is_required else f"default {key.written_default}"
        described = f"{key.name} ({default})\n    {key.description}"
        assert f"{described}\n    Allowed: {key.allowed}." in output
