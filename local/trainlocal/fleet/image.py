"""The root file system of a node: the machine's own /usr, read through an overlay, and all else fresh.

Nothing of it lies on a disk: it is built in a tmpfs inside the node's mount namespace and goes with it.
The part of the deep learning image is played by the environment that runs this program, shown at /opt/pytorch.
"""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from trainlocal.fleet import namespaces as ns
from trainlocal.fleet import storage

PYTORCH = "/opt/pytorch"
SMALL_INIT = "/usr/lib/trainlocal/init.py"
NAME_SERVER = "169.254.169.253"

# What programs of /usr expect of /etc; the rest of the machine's /etc is none of a node's business.
_ETC_COPIED = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "os-release", "protocols", "services", "mime.types")
_ETC_SHARED = ("ssl", "pki", "ca-certificates")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_FOLDERS = ("home", "media", "mnt", "opt", "proc", "run", "srv", "sys", "var/cache", "var/lib", "var/log", "var/spool")

# systemd starts what is listed here, and nothing that the machine's own packages would like to have started.
_WANTED = {
    "sysinit.target": ("systemd-journald.service", "systemd-tmpfiles-setup.service"),
    "sockets.target": ("systemd-journald.socket", "systemd-journald-dev-log.socket"),
}
_GENERATOR = "cloud-init-generator"
# Real clients would wait a minute for an answer; without any, cloud-init goes on to the network that is there already.
_DHCP_CLIENTS = ("dhclient", "dhcpcd", "udhcpc")

_CLOUD_CONFIG = """\
# What the node image asks of cloud-init: the user data, and nothing that would need a disk, a package or a login.
datasource_list: [Ec2]
datasource:
  Ec2:
    metadata_urls: ["http://169.254.169.254"]
network: {config: disabled}
syslog_fix_perms: "root:root"
output: {all: "| tee -a /var/log/cloud-init-output.log"}
cloud_init_modules: [bootcmd, write-files]
cloud_config_modules: [runcmd]
cloud_final_modules: [write-files-deferred, scripts-per-once, scripts-per-boot, scripts-per-instance, scripts-user, final-message]
"""
VAR_LIB_BYTES = 1280 * 2**20
"""Size of a node's /var/lib, where programs keep what outlives them."""
_CLOUD_LOGGING = """\
# Everything into the log, warnings alone onto the console, as in the packages of the distributions.
_log:
- &base |
  [loggers]
  keys=root,cloudinit
  [handlers]
  keys=console,file
  [formatters]
  keys=plain
  [logger_root]
  level=DEBUG
  handlers=console,file
  [logger_cloudinit]
  level=DEBUG
  handlers=
  qualname=cloudinit
  [handler_console]
  class=StreamHandler
  level=WARNING
  formatter=plain
  args=(sys.stderr,)
  [handler_file]
  class=FileHandler
  level=DEBUG
  formatter=plain
  args=('/var/log/cloud-init.log', 'a')
  [formatter_plain]
  format=%(asctime)s - %(filename)s[%(levelname)s]: %(message)s
log_cfgs: [[*base]]
"""


def build(
    root: Path,
    *,
    layer: Path,
    instance_id: str,
    logs: Path,
    environment: dict[str, str],
    volumes: Sequence[str],
    shared: Path,
) -> Path:
    """Build the root file system in a new tmpfs upon the empty folder `root`; return the folder to pivot to.

    `layer` is the unpacked packages (`packages.image_layer`), `logs` the folder outside that is shown at /var/log, `shared`
    the one that stands in for shared file systems, `volumes` the ids of the EBS volumes.
    """
    ns.mount("tmpfs", root, "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, "mode=755")
    new, shims = root / "root", root / "shims"
    for name in _FOLDERS:
        (new / name).mkdir(parents=True)
    # A disk of its own, so that one that is full fills neither the machine's memory nor the rest of the node.
    (new / "var/lib").mkdir(parents=True, exist_ok=True)
    ns.mount("tmpfs", new / "var/lib", "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, f"mode=755,size={VAR_LIB_BYTES}")
    for name, mode in (("root", 0o700), ("tmp", 0o1777), ("var/tmp", 0o1777)):
        (new / name).mkdir()
        (new / name).chmod(mode)
    (new / "var/run").symlink_to("/run")
    _write_shims(shims, instance_id)
    storage.install(shims, f"{PYTORCH}/bin/python", volumes)
    _lay_usr(root, new, [shims, layer])
    _hide_the_machines_services(root, new)
    _write_etc(new / "etc", instance_id, environment)
    _want_units(new)
    _make_devices(new / "dev")
    for number in range(len(volumes)):
        (new / storage.device(number).lstrip("/")).touch()
    ns.bind(shared, storage.folders(new))
    ns.bind(sys.prefix, new / PYTORCH.lstrip("/"), read_only=True)
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        ns.bind(sys.base_prefix, new / sys.base_prefix.lstrip("/"), read_only=True)
    ns.bind(logs, new / "var/log")
    ns.mount(str(new), new, flags=ns.MS_BIND | ns.MS_REC)  # a root has to be a mount point
    return new


def _write_shims(shims: Path, instance_id: str) -> None:
    """Answers in place of hardware: this is EC2 (cloud-init speaks IMDSv2 only there), and no container."""
    dmi_uuid = str(uuid.UUID(f"ec2{instance_id[2:].ljust(29, '0')[:29]}"))
    programs = {
        "usr/bin/systemd-detect-virt": '#!/bin/sh\ncase "$*" in *-c*) exit 1;; esac\necho kvm\n',
        "usr/sbin/dmidecode": (
            "#!/bin/sh\n"
            'case "$*" in\n'
            f"*system-uuid*|*system-serial-number*) echo {dmi_uuid};;\n"
            '*manufacturer*|*vendor*|*asset-tag*) echo "Amazon EC2";;\n'
            "esac\n"
        ),
    }
    for name, text in programs.items():
        program = shims / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    small_init = shims / SMALL_INIT.lstrip("/")
    small_init.parent.mkdir(parents=True)
    shutil.copy2(Path(__file__).with_name("init.py"), small_init)
    dmi = shims / "dmi"
    dmi.mkdir()
    facts = {"product_uuid": dmi_uuid, "product_serial": dmi_uuid, "sys_vendor": "Amazon EC2", "chassis_asset_tag": "Amazon EC2"}
    for name, value in facts.items():
        (dmi / name).write_text(value + "\n")
    # An ordinary user's namespace cannot write where the machine's root owns the folder: these are ours.
    for name in ("bin", "sbin", "lib", "local/bin", "local/sbin", "local/lib", "lib/systemd/system"):
        (shims / "usr" / name).mkdir(parents=True, exist_ok=True)


def _lay_usr(root: Path, new: Path, layers: list[Path]) -> None:
    lower = ":".join(str(folder / "usr") for folder in layers if (folder / "usr").is_dir())
    (new / "usr").mkdir()
    for name in ("upper", "work"):
        (root / name).mkdir()
    ns.mount("overlay", new / "usr", "overlay", options=f"lowerdir={lower}:/usr,upperdir={root}/upper,workdir={root}/work")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        host = Path("/") / name
        if host.is_symlink():
            (new / name).symlink_to(host.readlink())
        elif host.is_dir():
            ns.bind(host, new / name, read_only=True)


def _hide_the_machines_services(root: Path, new: Path) -> None:
    nothing, empty_file = root / "nothing", root / "empty"
    nothing.mkdir()
    empty_file.touch()
    units = new / "usr/lib/systemd/system"
    for folder in units.glob("*.wants"):
        ns.bind(nothing, folder)
    generators = units.parent / "system-generators"
    if generators.is_dir():
        ours = root / "generators"
        ours.mkdir()
        if (generators / _GENERATOR).exists():
            shutil.copy2(generators / _GENERATOR, ours / _GENERATOR)
        ns.bind(ours, generators)
    for name in _DHCP_CLIENTS:
        for client in (new / "usr/bin" / name, new / "usr/sbin" / name):
            if client.exists():
                ns.bind(empty_file, client)


def _want_units(new: Path) -> None:
    """What `systemctl enable` would do for the units of `_WANTED` and those that ask to be part of cloud-init."""
    packaged, enabled = new / "usr/lib/systemd/system", new / "etc/systemd/system"
    of_cloud_init = [unit.name for unit in packaged.glob("cloud-*.service") if "WantedBy=cloud-init.target" in unit.read_text()]
    for target, units in {**_WANTED, "cloud-init.target": of_cloud_init}.items():
        wants = enabled / f"{target}.wants"
        wants.mkdir(parents=True)
        for unit in units:
            (wants / unit).symlink_to(f"/usr/lib/systemd/system/{unit}")
    (enabled / "default.target").symlink_to("/usr/lib/systemd/system/multi-user.target")


def _write_etc(etc: Path, instance_id: str, environment: dict[str, str]) -> None:
    etc.mkdir()
    for name in _ETC_COPIED:
        source = Path("/etc") / name
        if source.is_dir():
            shutil.copytree(source, etc / name, symlinks=True)
        elif source.exists():
            shutil.copy2(source, etc / name)
    for name in _ETC_SHARED:
        if Path("/etc", name).is_dir():
            ns.bind(Path("/etc", name), etc / name, read_only=True)
    (etc / "localtime").symlink_to("/usr/share/zoneinfo/Etc/UTC")
    assignments = " ".join(f'"{name}={value}"' for name, value in environment.items())
    files = {
        "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        # No group "adm": cloud-init would change to it, and an ordinary user's namespace has no group but its own.
        "group": "root:x:0:\ntty:x:5:\nutmp:x:43:\nnogroup:x:65534:\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        "hosts": "127.0.0.1 localhost\n",
        "resolv.conf": f"nameserver {NAME_SERVER}\n",
        "fstab": "",
        # A known machine is no first boot, at which systemd would enable whatever the machine's packages bring along.
        "machine-id": f"{uuid.uuid5(uuid.NAMESPACE_DNS, instance_id).hex}\n",
        "environment": "".join(f"{name}={value}\n" for name, value in environment.items()),
        "cloud/cloud.cfg": _CLOUD_CONFIG,
        "cloud/cloud.cfg.d/05_logging.cfg": _CLOUD_LOGGING,
        "systemd/system.conf.d/trainlocal.conf": f"[Manager]\nDefaultEnvironment={assignments}\nDefaultTimeoutStopSec=10s\n",
        "systemd/journald.conf.d/trainlocal.conf": "[Journal]\nStorage=volatile\nRuntimeMaxUse=8M\nReadKMsg=no\nAudit=no\n",
    }
    for place, text in files.items():
        (etc / place).parent.mkdir(parents=True, exist_ok=True)
        (etc / place).write_text(text)


def _make_devices(dev: Path) -> None:
    dev.mkdir()
    ns.mount("tmpfs", dev, "tmpfs", ns.MS_NOSUID, "mode=755,size=1m")
    for name in _DEVICES:
        if Path("/dev", name).is_char_device():
            ns.bind(f"/dev/{name}", dev / name)
    for name, target in (
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
        ("ptmx", "pts/ptmx"),
    ):
        (dev / name).symlink_to(target)
    for name in ("pts", "shm", "mqueue"):
        (dev / name).mkdir()
    ns.mount("devpts", dev / "pts", "devpts", ns.MS_NOSUID | ns.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    ns.mount("tmpfs", dev / "shm", "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, "mode=1777")


def mount_kernel_interfaces(new: Path, *, with_cgroups: bool) -> None:
    """Mount /proc, /sys and, for systemd, the control groups. To be called by PID 1 of the node."""
    ns.mount("proc", new / "proc", "proc", ns.MS_NOSUID | ns.MS_NODEV | ns.MS_NOEXEC)
    ns.mount("sysfs", new / "sys", "sysfs", ns.MS_NOSUID | ns.MS_NODEV | ns.MS_NOEXEC)
    if with_cgroups:
        ns.mount("cgroup2", new / "sys/fs/cgroup", "cgroup2", ns.MS_NOSUID | ns.MS_NODEV | ns.MS_NOEXEC)
    machine_dmi = new / "sys/devices/virtual/dmi/id"
    if machine_dmi.is_dir():
        ns.bind(new.parent / "shims/dmi", machine_dmi)
