"""The strategy that the settings name."""

from __future__ import annotations

from trainrun.ranks import Ranks
from trainrun.settings import TrainSettings
from trainrun.strategies.base import Strategy


def strategy_of(settings: TrainSettings, ranks: Ranks) -> Strategy:
    """Make the strategy that ``settings.strategy`` names; imports only what it needs."""
    if settings.strategy == "fsdp2":
        from trainrun.strategies.fsdp2 import FSDP2

        return FSDP2(settings, ranks)
    if settings.strategy.startswith("zero"):
        from trainrun.strategies.zero import ZeRO

        return ZeRO(settings, ranks)
    from trainrun.strategies.ddp import DDP

    return DDP(settings, ranks)
