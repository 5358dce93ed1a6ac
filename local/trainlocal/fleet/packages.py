"""What a node's image needs and the machine may lack: cloud-init, and systemd, from the distribution's packages.

Nothing is installed: `apt-get download` fetches the packages into a folder of ours (as any user, with lists and
caches of our own) and they are unpacked there into a layer that is laid over the machine's /usr inside the nodes only.
The download happens in `prepare`, once; a run reads the folder and never the network.
"""

from __future__ import annotations

import compileall
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

HOST_SYSTEMD = Path("/usr/lib/systemd/systemd")


class PackagesMissing(Exception):
    """The packages of the node image are not there, and why. The text is a sentence for users."""


def packages_directory() -> Path:
    """Where the packages are kept: build/packages of the repository."""
    return Path(__file__).resolve().parents[3] / "build" / "packages"


def image_layer(directory: Path | None = None) -> Path:
    """The unpacked layer (a folder that holds `usr`). Raises PackagesMissing when `prepare` has not made it."""
    layer = (directory or packages_directory()) / f"layer-{sys.implementation.cache_tag}"
    if not layer.is_dir():
        raise PackagesMissing("cloud-init has not been unpacked yet; run: python -m trainlocal prepare")
    return layer


def prepare(directory: Path | None = None) -> Path:
    """Download and unpack the packages unless they are there already; return the layer.

    Raises PackagesMissing when the machine has no apt or the download fails.
    """
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
    archives = directory / "archives"
    if not archives.is_dir():
        _download(archives)
    layer = directory / f"layer-{sys.implementation.cache_tag}"
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


def _download(archives: Path) -> None:
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
    apt = ["apt-get", "--quiet=2", *(part for key, value in options.items() for part in ("-o", f"{key}={value}"))]
    try:
        _run([*apt, "update"], fetched)
        _run([*apt, "download", "cloud-init"], fetched)
        if not HOST_SYSTEMD.exists():
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


def _run(command: list[str], directory: Path) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PackagesMissing(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()[-500:]}")
