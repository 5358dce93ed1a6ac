"""The client of FSx for Lustre: installed where the image lacks it, and tuned at each start of the agent.

Sources: docs.aws.amazon.com/fsx/latest/LustreGuide/install-lustre-client.html (packages, releases by kernel) and
performance-tips.html there (parameters).
"""

from __future__ import annotations

import re
from pathlib import Path

from trainrun.node.commands import Run
from trainrun.node.outcome import StepFailed
from trainrun.node.packages import Packages, Repository

_REPOSITORY = "https://fsx-lustre-client-repo.s3.amazonaws.com"
_KEYS = "https://fsx-lustre-client-repo-public-keys.s3.amazonaws.com"
_RED_HATS = ("rhel", "rocky", "centos", "almalinux")

RELEASES = {
    "4.18.0-193": "8.2",
    "4.18.0-240": "8.3",
    "4.18.0-305": "8.4",
    "4.18.0-348": "8.5",
    "4.18.0-372": "8.6",
    "4.18.0-425": "8.7",
    "4.18.0-477": "8.8",
    "4.18.0-513": "8.9",
    "5.14.0-70": "9.0",
    "5.14.0-362": "9.3",
    "5.14.0-427": "9.4",
    "5.14.0-503": "9.5",
    "5.14.0-570": "9.6",
    "5.14.0-611": "9.7",
}
"""Release of RHEL whose client fits a kernel. The repository's own folder is that of the newest kernel."""

TUNING = {
    "osc.*.max_rpcs_in_flight": "64",
    "osc.*.max_dirty_mb": "256",
    "osc.*.max_pages_per_rpc": "1024",
    "mdc.*.max_rpcs_in_flight": "64",
    "mdc.*.max_mod_rpcs_in_flight": "50",
    "llite.*.max_read_ahead_mb": "256",
}
"""What lctl sets, in this order: fewer modifying requests than requests may be in flight. It lasts until the next boot."""

MANY_PROCESSORS = 64
MODULE_OPTIONS = "options ptlrpc ptlrpcd_per_cpt_max=32\noptions ksocklnd credits=2560\n"
"""For nodes with many processors. A module reads them when it is loaded."""


def install_client(packages: Packages, *, kernel: str) -> str:
    """Install the client for the kernel that runs, and keep it at that version. Returns a remark about what was installed.

    Raises:
        StepFailed: AWS has none for this operating system or kernel, or there is no way to its repository.
    """
    system = packages.system
    major = system.version.partition(".")[0]
    if system.id == "amzn" and major == "2023":
        names = ["lustre-client"]
    elif system.id == "ubuntu" and system.codename:
        ubuntu = f"{_REPOSITORY}/ubuntu"
        packages.add(
            Repository(
                name="fsx-lustre-client",
                key=f"{_KEYS}/fsx-ubuntu-public-key.asc",
                source=f"{ubuntu} {system.codename} main",
                url=ubuntu,
            )
        )
        names = [f"lustre-client-modules-{kernel}"]
    elif system.id in _RED_HATS and major in ("8", "9"):
        release = RELEASES.get(".".join(re.split(r"[.]", kernel)[:3]), "")
        packages.add(
            Repository(
                name="aws-fsx",
                key=f"{_KEYS}/fsx-rpm-public-key.asc",
                source=f"{_REPOSITORY}/el/{major}/fsx-lustre-client.repo",
                release=f"/el/{release}/" if release else "",
                url=_REPOSITORY,
            )
        )
        names = ["kmod-lustre-client", "lustre-client"]
    else:
        raise StepFailed(f"AWS offers no Lustre client for {system.name}. Use Amazon Linux 2023, Ubuntu, or RHEL 8 or 9.")
    try:
        installed = packages.install(*names)
    except StepFailed as failure:
        raise StepFailed(f"{failure} AWS builds the client for certain kernels; this is {kernel}.") from None
    packages.hold(*names)
    return f", {' and '.join(installed)} installed" if installed else ""


def write_module_options(*, processors: int, file: Path = Path("/etc/modprobe.d/traincluster-lustre.conf")) -> bool:
    """Have the client's modules use more threads on a node with many processors. Returns whether the file is new."""
    if processors < MANY_PROCESSORS or (file.exists() and file.read_text(encoding="utf-8") == MODULE_OPTIONS):
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(MODULE_OPTIONS, encoding="utf-8")
    return True


def tune(run: Run) -> tuple[str, bool]:
    """Set the client's parameters where they are other ones. Returns a remark, and whether any was set.

    A parameter that this version of the client does not take costs speed and stops nothing.
    """
    try:
        run("lctl", "--version")
    except StepFailed:
        return "not tuned: the image has no lctl", False
    were, refused = 0, []
    for name, wanted in TUNING.items():
        try:
            if set(run("lctl", "get_param", "-n", name).split()) == {wanted}:
                continue
            run("lctl", "set_param", f"{name}={wanted}")
            were += 1
        except StepFailed:
            refused.append(name)
    remark = f"tuned ({were} of {len(TUNING)} parameters set)" if were else "tuned already"
    return (f"{remark}, not taken: {', '.join(refused)}" if refused else remark), were > 0
