"""Errors that a user meets, apart from those of the configuration (`trainrun.config`) and the store (`trainrun.store`)."""


class CheckpointError(Exception):
    """A checkpoint could not be saved or restored; the message says why and what to do."""
