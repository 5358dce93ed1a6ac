"""AWS on one machine: an emulated account, and nodes that boot from the user data of its instances."""

from trainlocal.fleet.tiers import TIERS, Tier, TierChoice, choose
from trainlocal.local import Local, LocalError, Node, attach, start

__all__ = ["TIERS", "Local", "LocalError", "Node", "Tier", "TierChoice", "attach", "choose", "start"]
