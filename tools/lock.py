"""Make requirements.txt from pyproject.toml: one lock for all extras and every Python from 3.10 on. Run by `make lock`.

torch is kept out of the resolution and pinned by hand: its metadata on a package index asks for the CUDA
libraries, which no test or demo here needs. What the CPU build itself imports is resolved in its place.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
NEEDED_BY_TORCH = (
    '"filelock", "typing-extensions>=4.10", "setuptools>=77.0.3", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5"'
)
HEADER = f"""# The lock: made by `make lock` from pyproject.toml (all extras, every Python from 3.10 on).
# torch is installed first and by itself (tools/setup.py), so that nothing here can pull another build of it.
{TORCH}
"""


def main() -> int:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "uv"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "pyproject.toml"
        text = (ROOT / "pyproject.toml").read_text()
        assert f'"{TORCH}"' in text
        project.write_text(text.replace(f'"{TORCH}"', NEEDED_BY_TORCH))
        (project.parent / "README.md").touch()
        # packages that ask for torch must not bring it in again
        overrides = project.parent / "overrides.txt"
        overrides.write_text("torch ; sys_platform == 'never'\n")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--universal", "--python-version=3.10", "--extra=dev"]
        command += [f"--override={overrides}", "--no-emit-package=torch", "--no-header", "--no-annotate", "--quiet", str(project)]
        environment = {**os.environ, "DS_BUILD_OPS": "0"}  # DeepSpeed tells its dependencies without compiling anything
        lock = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    (ROOT / "requirements.txt").write_text(HEADER + re.sub(r"(?m)^traincluster.*\n", "", lock))
    return 0


if __name__ == "__main__":
    sys.exit(main())
