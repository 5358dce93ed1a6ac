"""The package manager: what is run on each operating system, locks that are waited for, and networks without a way out.

The files in os_release are those of the images of each operating system; answers of commands are theirs, shortened.
"""

from __future__ import annotations

import hashlib
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainrun.node import lustre
from trainrun.node.outcome import StepFailed
from trainrun.node.packages import LOCK_SECONDS, Apt, Dnf, Packages, Repository, packages_here, read_system, way_to
from trainrun.node.tools import PACKAGES, Tools

RELEASES = Path(__file__).with_name("os_release")
APT_LOCKED = "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 1234 (apt-get)"
RPM_LOCKED = "error: can't create transaction lock on /var/lib/rpm/.rpm.lock (Resource temporarily unavailable)"
AL2023_REPOSITORY = """\
[amazonlinux]
name=Amazon Linux 2023 repository
mirrorlist=https://al2023-repos-$awsregion-de612dc2.s3.dualstack.$awsregion.$awsdomain/core/mirrors/$releasever/$basearch/mirror.list
enabled=1

[amazonlinux-source]
name=Amazon Linux 2023 repository - Source packages
mirrorlist=https://elsewhere.example/mirror.list
enabled=0
"""
FSX_REPOSITORY = """\
[aws-fsx]
name=AWS FSx Packages - $basearch
baseurl=https://fsx-lustre-client-repo.s3.amazonaws.com/el/{major}/$basearch
enabled=1
gpgcheck=1
"""


class Commands:
    """Records what is run and answers as the programs do; `failures` come first from what installs."""

    def __init__(self, root: Path, *, failures: tuple[str, ...] = (), installed: tuple[str, ...] = ()) -> None:
        self.root = root
        self.ran: list[tuple[str, ...]] = []
        self.failures = list(failures)
        self.installed = set(installed)
        self.programs: set[str] = set()
        self.proxy = ""

    def __call__(self, *command: str, **_: Any) -> str:
        self.ran.append(command)
        words = command[3:] if command[0] == "env" and command[2].startswith("NEEDRESTART") else command
        words = words[1:] if words[0].startswith("LC_ALL") else words
        words = words[2:] if words[0] == "env" else words
        if "install" in words or "update" in words:
            if self.failures:
                raise StepFailed(self.failures.pop(0))
            if "install" in words:
                self.installed.update(word for word in words[words.index("install") + 1 :] if not word.startswith("-"))
        if command[0] == "dpkg-query":
            return "".join(f"ii  {name}\n" for name in sorted(self.installed))
        if command[:2] == ("rpm", "--query"):
            return "\n".join(sorted(self.installed))
        if command[0] == "apt-get" and "indextargets" in command:
            return "http://us-east-1.ec2.archive.ubuntu.com/ubuntu\nhttp://security.ubuntu.com/ubuntu\n"
        if command[0] == "apt-config":
            return f'Acquire "";\n{self.proxy}'
        if command[0] == "curl":
            text = FSX_REPOSITORY.format(major=command[-1].split("/")[-2]) if command[-1].endswith(".repo") else "a key"
            Path(command[command.index("--output") + 1]).write_text(text)
        if command[0] == "sh" and command[2].rpartition(" ")[2] not in self.programs:
            raise StepFailed("no such program")
        return ""

    def calls(self, program: str) -> list[tuple[str, ...]]:
        return [command for command in self.ran if program in command[:5]]


def image(root: Path, name: str) -> None:
    """An image's files, as far as they matter here."""
    program = "apt-get" if name.startswith("ubuntu") else "dnf"
    for file in ("etc/os-release", f"usr/bin/{program}"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(RELEASES / name, root / "etc/os-release")
    (root / "usr/bin" / program).touch()


def manager(root: Path, name: str, commands: Commands, **options: Any) -> Packages:
    image(root, name)
    kind = Apt if name.startswith("ubuntu") else Dnf
    return kind(read_system(root), root=root, run=commands, **{"sleep": lambda _: None, "way": lambda _: "", **options})


@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        ("ubuntu-22.04", Apt, ("ubuntu", "22.04", "jammy")),
        ("ubuntu-24.04", Apt, ("ubuntu", "24.04", "noble")),
        ("amazon-linux-2023", Dnf, ("amzn", "2023", "")),
        ("rhel-8", Dnf, ("rhel", "8.10", "")),
        ("rhel-9", Dnf, ("rhel", "9.6", "")),
    ],
)
def test_an_image_is_known_by_its_release_file(name, kind, found, tmp_path):
    image(tmp_path, name)
    packages = packages_here(root=tmp_path)
    assert isinstance(packages, kind)
    assert (packages.system.id, packages.system.version, packages.system.codename) == found


def test_an_image_with_neither_has_no_package_manager(tmp_path):
    assert packages_here(root=tmp_path) is None


def test_boot_02_every_apt_that_installs_waits_for_the_lock_and_upgrades_nothing(tmp_path):
    commands = Commands(tmp_path)
    assert manager(tmp_path, "ubuntu-24.04", commands).install("nfs-common", "mdadm") == ["nfs-common", "mdadm"]
    update, install = commands.calls("apt-get")[1:]
    for command in (update, install):
        assert command[:4] == ("env", "DEBIAN_FRONTEND=noninteractive", "NEEDRESTART_SUSPEND=1", "LC_ALL=C.UTF-8")
        assert f"DPkg::Lock::Timeout={LOCK_SECONDS}" in command
    assert update[-1] == "update"
    wanted = ("install", "--yes", "--no-install-recommends", "--no-upgrade", "--no-remove", "nfs-common", "mdadm")
    assert install[-len(wanted) :] == wanted
    text = " ".join(" ".join(command) for command in commands.ran)
    assert not [word for word in ("upgrade", "dist-upgrade", "full-upgrade", "--with-new-pkgs") if f" {word} " in f" {text} "]


def test_boot_02_dnf_waits_for_its_lock_and_installs_what_is_named(tmp_path):
    commands = Commands(tmp_path)
    assert manager(tmp_path, "amazon-linux-2023", commands).install("mdadm") == ["mdadm"]
    (install,) = commands.calls("dnf")
    assert "--setopt=exit_on_lock=False" in install and install[-2:] == ("install", "mdadm")
    assert not [word for word in install if word in ("upgrade", "update")]


@pytest.mark.parametrize(("name", "said"), [("ubuntu-22.04", APT_LOCKED), ("rhel-8", RPM_LOCKED)])
def test_boot_02_a_lock_that_a_command_does_not_wait_for_is_waited_for(name, said, tmp_path):
    waited: list[float] = []
    commands = Commands(tmp_path, failures=(said,) * 12)
    assert manager(tmp_path, name, commands, sleep=waited.append).install("mdadm") == ["mdadm"]
    assert waited == [5.0] * 12  # 60 seconds, as in the case


@pytest.mark.skipif(not shutil.which("apt-get") or not shutil.which("dpkg-deb"), reason="there is no apt here")
def test_boot_02_real_apt_waits_for_real_locks(tmp_path):
    """apt and dpkg as they are, in a folder of their own, with a package of our own; another process holds both locks."""
    root = tmp_path / "root"
    for folder in ("var/lib/dpkg", "var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "etc/apt/apt.conf.d"):
        (root / folder).mkdir(parents=True)
    (root / "var/lib/dpkg/status").touch()
    repository(tmp_path)
    (root / "etc/apt/sources.list").write_text(f"deb [trusted=yes] file:{tmp_path}/repository ./\n")
    options = [f"Dir={root}", f"Dir::State::status={root}/var/lib/dpkg/status", "APT::Sandbox::User=", "Dpkg::Use-Pty=0"]
    options += [f"Dpkg::Options::=--{option}" for option in (f"root={root}", "force-not-root", "force-bad-path")]
    locks = [root / "var/lib/apt/lists/lock", root / "var/lib/dpkg/lock-frontend"]
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, *map(str, locks)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout and holder.stdout.readline() == b"held\n"
        packages = Apt(
            read_system(),
            root=root,
            sleep=lambda _: time.sleep(0.3),
            options=[word for option in options for word in ("-o", option)],
        )
        started = time.monotonic()
        assert packages.install("of-our-own") == ["of-our-own"]
        assert time.monotonic() - started >= 3.0
    assert (root / "usr/share/of-our-own").read_text() == "here\n"
    assert packages.install("of-our-own") == []  # a second time nothing is done


HOLDER = """
import fcntl, sys, time
lists, dpkg = [open(name, "w") for name in sys.argv[1:]]
for lock in (lists, dpkg):
    fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(1.5)
fcntl.lockf(lists, fcntl.LOCK_UN)  # apt-get update asks for this one and does not wait; apt-get install waits for the other
time.sleep(2)
"""


def repository(folder: Path) -> None:
    """A package in a repository that is a folder."""
    package, target = folder / "package", folder / "repository"
    for one in (package / "DEBIAN", package / "usr/share", target):
        one.mkdir(parents=True)
    control = "Package: of-our-own\nVersion: 1.0\nArchitecture: all\nMaintainer: Nobody <nobody@example.com>\nDescription: One\n"
    (package / "DEBIAN/control").write_text(control)
    (package / "usr/share/of-our-own").write_text("here\n")
    deb = target / "of-our-own.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", package, deb], check=True, capture_output=True)
    digest = hashlib.sha256(deb.read_bytes()).hexdigest()
    (target / "Packages").write_text(f"{control}Filename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {digest}\n")


def test_what_is_installed_already_is_left_alone_and_nothing_is_asked_of_the_network(tmp_path):
    commands = Commands(tmp_path, installed=("mdadm",))
    packages = manager(tmp_path, "ubuntu-24.04", commands, way=lambda _: pytest.fail("the network was asked"))
    assert packages.install("mdadm") == []
    assert [command[0] for command in commands.ran] == ["dpkg-query"]


def test_a_mirror_that_fails_is_asked_again_but_not_for_ever(tmp_path):
    failures = ("apt-get failed with status 100: E: Failed to fetch http://mirror/x 503 Service Unavailable",) * 4
    waited: list[float] = []
    assert manager(tmp_path, "ubuntu-24.04", Commands(tmp_path, failures=failures), sleep=waited.append).install("mdadm")
    assert waited == [2.0, 8.0]
    with pytest.raises(StepFailed, match=r"mdadm cannot be installed on ubuntu 24.04: .*503"):
        manager(tmp_path, "ubuntu-24.04", Commands(tmp_path, failures=failures * 3)).install("mdadm")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ubuntu-24.04", "E: Unable to locate package lustre-client-modules-6.17.0-1099-aws"),
        ("rhel-9", "Error: Unable to find a match: kmod-lustre-client"),
    ],
)
def test_a_package_that_no_repository_has_is_asked_for_once(name, said, tmp_path):
    commands = Commands(tmp_path, failures=(said,) * 9)
    with pytest.raises(StepFailed, match="Use an image that has it"):
        manager(tmp_path, name, commands).install("x")
    assert len(commands.failures) == (8 if name.startswith("rhel") else 7)  # apt has asked for the lists before


def test_a_repository_that_is_broken_is_not_all_of_them(tmp_path):
    commands = Commands(tmp_path, failures=("E: The repository 'https://elsewhere.example x Release' is not signed.",))
    assert manager(tmp_path, "ubuntu-22.04", commands).install("mdadm") == ["mdadm"]
    commands = Commands(tmp_path, failures=("E: mirror.example is not signed.", "E: Unable to locate package nfs-common"))
    with pytest.raises(StepFailed, match=r"Unable to locate package nfs-common Before it: .* is not signed"):
        manager(tmp_path, "ubuntu-22.04", commands).install("nfs-common")


def test_an_isolated_network_is_told_at_once(tmp_path):
    commands = Commands(tmp_path)
    packages = manager(tmp_path, "ubuntu-24.04", commands, way=lambda url: f"{url} does not answer")
    with pytest.raises(StepFailed, match=r"There is no way to the package repository: .*An isolated network has none"):
        packages.install("mdadm")
    assert not [command for command in commands.ran if "update" in command]


@pytest.mark.parametrize("name", ["ubuntu-24.04", "amazon-linux-2023"])
def test_behind_a_proxy_of_the_package_manager_the_way_is_its_own_business(name, tmp_path):
    commands = Commands(tmp_path)
    packages = manager(tmp_path, name, commands, way=lambda _: pytest.fail("the network was asked"))
    commands.proxy = 'Acquire::http::Proxy "http://proxy:3128";\n'
    (tmp_path / "etc/dnf").mkdir()
    (tmp_path / "etc/dnf/dnf.conf").write_text("[main]\nproxy=http://proxy:3128\n")
    (tmp_path / "etc/yum.repos.d").mkdir()
    (tmp_path / "etc/yum.repos.d/a.repo").write_text("[a]\nbaseurl=https://mirror.example/x\n")
    assert packages.install("mdadm") == ["mdadm"]


def test_one_repository_out_of_reach_is_no_isolated_network(tmp_path):
    packages = manager(tmp_path, "ubuntu-24.04", Commands(tmp_path), way=lambda url: "no" if "security" in url else "")
    assert packages.install("mdadm") == ["mdadm"]


def test_repositories_of_dnf_are_found_without_a_network(tmp_path):
    image(tmp_path, "amazon-linux-2023")
    for name, text in (("awsregion", "eu-west-1"), ("awsdomain", "amazonaws.com")):
        (tmp_path / "etc/dnf/vars").mkdir(parents=True, exist_ok=True)
        (tmp_path / "etc/dnf/vars" / name).write_text(f"{text}\n")
    (tmp_path / "etc/yum.repos.d").mkdir()
    (tmp_path / "etc/yum.repos.d/amazonlinux.repo").write_text(AL2023_REPOSITORY)
    (tmp_path / "etc/yum.repos.d/rhui.repo").write_text("[rhui]\nmirrorlist=https://rhui.REGION.aws.ce.redhat.com/x\n")
    asked: list[str] = []

    def way(url: str) -> str:
        asked.append(url)
        return "it does not answer"

    with pytest.raises(StepFailed, match="no way to the package repository"):
        Dnf(read_system(tmp_path), root=tmp_path, run=Commands(tmp_path), way=way).install("mdadm")
    assert asked == ["https://al2023-repos-eu-west-1-de612dc2.s3.dualstack.eu-west-1.amazonaws.com"]


def test_a_way_is_looked_for_by_a_connection(monkeypatch, free_port):
    monkeypatch.setattr("urllib.request.getproxies", dict)
    reason = way_to(f"http://127.0.0.1:{free_port}/ubuntu")
    assert reason.startswith(f"127.0.0.1 (127.0.0.1) does not answer at port {free_port}")
    assert way_to("file:/srv/repository") == ""
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"http": "http://proxy:3128"})
    assert way_to(f"http://127.0.0.1:{free_port}/ubuntu") == ""


LUSTRE = "https://fsx-lustre-client-repo.s3.amazonaws.com"


@pytest.mark.parametrize(
    ("name", "kernel", "wanted"),
    [
        ("ubuntu-22.04", "6.8.0-1021-aws", ["lustre-client-modules-6.8.0-1021-aws"]),
        ("ubuntu-24.04", "6.17.0-1009-aws", ["lustre-client-modules-6.17.0-1009-aws"]),
        ("amazon-linux-2023", "6.12.37-61.105.amzn2023.x86_64", ["lustre-client"]),
        ("rhel-8", "4.18.0-553.22.1.el8_10.x86_64", ["kmod-lustre-client", "lustre-client"]),
        ("rhel-9", "5.14.0-570.12.1.el9_6.x86_64", ["kmod-lustre-client", "lustre-client"]),
    ],
)
def test_the_lustre_client_of_each_operating_system(name, kernel, wanted, tmp_path):
    commands = Commands(tmp_path, installed=("linux-aws",))
    packages = manager(tmp_path, name, commands)
    assert lustre.install_client(packages, kernel=kernel) == f", {' and '.join(wanted)} installed"
    assert set(wanted) <= commands.installed
    fetched = [command[-1].removeprefix("https://") for command in commands.calls("curl")]
    keys = "fsx-lustre-client-repo-public-keys.s3.amazonaws.com"
    if name.startswith("ubuntu"):
        assert fetched == [f"{keys}/fsx-ubuntu-public-key.asc"]
        line = (tmp_path / "etc/apt/sources.list.d/fsx-lustre-client.list").read_text()
        key, codename = "/usr/share/keyrings/fsx-lustre-client.asc", read_system(tmp_path).codename
        assert line == f"deb [signed-by={key}] {LUSTRE}/ubuntu {codename} main\n"
        assert (tmp_path / key.lstrip("/")).read_text() == "a key"
        assert ("apt-mark", "hold", *wanted) in commands.ran
    elif name.startswith("rhel"):
        major = name[-1]
        assert fetched == [f"{keys}/fsx-rpm-public-key.asc", f"{LUSTRE[8:]}/el/{major}/fsx-lustre-client.repo"]
        assert next(command[:2] for command in commands.calls("rpm")) == ("rpm", "--import")
        folder = {"8": "/el/8/", "9": "/el/9.6/"}[major]  # 4.18.0-553 is the newest of RHEL 8, for which nothing is changed
        assert f"baseurl={LUSTRE}{folder}$basearch" in (tmp_path / "etc/yum.repos.d/aws-fsx.repo").read_text()
    else:
        assert fetched == []


@pytest.mark.parametrize(
    ("kernel", "release"),
    [("4.18.0-513.24.1.el8_9.x86_64", "8.9"), ("4.18.0-305.el8.x86_64", "8.4"), ("4.18.0-553.el8_10.x86_64", "")],
)
def test_the_release_of_the_lustre_client_goes_by_the_kernel(kernel, release, tmp_path):
    lustre.install_client(manager(tmp_path, "rhel-8", Commands(tmp_path)), kernel=kernel)
    text = (tmp_path / "etc/yum.repos.d/aws-fsx.repo").read_text()
    assert f"/el/{release or '8'}/$basearch" in text


def test_without_a_way_to_it_the_lustre_client_fails_fast_and_names_the_kernel(tmp_path):
    packages = manager(tmp_path, "amazon-linux-2023", Commands(tmp_path), way=lambda _: "it does not answer")
    (tmp_path / "etc/yum.repos.d").mkdir()
    (tmp_path / "etc/yum.repos.d/a.repo").write_text("[a]\nbaseurl=https://mirror.example/x\n")
    with pytest.raises(StepFailed, match=r"lustre-client cannot be installed on amzn 2023: .* this is 6\.12\."):
        lustre.install_client(packages, kernel="6.12.37")


def test_an_operating_system_without_a_lustre_client_is_told(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text('ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\n')
    with pytest.raises(StepFailed, match="AWS offers no Lustre client for debian 12"):
        lustre.install_client(Apt(read_system(tmp_path), root=tmp_path, run=Commands(tmp_path)), kernel="6.1")


def test_a_key_that_cannot_be_fetched_leaves_no_half_repository(tmp_path):
    packages = manager(tmp_path, "ubuntu-24.04", Commands(tmp_path))
    packages._run = lambda *_, **__: (_ for _ in ()).throw(StepFailed("curl failed with status 22"))
    with pytest.raises(StepFailed, match="curl failed"):
        packages.add(Repository(name="n", key="https://k/k.asc", source="https://r r main", url="https://r"))
    assert not (tmp_path / "etc/apt/sources.list.d").exists()


@pytest.mark.parametrize("name", ["ubuntu-24.04", "rhel-9"])
@pytest.mark.parametrize("program", PACKAGES)
def test_tools_come_from_the_package_of_the_distribution(program, name, tmp_path):
    commands = Commands(tmp_path)
    tools = Tools(run=commands, packages=manager(tmp_path, name, commands))
    package = PACKAGES[program][not name.startswith("ubuntu")]
    if package:
        assert tools.need(program) == f", {package} installed"
        assert commands.installed == {package}
    else:
        with pytest.raises(StepFailed, match=f"has no {program}, and ubuntu 24.04 has no package of it"):
            tools.need(program)
    commands.programs.add(program)
    assert tools.need(program) == ""


def test_a_node_that_may_install_nothing_says_what_is_missing(tmp_path):
    with pytest.raises(StepFailed, match="The image has no mdadm"):
        Tools(run=Commands(tmp_path), packages=None).need("mdadm")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems answer where this one is silent")
def test_a_host_that_is_silent_is_given_up_in_time(monkeypatch):
    """As in an isolated network, which drops packets: here, because the server's queue is full."""
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("trainrun.node.packages.WAY_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, socket.create_connection(server.getsockname()):
        started = time.monotonic()
        assert "does not answer" in way_to(f"http://127.0.0.1:{server.getsockname()[1]}/x")
        assert time.monotonic() - started < 2.0


def test_addresses_that_have_no_way_hide_no_others(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        dead = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (f"100::{number}", port, 0, 0)) for number in (1, 2, 3)]
        alive = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
        monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [*dead, alive])
        monkeypatch.setattr("urllib.request.getproxies", dict)
        assert way_to(f"http://mirror.example:{port}/x") == ""


def test_what_a_node_can_do_without_is_tried_once(tmp_path):
    commands = Commands(tmp_path, failures=("E: Unable to locate package numactl",) * 2)
    tools = Tools(run=commands, packages=manager(tmp_path, "ubuntu-24.04", commands), notes=tmp_path)
    for _ in range(2):
        with pytest.raises(StepFailed, match=r"numactl cannot be installed on ubuntu 24\.04"):
            tools.want("numactl")
    assert len(commands.calls("apt-get")) == 3  # where the repositories are, their lists, and the package
    commands.programs.add("numactl")  # somebody has installed it
    assert tools.want("numactl") == ""
