"""AWS on one machine: an emulated account, and nodes that boot from the user data of its instances."""

from trainlocal.fleet.tiers import Tier
from trainlocal.local import Local, LocalError, Node, attach, start

__all__ = ["Local", "LocalError", "Node", "Tier", "attach", "start"]
