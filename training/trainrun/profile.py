"""A window of steps under PyTorch's profiler: what ran when, and on CUDA what memory was held by whom.

Only rank 0 is profiled: the ranks take the same steps, and what it waits for the others shows in its collectives.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

from torch.profiler import profile

from trainrun import devices
from trainrun.metrics.progress import Progress
from trainrun.ranks import Ranks
from trainrun.settings import TrainSettings
from trainrun.store import Store, open_store

FOLDER = "profile"


class ProfiledSteps:
    """Profiles the steps that ``settings.profile`` names, and keeps the result where checkpoints are kept.

    Writing it takes as long as many steps, so a thread does it beside them. It changes no numbers, and a failure of it only
    warns.

    Args:
        first: the first step that this process will take.
        directory: ``$TRAINRUN_STATE``, or None; where the result goes when there is no checkpoint location.
    """

    def __init__(self, settings: TrainSettings, ranks: Ranks, progress: Progress, *, first: int, directory: Path | None) -> None:
        window = settings.profile
        self._begin, self._end = window.start_step, window.start_step + window.steps - 1
        self._settings, self._ranks, self._progress, self._directory = settings, ranks, progress, directory
        self._profiler: profile | None = None
        self._writing: threading.Thread | None = None
        self._on = ranks.first and window.start_step > 0
        if self._on and self._end < first:
            self._progress.say(f"Nothing is profiled: the steps {self._begin} to {self._end} are done already.")
            self._on = False

    def before(self, step: int) -> None:
        """Start the profiler if this step belongs to the window."""
        if self._on and self._profiler is None and self._begin <= step <= self._end:
            self._begin = step  # later than asked for when the run was resumed in the middle
            devices.record_memory(self._ranks.device, on=True)
            self._profiler = profile(record_shapes=True)  # of the CPU and of the accelerator there is
            self._progress.make_room()
            self._profiler.start()

    def after(self, step: int) -> None:
        """Stop it after the window's last step, and begin to write."""
        if self._profiler is not None and step == self._end:
            self._finish(step)

    def close(self) -> None:
        """Wait until everything is written."""
        if self._profiler is not None:  # the run ended within the window
            self._profiler.stop()
            self._profiler = None
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _finish(self, step: int) -> None:
        assert self._profiler is not None
        devices.synchronize(self._ranks.device)
        self._progress.make_room()
        self._profiler.stop()
        profiler, self._profiler, self._on = self._profiler, None, False
        memory = devices.memory_record(self._ranks.device)
        devices.record_memory(self._ranks.device, on=False)
        self._progress.event(step, "profiled", first=self._begin)
        self._writing = threading.Thread(target=self._write, args=(profiler, memory, step), name="profile", daemon=True)
        self._writing.start()

    def _write(self, profiler: profile, memory: bytes | None, step: int) -> None:
        key = f"step-{self._begin:09}/rank-{self._ranks.rank:05}"
        try:
            store = self._store()
            with tempfile.TemporaryDirectory(prefix="trainrun-profile-") as folder:
                trace = Path(folder, "trace.json.gz")
                profiler.export_chrome_trace(str(trace))
                store.put_file(f"{key}.json.gz", trace)
            if memory is not None:
                store.put(f"{key}-memory.pickle", memory)
            self._progress.say(f"Profiled the steps {self._begin} to {step}: {store.locate(key)}.json.gz")
        except Exception as error:  # whatever it is: a run is worth more than its profile
            self._progress.say(f"WARNING: the profile of the steps {self._begin} to {step} is lost: {error}")

    def _store(self) -> Store:
        location = self._settings.checkpoint.location
        if location:
            return open_store(location).child(self._settings.run).child(FOLDER)
        return open_store(str((self._directory or Path.cwd()) / FOLDER))
