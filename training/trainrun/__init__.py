"""trainrun: what runs on the nodes of a training cluster, and on any torchrun machine.

``trainrun.start`` opens a run (see `trainrun.run`). It is imported when it is first used, so that what needs no
torch (the CDK side, the node agent, the store) does not pay for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainrun.run import start

__version__ = "0.1.0"

__all__ = ["__version__", "start"]


def __getattr__(name: str) -> Any:
    if name == "start":
        from trainrun.run import start

        return start
    raise AttributeError(f"module 'trainrun' has no attribute {name!r}")
