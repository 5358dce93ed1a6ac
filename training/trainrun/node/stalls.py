"""Whether ranks of this node hang: they run, and make no progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from trainrun import progress
from trainrun.node.dumps import STOPPED, Dump, dump_ranks, state_of
from trainrun.progress import Progress
from trainrun.store import Store, StoreError

LONGER = 4.0
"""By which more time a rank has while it begins, between steps and after the last: to restore, compile, evaluate, export."""

log = logging.getLogger(__name__)


@dataclass
class _Seen:
    progress: Progress
    since: float


class Stalls:
    """Looks at the progress of the ranks of one launch; when one hangs, says which, and keeps what each was doing."""

    def __init__(
        self,
        *,
        state: Path,
        store: Store,
        node: str,
        no_progress: float,
        dump: Callable[[Path], list[Dump]] = dump_ranks,
        state_of: Callable[[int], str] = state_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        state: $TRAINRUN_STATE.
        store: the run's folder; stacks go to failures/ in it.
        node: this instance's id.
        no_progress: seconds without progress after which a rank hangs; 0 never looks.
        dump: collects what the ranks do.
        state_of: the state of a process, by the letter of proc(5).
        clock: seconds that only go forward.
        """
        self._state, self._store, self._node = state, store, node
        self._no_progress = no_progress
        self._dump, self._state_of, self._clock = dump, state_of, clock
        self._seen: dict[int, _Seen] = {}
        self.reason = ""
        """Why the launch must end, once it must."""

    def look(self) -> None:
        """Look once, until there is a reason."""
        if self.reason or not self._no_progress:
            return
        now = self._clock()
        current = progress.read(self._state)
        for one in current:
            seen = self._seen.get(one.rank)
            if seen is None or seen.progress != one:
                self._seen[one.rank] = _Seen(one, now)
        hung = [one for one in current if now - self._seen[one.rank].since > self._allowed(one)]
        if hung:
            dumps = self._dump(self._state)
            files = self._keep(dumps)
            self.reason = self._say(hung, current, dumps, files)  # from here on the launch is being ended
            self._send(files)

    def _allowed(self, one: Progress) -> float:
        """A process that is stopped does nothing that may take long."""
        shorter = one.phase == "training" or self._state_of(one.pid) in STOPPED
        return (1.0 if shorter else LONGER) * self._no_progress

    def _say(self, hung: Sequence[Progress], current: Sequence[Progress], dumps: Sequence[Dump], files: Sequence[Path]) -> str:
        first = hung[0]
        doing = {"training": f"at step {first.step + 1}", "starting": "while it began"}.get(
            first.phase, f"after step {first.step}"
        )
        seconds = self._allowed(first)
        text = (
            f"{_ranks([one.rank for one in hung])} made no progress for {seconds:g} s {doing} "
            f"(timeouts.no_progress is {self._no_progress:g})."
        )
        stopped = [dump for dump in dumps if dump.explains]
        behind = [one for one in current if one.phase == "training" and one.arrived < max(other.arrived for other in current)]
        if stopped:
            text += " " + " ".join(f"Rank {dump.rank} (process {dump.pid}) is {dump.explains}." for dump in stopped)
        elif behind:
            text += f" {_ranks([one.rank for one in behind])} did not come to where the others of this node wait."
        if files:
            text += f" What each rank was doing is in failures/{self._node}/ of the run's folder."
        return text

    def _keep(self, dumps: Sequence[Dump]) -> list[Path]:
        folder = self._state / "failures"
        moment = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}"
        files = []
        for dump in dumps:
            file = folder / f"{moment}-rank-{dump.rank}.txt"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file.write_text(dump.text, encoding="utf-8")
            except OSError:  # a disk that is full: the launch has to be ended all the same
                log.exception("What rank %d was doing could not be kept:\n%s", dump.rank, dump.text)
                continue
            files.append(file)
        return files

    def _send(self, files: Sequence[Path]) -> None:
        for file in files:
            try:
                self._store.put(f"failures/{self._node}/{file.name}", file.read_bytes())
            except StoreError:
                log.exception("%s stays on this node only.", file)


def _ranks(numbers: Sequence[int]) -> str:
    return f"Rank {numbers[0]}" if len(numbers) == 1 else f"Ranks {', '.join(map(str, sorted(numbers)))}"
