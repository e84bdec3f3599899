"""The command line and the run's file; every slip is one clear message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.gateway.addresses import is_allowed
from services.gateway.config import load
from shared.config import GatewaySection
from shared.errors import ConfigError

RUN = """
run: {name: test, dir: runs/test, steps: 1}
student: {model: student, max_model_len: 256}
teachers:
  math: {model: a, host: teacher-math, ports: [8101, 8102]}
  chat: {model: b, host: "::1"}
routes: {sums: math, talk: chat}
prompts: {sources: [{data_source: sums, task: chain_sum}]}
gateway: {port: 9000, request_timeout_s: 5}
"""


def test_teachers_from_the_command_line():
    teachers = ["math=http://127.0.0.1:1/", "chat=http://[::1]:2", "math=https://b:3"]
    config = load(["--port=8105", "--set=gateway.probe_interval_s=0.5", *(f"--teacher={text}" for text in teachers)])
    assert config.teachers == {"math": ["http://127.0.0.1:1", "https://b:3"], "chat": ["http://[::1]:2"]}
    assert config.gateway == GatewaySection(port=8105, probe_interval_s=0.5)


def test_names_and_registrations_from_the_command_line():
    config = load(["--teacher=math=dns+http://Teacher-Math:8101", "--teacher=chat=register"])
    assert config.teachers == {"math": ["dns+http://teacher-math:8101"], "chat": []}


@pytest.mark.parametrize(
    ("discovery", "expected"),
    [("dns", ["dns+http://teacher-math:8101", "dns+http://teacher-math:8102"]), ("register", [])],
)
def test_discovery_of_a_runs_file(tmp_path: Path, discovery: str, expected: list[str]):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    assert load(["--config", str(path), "--set", f"teachers.math.discovery={discovery}"]).teachers["math"] == expected


def test_hosts_that_may_register():
    patterns = ["10.0.0.0/8", "fd00::/8", "teacher-*"]
    allowed = ["http://10.9.8.7:1", "http://[fd00::1]:1", "http://teacher-math:1"]
    refused = ["http://11.9.8.7:1", "http://[fe00::1]:1", "http://evil:1", "http://10.0.0.1.evil:1"]
    assert [is_allowed(url, patterns) for url in (*allowed, *refused)] == [True] * 3 + [False] * 4


def test_teachers_from_a_runs_file(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    config = load(["--config", str(path), "--set", "gateway.request_timeout_s=7", "--host", "0.0.0.0"])
    assert config.teachers == {
        "math": ["http://teacher-math:8101", "http://teacher-math:8102"],
        "chat": ["http://[::1]:8101"],
    }
    assert config.gateway == GatewaySection(host="0.0.0.0", port=9000, request_timeout_s=7)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--teacher NAME=http://HOST:PORT"),
        (["--teacher", "http://a:1"], "NAME=http://HOST:PORT"),
        (["--teacher", "math="], "NAME=http://HOST:PORT"),
        (["--teacher", "math=ftp://a:1"], "write http://HOST:PORT"),
        (["--teacher", "math=http://a"], "has no port"),
        (["--teacher", "math=http://a:99999"], "Port out of range"),
        (["--teacher", "math=http://a:0"], "has no port"),
        (["--teacher", "math=http://a%2e:1"], "neither a host name"),
        (["--teacher", "math=dns+https://a:1"], "write dns+http://NAME:PORT"),
        (["--teacher", "math=http://a:1", "--set", "gateway.registration_hosts=[10.0.0.1/8]"], "10.0.0.0/8"),
        (["--teacher", "math=http://a:1/v1"], "write http://a:1"),
        (["--teacher", "math=http://me:pw@a:1"], "write http://HOST:PORT"),
        (["--teacher", "Ma th=http://a:1"], "Ma th"),
        (["--teacher", "math=http://a:1", "--teacher", "chat=http://a:1"], "named twice"),
        (["--teacher", "math=http://a:1", "--set", "gateway.prot=1"], "did you mean 'port'?"),
        (["--teacher", "math=http://a:1", "--set", "trainer.lr=1"], "gateway.KEY=VALUE"),
        (["--teacher", "math=http://a:1", "--port", "0"], "gateway.port"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_slips(argv, words):
    with pytest.raises(ConfigError) as caught:
        load(argv)
    assert words in str(caught.value)


def test_the_gateway_imports_no_engine_and_no_numpy():
    code = (
        "import sys; import services.gateway.app, services.gateway.__main__; "
        "print({'torch', 'vllm', 'transformers', 'numpy', 'megatron', 'redis'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_clients_find_one_gateway_at_its_port_or_several_at_their_urls():
    assert GatewaySection(host="0.0.0.0", port=9000).addresses == ["http://127.0.0.1:9000"]
    urls = ["http://gateway-0:8100", "http://gateway-1:8100"]
    assert GatewaySection(urls=urls).addresses == urls
    with pytest.raises(ConfigError, match=r"gateway\.urls\.0"):
        load(["--teacher", "math=http://a:1", "--set", "gateway.urls=[gateway-0:8100]"])
