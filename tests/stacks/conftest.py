"""What the tests of the reference stacks share: the app of the repository, run as the cdk CLI runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RunApp = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_app() -> RunApp:
    """Starts app.py with settings, as `cdk synth -c name=value ...` does, and leaves the assembly in a folder."""

    def start(outdir: Path, *, hash_seed: int = 0, **settings: str) -> subprocess.Popen[str]:
        context = json.loads((ROOT / "cdk.json").read_text())["context"]
        return subprocess.Popen(
            [sys.executable, "app.py"],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONHASHSEED": str(hash_seed),
                "CDK_OUTDIR": str(outdir),
                "CDK_CONTEXT_JSON": json.dumps({**context, "aws:cdk:enable-path-metadata": True, **settings}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start
