"""Helpers of the checks' tests. What programs say here was written after their documentation and samples of it (``said/``): there
was no GPU, no Neuron device and no EFA interface to record it from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainrun.spec import ClusterSpec

SAID = Path(__file__).with_name("said")


def cluster_of(instance_type: str = "p5.48xlarge", **fields: object) -> ClusterSpec:
    return ClusterSpec(name="c", nodes_min=1, nodes_desired=1, nodes_max=1, instance_type=instance_type, **fields)  # type: ignore[arg-type]


def said(name: str) -> str:
    return (SAID / name).read_text(encoding="utf-8")


def gpus(count: int) -> str:
    """What nvidia-smi -L prints."""
    return "\n".join(f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-{i}{i}{i})" for i in range(count))


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """program(name, text): a command of that name, first on PATH, that prints the text whatever it is asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def make(name: str, text: str) -> Path:
        script = folder / name
        script.write_text(text if text.startswith("#!") else f"#!/bin/sh\ncat <<'EOF'\n{text}\nEOF\n")
        script.chmod(0o755)
        return script

    return make
