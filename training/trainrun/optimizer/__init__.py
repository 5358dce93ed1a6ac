"""The bundled optimizers, and the learning rate as a function of the step."""

from trainrun.optimizer.adamw import adamw
from trainrun.optimizer.schedule import schedule

__all__ = ["adamw", "schedule"]
