"""The image's package manager, apt or dnf, for the few programs that an image may lack.

It waits for the locks of others (field case BOOT-02), installs what is named and upgrades nothing, asks a mirror that fails
again, and says early and clearly when there is no way to any repository, as in an isolated network.
"""

from __future__ import annotations

import abc
import re
import shlex
import socket
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from trainrun.node.commands import Run
from trainrun.node.commands import run as run_command
from trainrun.node.outcome import StepFailed

LOCK_SECONDS = 300
"""How long another process that installs is waited for."""
LOCK_PAUSE = 5.0
INSTALL_SECONDS = 900.0
"""For one call of the package manager: the wait for its lock, the download and the installation."""
PAUSES = (2.0, 8.0)
"""Waits before a repository that failed is asked again."""
WAY_SECONDS = 4.0
"""For a connection to a repository: in an isolated network packets are dropped without an answer."""

_LOCKED = re.compile(r"\block\b|is another process using|Waiting for process with pid", re.IGNORECASE)
_UNKNOWN = re.compile(
    r"Unable to locate package|has no installation candidate|held broken packages|unmet dependencies"
    r"|No match for argument|Unable to find a match|nothing provides|No package \S+ available"
)
"""What no second attempt changes."""

Way = Callable[[str], str]
"""Tells why there is no way to a URL; "" when there is one."""


@dataclass(frozen=True, kw_only=True)
class System:
    """The operating system, as /etc/os-release has it."""

    id: str = ""
    """"ubuntu", "amzn", "rhel", "rocky", ..."""
    version: str = ""
    """"24.04", "2023", "9.6"."""
    codename: str = ""
    """"noble"."""

    @property
    def name(self) -> str:
        return f"{self.id} {self.version}".strip() or "an unknown operating system"


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository besides those of the image."""

    name: str
    """Of its files."""
    key: str
    """URL of its public key, in ASCII."""
    source: str
    """apt: what stands behind the key in a line of sources.list; dnf: the URL of its .repo file."""
    release: str = ""
    """dnf: the folder of a release that takes the place of the newest one's, such as "/el/9.6/"."""
    url: str
    """Where it is."""


def read_system(root: Path = Path("/")) -> System:
    """What the image says it is."""
    try:
        text = (root / "etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return System()
    fields = dict(word.split("=", 1) for line in text.splitlines() for word in shlex.split(line, comments=True) if "=" in word)
    return System(id=fields.get("ID", ""), version=fields.get("VERSION_ID", ""), codename=fields.get("VERSION_CODENAME", ""))


def way_to(url: str) -> str:
    """Why no connection to the host of a URL can be made; "" when one can, or when a proxy or a file is in its place."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.scheme in urllib.request.getproxies() or parts.hostname is None:
        return ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        addresses = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"{parts.hostname} cannot be resolved ({error})"
    reasons = []
    # Two of each family: without a way for IPv6, its addresses fail at once, and may come first.
    chosen = [
        one for family in (socket.AF_INET, socket.AF_INET6) for one in [each for each in addresses if each[0] == family][:2]
    ]
    for family, kind, protocol, _, address in chosen:
        try:
            with socket.socket(family, kind, protocol) as connection:
                connection.settimeout(WAY_SECONDS)
                connection.connect(address)
                return ""
        except OSError as error:
            reasons.append(f"{parts.hostname} ({address[0]}) does not answer at port {port}: {error}")
    return reasons[0] if reasons else f"{parts.hostname} has no address"


def when_unlocked(action: Callable[[], str], sleep: Callable[[float], None] = time.sleep) -> str:
    """Do what needs a lock that others may hold, which not every command waits for by itself.

    Raises:
        StepFailed: it failed, or the lock was not free within `LOCK_SECONDS`.
    """
    started, paused = time.monotonic(), 0.0
    while True:
        try:
            return action()
        except StepFailed as fault:
            if max(paused, time.monotonic() - started) >= LOCK_SECONDS or not _LOCKED.search(str(fault)):
                raise
        sleep(LOCK_PAUSE)
        paused += LOCK_PAUSE


class Packages(abc.ABC):
    """What installs packages here."""

    def __init__(
        self,
        system: System,
        *,
        root: Path = Path("/"),
        run: Run = run_command,
        sleep: Callable[[float], None] = time.sleep,
        way: Way = way_to,
        options: Sequence[str] = (),
    ) -> None:
        """Args:
        system: the operating system.
        root: where its files are.
        run: runs commands.
        sleep: waits.
        way: whether a repository can be reached.
        options: further options of every call.
        """
        self.system = system
        self._root, self._run, self._sleep, self._way, self._options = root, run, sleep, way, tuple(options)

    @abc.abstractmethod
    def installed(self) -> set[str]:
        """Names of all installed packages."""

    @abc.abstractmethod
    def add(self, repository: Repository) -> None:
        """Make a repository known; may be called again.

        Raises:
            StepFailed: it or its key cannot be read.
        """

    @abc.abstractmethod
    def hold(self, *names: str) -> None:
        """Keep packages at the version that they have."""

    @abc.abstractmethod
    def _has_proxy(self) -> bool:
        """Whether a proxy is in the package manager's own settings, so that a connection from here says nothing."""

    @abc.abstractmethod
    def _sites(self) -> list[str]:
        """URLs of the repositories that are known, as far as they can be read without a network."""

    @abc.abstractmethod
    def _install(self, names: Sequence[str]) -> None:
        """Install packages that are not installed."""

    def install(self, *names: str) -> list[str]:
        """Install those of some packages that are not there. Returns their names.

        Raises:
            StepFailed: they cannot be installed, with the reason and what to do.
        """
        there = self.installed()
        missing = [name for name in names if name not in there]
        if missing:
            try:
                self._check_way()
                self._persist(lambda: self._install(missing))
            except StepFailed as failure:
                raise StepFailed(
                    f"{' and '.join(missing)} cannot be installed on {self.system.name}: {failure} Use an image that has it."
                ) from None
        return missing

    def _check_way(self, *needed: str) -> None:
        """Look, at all repositories at once, whether there is a way.

        Raises:
            StepFailed: there is none to a needed one, or to none at all.
        """
        sites = list(dict.fromkeys(_site(url) for url in (*needed, *self._sites())))
        if not sites or self._has_proxy():
            return
        with ThreadPoolExecutor(max_workers=min(16, len(sites))) as pool:
            reasons = dict(zip(sites, pool.map(self._way, sites), strict=True))
        lacking = [reasons[_site(url)] for url in needed if reasons[_site(url)]]
        if lacking or all(reasons.values()):
            raise StepFailed(
                f"There is no way to the package repository: {(lacking or list(reasons.values()))[0]}. "
                "An isolated network has none to any site."
            )

    def _persist(self, action: Callable[[], object]) -> None:
        """Do something again that failed for what may be a fault of the moment."""
        for pause in (*PAUSES, None):
            try:
                when_unlocked(lambda: str(action()), self._sleep)
                return
            except StepFailed as failure:
                if pause is None or _UNKNOWN.search(str(failure)):
                    raise
                self._sleep(pause)

    def _fetch(self, url: str, file: Path) -> None:
        """Download a small file."""
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.new")
        limits = ("--retry", "3", "--retry-delay", "2", "--connect-timeout", f"{WAY_SECONDS:g}", "--max-time", "60")
        self._run("curl", "--fail", "--silent", "--show-error", "--location", *limits, "--output", str(new), url)
        new.replace(file)


class Apt(Packages):
    """Ubuntu and Debian."""

    def installed(self) -> set[str]:
        listing = self._run(
            "dpkg-query",
            f"--admindir={self._root / 'var/lib/dpkg'}",
            "--show",
            "--showformat",
            "${db:Status-Abbrev} ${Package}\n",
        )
        return {name for state, name in _pairs(listing) if state == "ii"}

    def add(self, repository: Repository) -> None:
        key = self._root / f"usr/share/keyrings/{repository.name}.asc"
        line = f"deb [signed-by=/usr/share/keyrings/{repository.name}.asc] {repository.source}\n"
        self._check_way(repository.url, repository.key)
        self._fetch(repository.key, key)
        sources = self._root / f"etc/apt/sources.list.d/{repository.name}.list"
        sources.parent.mkdir(parents=True, exist_ok=True)
        sources.write_text(line, encoding="utf-8")

    def hold(self, *names: str) -> None:
        there = self.installed()
        if known := [name for name in names if name in there]:
            when_unlocked(lambda: self._run("apt-mark", *self._options, "hold", *known), self._sleep)

    def _has_proxy(self) -> bool:
        return bool(re.search(r'^Acquire::https?::Proxy\S* "http', self._run("apt-config", *self._options, "dump"), re.MULTILINE))

    def _sites(self) -> list[str]:
        return self._run("apt-get", *self._options, "indextargets", "--format", "$(SITE)").split()

    def _install(self, names: Sequence[str]) -> None:
        # The lists of an image are old or none. Here apt waits for no lock by itself: `when_unlocked` does.
        lists = ""
        try:
            self._apt("update")
        except StepFailed as failure:
            if _LOCKED.search(str(failure)):
                raise
            lists = f" Before it: {failure}"  # one repository of several that fails need not be the one that has the package
        try:
            self._install_by_lists(names)
        except StepFailed as failure:
            raise StepFailed(f"{failure}{lists}") from None

    def _install_by_lists(self, names: Sequence[str]) -> None:
        self._apt("install", "--yes", "--no-install-recommends", "--no-upgrade", "--no-remove", *names)

    def _apt(self, *arguments: str) -> None:
        # No question is asked, no service restarted, and a file of settings that somebody has changed stays.
        environment = ("env", "DEBIAN_FRONTEND=noninteractive", "NEEDRESTART_SUSPEND=1", "LC_ALL=C.UTF-8")
        settings = {
            "DPkg::Lock::Timeout": str(LOCK_SECONDS),
            "Acquire::Retries": "2",
            "Acquire::http::Timeout": "10",
            "Acquire::https::Timeout": "10",
            "Dpkg::Options::": "--force-confold",
        }
        options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        self._run(*environment, "apt-get", *options, *self._options, *arguments, timeout=INSTALL_SECONDS)


class Dnf(Packages):
    """Amazon Linux 2023, Red Hat Enterprise Linux and what is built of it."""

    def installed(self) -> set[str]:
        return set(self._run("rpm", "--query", "--all", "--queryformat", "%{NAME}\n").split())

    def add(self, repository: Repository) -> None:
        key = self._root / f"etc/pki/rpm-gpg/{repository.name}.asc"
        self._check_way(repository.url, repository.key)
        self._fetch(repository.key, key)
        self._run("rpm", "--import", str(key))
        file = self._root / f"etc/yum.repos.d/{repository.name}.repo"
        self._fetch(repository.source, file)
        if repository.release:
            text = re.sub(r"/el/[\d.]+/", repository.release, file.read_text(encoding="utf-8"))
            file.write_text(text, encoding="utf-8")

    def hold(self, *names: str) -> None:
        """`upgrades` excludes kernel and driver in dnf's settings; what was installed here, nothing upgrades by itself."""

    def _has_proxy(self) -> bool:
        settings = self._root / "etc/dnf/dnf.conf"
        text = settings.read_text(encoding="utf-8") if settings.exists() else ""
        return bool(re.search(r"^proxy\s*=\s*http", text, re.MULTILINE))

    def _sites(self) -> list[str]:
        variables = {
            file.name: file.read_text(encoding="utf-8").strip()
            for folder in ("etc/yum/vars", "etc/dnf/vars")
            for file in (self._root / folder).glob("*")
        }
        found = []
        for file in sorted((self._root / "etc/yum.repos.d").glob("*.repo")):
            for section in re.split(r"^\[", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
                if re.search(r"^enabled\s*=\s*0", section, flags=re.MULTILINE):
                    continue
                for url in re.findall(r"^(?:baseurl|mirrorlist|metalink)\s*=\s*(\S+)", section, flags=re.MULTILINE):
                    found.append(re.sub(r"\$\{?(\w+)\}?", lambda name: variables.get(name[1], name[0]), url))
        # A placeholder that is left in a host's name ($awsregion; REGION in RHEL's images) is for dnf and its plugins to fill.
        return [url for url in found if not re.search(r"[$A-Z]", urlsplit(url).netloc)]

    def _install(self, names: Sequence[str]) -> None:
        # dnf waits for the lock of another dnf; `when_unlocked` does for rpm's own.
        settings = ("exit_on_lock=False", "retries=2", "timeout=10", "install_weak_deps=False")
        options = [f"--setopt={setting}" for setting in settings]
        self._run(
            "env", "LC_ALL=C.UTF-8", "dnf", "--assumeyes", *options, *self._options, "install", *names, timeout=INSTALL_SECONDS
        )


def packages_here(*, root: Path = Path("/"), run: Run = run_command) -> Packages | None:
    """The package manager of this image; None when it has neither apt nor dnf."""
    system = read_system(root)
    for program, kind in (("apt-get", Apt), ("dnf", Dnf)):
        if (root / "usr/bin" / program).exists():
            made: Packages = kind(system, root=root, run=run)
            return made
    return None


def _pairs(listing: str) -> Iterable[tuple[str, str]]:
    for line in listing.splitlines():
        state, _, name = line.strip().partition(" ")
        yield state, name.strip()


def _site(url: str) -> str:
    """The part of a URL that a connection goes to."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}" if parts.netloc else url
