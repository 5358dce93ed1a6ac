"""Command prefixes for tests that run a program as another user, or where only loopback exists."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ORDINARY_USER = 54321
LOOPBACK_ONLY = [
    *("unshare", "--net", sys.executable, "-c"),
    f"import os, sys; sys.path.insert(0, {str(ROOT / 'local')!r}); from trainlocal.fleet import netlink; netlink.set_up('lo');"
    "os.execvp(sys.argv[1], sys.argv[1:])",
]


def as_ordinary_user(scratch):
    """A prefix that drops from root to a user without any rights, and shows it Python and the repository.

    Both may lie in a folder that only root can enter; a mount namespace makes the way to them passable. `scratch` is an
    empty folder that this user can enter.
    """
    hidden = {path: closed for path in (Path(sys.base_prefix), ROOT) if (closed := _closed_folder(path))}
    stashes = {path: scratch / f"stash-{number}" for number, path in enumerate(hidden)}
    steps = [f"mkdir {stash} && mount --bind {path} {stash}" for path, stash in stashes.items()]
    steps += [f"mount -t tmpfs -o mode=755 none {closed}" for closed in dict.fromkeys(hidden.values())]
    for path, stash in stashes.items():
        steps.append(f"mkdir -p {path} && mount --bind {stash} {path} && umount -l {stash} && rmdir {stash}")
    drop = f'exec setpriv --reuid {ORDINARY_USER} --regid {ORDINARY_USER} --clear-groups "$@"'
    return ["unshare", "--mount", "sh", "-c", " && ".join([*steps, drop]), "sh"]


def _closed_folder(path):
    """The outermost folder on the way to `path` that others cannot enter; None when the way is open."""
    return next((folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001), None)
