"""The strategy that the settings name."""

from __future__ import annotations

from trainrun.ranks import Ranks
from trainrun.settings import TrainSettings
from trainrun.strategies.base import Strategy
from trainrun.strategies.ddp import DDP


def strategy_of(settings: TrainSettings, ranks: Ranks) -> Strategy:
    """Make the strategy that ``settings.strategy`` names."""
    return DDP(settings, ranks)
