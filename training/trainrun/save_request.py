"""Requests for a checkpoint from outside the loop: the file ``$TRAINRUN_STATE/save``, which one rank sees and all heed."""

from __future__ import annotations

import os
from pathlib import Path


class SaveRequest:
    """Whether someone wants a checkpoint at the next step, after which training goes on.

    The file asks when it appears, and again when its time of change does; it is never deleted here, for several ranks look at
    it. One that is older than this process has asked another.
    """

    def __init__(self, state_directory: Path | None) -> None:
        self._file = None if state_directory is None else state_directory / "save"
        self._heeded = self._changed()

    def tells(self) -> int:
        """1 when there is a request here that is not heeded yet, else 0: for `hear`, which takes the largest of all ranks."""
        return int(self._changed() not in (0, self._heeded))

    def hear(self, largest: int) -> bool:
        """Whether any rank was asked, as of the last time that they told. What has come here until now is then heeded."""
        if largest:
            self._heeded = self._changed()
        return bool(largest)

    def _changed(self) -> int:
        """When the file was last changed, in nanoseconds; 0 while there is none."""
        if self._file is None:
            return 0
        try:
            return os.stat(self._file).st_mtime_ns  # noqa: PTH116 - once a step: half of the cost
        except OSError:
            return 0
