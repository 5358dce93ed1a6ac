"""What a node's image needs and the machine may lack: cloud-init, and systemd, from the distribution's packages.

Nothing is installed: `apt-get download` fetches the packages into a folder of ours (as any user, with lists and
caches of our own) and they are unpacked there into a layer that is laid over the machine's /usr inside the nodes only.
The download happens in `prepare`, once; a run reads the folder and never the network.
"""

from __future__ import annotations

import compileall
import os
import py_compile
import re
import shutil
import subprocess
import sys
from pathlib import Path

HOST_SYSTEMD = Path("/usr/lib/systemd/systemd")
RELEASE = "TRAINLOCAL_DEBIAN"
"""This variable names a Debian release ("trixie") whose cloud-init nodes boot with, instead of that of the machine's own."""
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class PackagesMissing(Exception):
    """The packages of the node image are not there, and why. The text is a sentence for users."""


def packages_directory() -> Path:
    """Where the packages are kept: build/packages of the repository."""
    return Path(__file__).resolve().parents[3] / "build" / "packages"


def chosen_release() -> str:
    """The Debian release of nodes' cloud-init, empty for the machine's own.

    Raises:
        PackagesMissing: what the variable says is no name of one.
    """
    release = os.environ.get(RELEASE, "")
    if not re.fullmatch("[a-z]*", release):
        raise PackagesMissing(f"{RELEASE} is {release!r}; give the name of a Debian release, such as trixie")
    return release


def image_layer(directory: Path | None = None) -> Path:
    """The unpacked layer (a folder that holds `usr`). Raises PackagesMissing when `prepare` has not made it."""
    release = chosen_release()
    layer = (directory or packages_directory()) / _of_release(f"layer-{sys.implementation.cache_tag}", release)
    if not layer.is_dir():
        variable = f"{RELEASE}={release} " if release else ""
        raise PackagesMissing(f"cloud-init has not been unpacked yet; run: {variable}python -m trainlocal prepare")
    return layer


def _of_release(name: str, release: str) -> str:
    return f"{name}-{release}" if release else name


def prepare(directory: Path | None = None) -> Path:
    """Download and unpack the packages unless they are there already; return the layer.

    Raises PackagesMissing when the machine has no apt or the download fails.
    """
    release = chosen_release()
    directory = directory or packages_directory()
    try:
        return image_layer(directory)
    except PackagesMissing:
        pass
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise PackagesMissing(
                f"there is no {tool} here: nodes that boot need a Debian or Ubuntu machine (cloud-init's package)"
            )
    archives = directory / _of_release("archives", release)
    if not archives.is_dir():
        _download(archives, release)
    layer = directory / _of_release(f"layer-{sys.implementation.cache_tag}", release)
    unfinished = directory / f"unfinished-{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        _unpack(archives, unfinished)
        _adopt_cloud_init(unfinished)
        if not layer.exists():  # another `prepare` may have been quicker
            unfinished.rename(layer)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return layer


def _download(archives: Path, release: str) -> None:
    """Fetch the packages into `archives`, which comes into being whole or not at all."""
    apt_folder = archives.with_name(f"apt-{os.getpid()}")
    lists, cache, fetched = apt_folder / "lists", apt_folder / "cache", apt_folder / "cache" / "archives"
    for folder in (lists / "partial", fetched / "partial"):
        folder.mkdir(parents=True, exist_ok=True)
    options = {
        "Dir::State::Lists": lists,
        "Dir::Cache": cache,
        "APT::Sandbox::User": "root" if os.geteuid() == 0 else "",
        "Debug::NoLocking": "1",
    }
    if release:
        sources = apt_folder / "sources.list"
        sources.write_text(f"deb [signed-by={_KEYRING}] http://deb.debian.org/debian {release} main\n")
        options |= {"Dir::Etc::SourceList": sources, "Dir::Etc::SourceParts": "-"}
    apt = ["apt-get", "--quiet=2", *(part for key, value in options.items() for part in ("-o", f"{key}={value}"))]
    try:
        _run([*apt, "update"], fetched)
        _run([*apt, "download", "cloud-init"], fetched)
        if not HOST_SYSTEMD.exists() and not release:  # another release's would want libraries that this machine has not
            # Only what the machine lacks is fetched, because apt still reads the machine's own list of installed packages.
            _run([*apt, "install", "--download-only", "--yes", "--no-install-recommends", "systemd"], fetched)
        if not archives.exists():
            fetched.rename(archives)
    finally:
        shutil.rmtree(apt_folder, ignore_errors=True)


def _unpack(archives: Path, root: Path) -> None:
    root.mkdir(parents=True)
    for archive in sorted(archives.glob("*.deb")):
        _run(["dpkg-deb", "-x", str(archive), str(root)], archives)
    # On today's distributions /lib, /bin and /sbin are links into /usr; packages may still name them.
    for name in ("bin", "sbin", "lib", "lib64"):
        if (root / name).is_dir():
            shutil.copytree(root / name, root / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(root / name)
    for name in ("etc", "var", "usr/share/doc", "usr/share/man", "usr/share/locale"):
        shutil.rmtree(root / name, ignore_errors=True)


def _adopt_cloud_init(root: Path) -> None:
    """Have cloud-init run by the Python of the nodes' image, which has the libraries that it imports."""
    packaged = root / "usr/lib/python3/dist-packages"
    private = root / "usr/lib/cloud-init/python"
    private.mkdir(parents=True)
    (packaged / "cloudinit").rename(private / "cloudinit")
    shutil.rmtree(root / "usr/lib/python3", ignore_errors=True)
    # Compiled beforehand, and trusted: the layer is read-only in the nodes.
    compileall.compile_dir(private, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    command = root / "usr/bin/cloud-init"
    command.write_text(
        "#!/opt/pytorch/bin/python\n"
        "import sys\n"
        "sys.path.insert(0, '/usr/lib/cloud-init/python')\n"
        "sys.argv[0] = 'cloud-init'\n"
        "from cloudinit.cmd.main import main\n"
        "sys.exit(main())\n"
    )
    command.chmod(0o755)
    if (root / "usr/lib/systemd/system/cloud-init-network.service").exists() and shutil.which("nc") is None:
        _write_netcat(root / "usr/bin/nc")


def _write_netcat(program: Path) -> None:
    """What cloud-init's units since 24.3 start a stage by: `nc -Uu -W1 SERVER -s CLIENT`, one datagram each way."""
    program.write_text(
        "#!/opt/pytorch/bin/python -I\n"
        "import socket, sys\n"
        "options, one, server, flag, client = sys.argv[1:]\n"
        "assert (options, one, flag) == ('-Uu', '-W1', '-s'), sys.argv\n"
        "ours = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "ours.bind(client)\n"
        "ours.connect(server)\n"
        "ours.send(sys.stdin.buffer.read())\n"
        "sys.stdout.buffer.write(ours.recv(65536))\n"
    )
    program.chmod(0o755)


def _run(command: list[str], directory: Path) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PackagesMissing(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()[-500:]}")
