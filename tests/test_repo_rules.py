"""House rules that a reader relies on, checked on the source itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
SOURCES = [
    file
    for room in ("shared", "services", "opd", "benchmarks")
    for file in sorted((REPO / room).rglob("*.py"))
    if "build" not in file.parts
]


def _imports(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(REPO)))
def test_engines_stay_behind_their_seams(file: Path) -> None:
    names = _imports(file)
    if not file.name.startswith("vllm_"):
        assert "vllm" not in names
    if not file.name.startswith("megatron_"):
        assert "megatron" not in names
    assert not names & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(REPO)))
def test_files_stay_small_and_typed(file: Path) -> None:
    text = file.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 80, f"{node.name} has {length} lines"
            assert node.returns is not None or node.name == "__init__", f"{node.name} lacks a return type"
    assert "trust_remote_code=True" not in text


def test_services_is_a_namespace_package() -> None:
    assert not (REPO / "services" / "__init__.py").exists()


def test_every_dependency_of_the_lock_is_pinned() -> None:
    lines = (REPO / "requirements" / "cpu.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins and all(re.fullmatch(r"[A-Za-z0-9._-]+==[^ ]+", line) for line in pins)
    assert not {line.split("==")[0] for line in pins} & {"torchvision", "torchaudio", "torchcodec", "vllm"}


def test_gateway_starts_without_torch_and_vllm() -> None:
    code = (
        "import sys, services.gateway.app, services.gateway.__main__; "
        "print(sorted({'torch', 'vllm', 'transformers', 'megatron'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, check=True)
    assert run.stdout.strip() == "[]"
