"""The bundled optimizers, and the learning rate as a function of the step."""

from trainrun.optimizer.adamw import adamw
from trainrun.optimizer.bundled import bundled
from trainrun.optimizer.muon import muon
from trainrun.optimizer.schedule import schedule

__all__ = ["adamw", "bundled", "muon", "schedule"]
