"""One run of mpirun, as seen from one node: the host, on which mpirun itself runs, or a member, on which its daemon does.

An MPI world is what it was at its start. A node that comes later waits, and has all ranks asked to save and leave; a node
that is lost ends mpirun. Either way the nodes meet anew and launch again, as after any failure.
"""

from __future__ import annotations

import abc
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from trainrun.node.beacon import answers
from trainrun.node.launch import Launch, last_lines, size_of, start, tail
from trainrun.node.mpi_board import Answer, Board, Ticket, Verdict
from trainrun.node.mpi_command import REMOTE_SHELL, daemon_command, host_file, mpirun_command, only_prefixes
from trainrun.node.mpi_program import Mpirun
from trainrun.node.mpi_ranks import MpiRanks
from trainrun.node.outcome import ASKED_TO_STOP, StepFailed
from trainrun.node.places import Places
from trainrun.node.processes import kill_descendants
from trainrun.spec import ClusterSpec, TimeoutSpec
from trainrun.store import StoreError

POLL_SECONDS = 0.1
BOARD_SECONDS = 0.5
MEMBERS_SECONDS = 5.0
"""How often the host looks whether members are lost and newcomers there."""
ENDING_SECONDS = 5.0
"""For what cannot take long: the ranks' end when a peer is lost, the thread's when its processes are killed."""
TELLING_SECONDS = 60.0
"""For a word to reach the bucket."""

log = logging.getLogger(__name__)
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class MpiNode:
    """What a launch needs to know of its node."""

    mpirun: Mpirun
    environment: Mapping[str, str]
    """Of mpirun or its daemon, and so of the ranks."""
    places: Places
    ranks: MpiRanks
    board: Board
    timeouts: TimeoutSpec


class MpiLaunch(Launch):
    """A running mpirun, or its daemon. What takes a store or a peer to answer is done in a thread of its own."""

    name = "mpirun"

    def __init__(self, node: MpiNode) -> None:
        self._node = node
        self._log_start = size_of(node.places.mpirun_log)
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._stopping = threading.Event()
        self._verdict: Verdict | None = None
        self._thread = threading.Thread(target=self._run_guarded, name="mpirun", daemon=True)

    def __enter__(self) -> MpiLaunch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._kill()
        self._thread.join(timeout=ENDING_SECONDS)
        kill_descendants(os.getpid())  # ranks whose daemon died are the agent's own children by now
        shutil.rmtree(self._node.places.mpi, ignore_errors=True)

    def exit_code(self) -> int | None:
        return None if self._verdict is None else self._verdict.exit_code

    def stop(self, *, grace: float) -> None:
        self._stopping.set()
        deadline = time.monotonic() + grace
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._node.ranks.ask_to_stop()
            self._thread.join(timeout=POLL_SECONDS)
        self._kill()
        self._thread.join(timeout=ENDING_SECONDS)
        self._verdict = self._verdict or Verdict(exit_code=-signal.SIGKILL, explanation="It was ended.")

    def rank_exit_codes(self) -> list[int]:
        return [code for code in self._exit_codes() if code]

    def explanation(self) -> str:
        told = self._verdict.explanation if self._verdict else ""
        return self._node.ranks.explanation() or told or self._said()

    def _exit_codes(self) -> list[int]:
        """Those of this node's ranks. One that was asked to stop and ended with 0 has stopped too: that is not the job's end."""
        asked = self._stopping.is_set() or self.reason or self._node.places.stop_file.exists()
        return [ASKED_TO_STOP if asked and code == 0 else code for code in self._node.ranks.exit_codes()]

    @abc.abstractmethod
    def _run(self) -> Verdict:
        """The whole launch, until its end.

        Raises:
            StepFailed: it could not be begun, or was ended.
        """

    def _run_guarded(self) -> None:
        try:
            self._verdict = self._run()
        except StepFailed as failure:
            self._verdict = Verdict(exit_code=1, explanation=str(failure))
        except Exception as error:
            log.exception("The launch failed.")
            self._verdict = Verdict(exit_code=1, explanation=f"{type(error).__name__}: {error}")

    def _start(self, command: list[str], *, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        log.info("Launching: %s", " ".join(command))
        with self._starting:  # nothing is started any more once it is being stopped
            self._go_on()
            self._process = start(command, environment=environment, places=self._node.places, log=self._node.places.mpirun_log)
        return self._process

    def _kill(self) -> None:
        with self._starting:
            process = self._process
        if process is not None and process.poll() is None:
            kill_descendants(process.pid)
            process.kill()

    def _said(self) -> str:
        """The last of what mpirun or its daemon has said since this launch, less its frames."""
        path = self._node.places.mpirun_log
        text = tail(path, start=self._log_start) if path.exists() else ""
        return last_lines("\n".join(line for line in text.splitlines() if line.strip("-").strip()))

    def _go_on(self) -> None:
        if self._stopping.is_set():
            raise StepFailed("It was ended before it had begun.")

    def _tell(self, tell: Callable[[], None]) -> None:
        """Put something on the board, also when that takes several attempts.

        Raises:
            StepFailed: it could not be put there.
        """

        def told() -> bool:
            tell()
            return True

        if not self._ask(told, seconds=TELLING_SECONDS):
            raise StepFailed("The run's folder could not be written. Is the way to S3 open?")

    def _ask(self, ask: Callable[[], Found | None], *, seconds: float) -> Found | None:
        """Ask the board until it answers; None when the time is over. A request that fails is made again."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if (found := ask()) is not None:
                    return found
            except StoreError as error:
                log.warning("Asking again: %s", error)
            if time.monotonic() > deadline:
                return None
            time.sleep(BOARD_SECONDS)


class MpiMember(MpiLaunch):
    """A node on which mpirun's daemon runs."""

    def __init__(self, node: MpiNode, *, ticket: Ticket) -> None:
        """Args:
        node: this one.
        ticket: with which it asks the host to be let in.
        """
        super().__init__(node)
        self._ticket = ticket

    def _run(self) -> Verdict:
        board, ranks = self._node.board, self._node.ranks
        self._tell(partial(board.put_ticket, self._ticket))
        answer = self._wait_for_answer()
        command = [str(self._node.mpirun.daemon), *answer.arguments]
        code = self._start(command, environment={**self._node.environment, **only_prefixes(answer.variables)}).wait()
        codes = self._exit_codes()
        self._tell(partial(board.put_exit_codes, self._ticket, codes))
        if not ranks.all_ended() or any(codes):
            return Verdict(exit_code=_worst(codes) or code or 1, explanation="")
        # That the ranks of this node have ended well does not say that all have.
        verdict = self._ask(partial(board.verdict, answer.launch), seconds=2 * self._node.timeouts.peer_lost + ENDING_SECONDS)
        return verdict or Verdict(exit_code=1, explanation="The node on which mpirun ran did not say how the job ended.")

    def _wait_for_answer(self) -> Answer:
        """Newcomers wait for the host's ranks to save. That the host is alive is watched elsewhere (`Regroup`)."""
        try:
            while True:
                self._go_on()
                answer = self._ask(partial(self._node.board.answered, self._ticket), seconds=BOARD_SECONDS)
                if answer is not None:
                    return answer
        except StepFailed:
            self._node.board.withdraw(self._ticket)
            raise


class MpiHost(MpiLaunch):
    """The node on which mpirun runs, and with it the first ranks."""

    def __init__(self, node: MpiNode, *, cluster: ClusterSpec, expected: int, last_call: float, python: str) -> None:
        """Args:
        node: this one.
        cluster: how many nodes there may be, and how many ranks on each.
        expected: how many there are to be, if all come.
        last_call: seconds without a further node after which those that are there begin.
        python: the agent's.
        """
        super().__init__(node)
        self._cluster = cluster
        self._expected = min(expected, cluster.nodes_max)
        self._last_call = last_call
        self._python = python
        self._silent_since: dict[str, float] = {}

    def _run(self) -> Verdict:
        members = self._gather()
        launch = f"{time.time_ns():020d}"
        code = self._run_mpirun(launch, members)
        verdict = self._judge(code, members)
        self._tell(partial(self._node.board.put_verdict, launch, verdict))
        return verdict

    def _gather(self) -> list[Ticket]:
        """Wait for the other nodes.

        Raises:
            StepFailed: too few came in time.
        """
        begun = since = time.monotonic()
        here: list[Ticket] = []
        while 1 + len(here) < self._expected:
            self._go_on()
            before, here = here, self._waiting()[: self._cluster.nodes_max - 1]
            now = time.monotonic()
            if len(here) > len(before):
                since = now
            if 1 + len(here) >= self._cluster.nodes_min and now - since > self._last_call:
                break
            if now - begun > self._node.timeouts.rendezvous:
                raise StepFailed(
                    f"{1 + len(here)} of at least {self._cluster.nodes_min} nodes came to the launch within "
                    f"{self._node.timeouts.rendezvous} s (timeouts.rendezvous). See the events of the others."
                )
            time.sleep(BOARD_SECONDS)
        return here

    def _run_mpirun(self, launch: str, members: list[Ticket]) -> int:
        """Run mpirun to its end; returns its exit code."""
        folder = self._node.places.mpi
        hosts, commands = folder / "hosts", folder / "commands"
        commands.mkdir()
        (folder / "remote-shell").write_text(REMOTE_SHELL)
        hosts.write_text(host_file([member.address for member in members], slots=self._cluster.processes_per_node))
        ranks = (1 + len(members)) * self._cluster.processes_per_node
        command = mpirun_command(self._node.mpirun, python=self._python, host_file=hosts, ranks=ranks)
        process = self._start(command, environment=self._node.environment)
        unanswered = {member.address: member for member in members}
        begun = looked = time.monotonic()
        give_up = None
        while process.poll() is None:
            self._hand_on(launch, commands, unanswered)
            now = time.monotonic()
            if give_up is None and now - looked > MEMBERS_SECONDS:
                give_up = self._look(members, since=begun)
                looked = time.monotonic()
            if give_up is not None:
                self._node.ranks.ask_to_stop()
                if now > give_up:
                    self._kill()
            time.sleep(POLL_SECONDS)
        return process.returncode

    def _hand_on(self, launch: str, commands: Path, unanswered: dict[str, Ticket]) -> None:
        """Answer the tickets of the nodes on which mpirun wants a daemon by now."""
        for address in [address for address in unanswered if (commands / address).exists()]:
            daemon = daemon_command((commands / address).read_text())
            answer = Answer(launch=launch, arguments=daemon.arguments, variables=daemon.variables)
            ticket = unanswered.pop(address)
            self._tell(partial(self._node.board.answer, ticket, answer))

    def _look(self, members: list[Ticket], *, since: float) -> float | None:
        """Whether the launch has to end, for `reason`: until when the ranks of this node may save, or None."""
        if time.monotonic() - since > self._node.timeouts.rendezvous and not self._node.ranks.have_started():
            self.reason = (
                f"No rank has started within {self._node.timeouts.rendezvous} s (timeouts.rendezvous) of mpirun. Its daemons "
                "connect to it: does the security group allow all traffic between its own members, in and out? See mpirun.log."
            )
            return time.monotonic()
        if lost := [member.node for member in members if self._is_lost(member)]:
            self.reason = f"{', '.join(lost)} did not answer for {self._node.timeouts.peer_lost} s."
            return time.monotonic() + ENDING_SECONDS
        newcomers = [ticket for ticket in self._waiting() if ticket not in members]
        if newcomers and 1 + len(members) < self._cluster.nodes_max:
            self.reason = f"{', '.join(each.node for each in newcomers)} came; the ranks were asked to save and leave."
            return time.monotonic() + self._node.timeouts.stop_grace
        return None

    def _waiting(self) -> list[Ticket]:
        """Living nodes that wait to be let in."""
        try:
            return [ticket for ticket in self._node.board.waiting() if answers(ticket.address, ticket.beacon)]
        except StoreError as error:
            log.warning("Who waits is not known now: %s", error)
            return []

    def _is_lost(self, member: Ticket) -> bool:
        if answers(member.address, member.beacon):
            self._silent_since.pop(member.key, None)
            return False
        since = self._silent_since.setdefault(member.key, time.monotonic())
        return time.monotonic() - since >= self._node.timeouts.peer_lost

    def _judge(self, code: int, members: list[Ticket]) -> Verdict:
        """How the launch ended. mpirun's own code is not enough to go by (`mpi_rank`)."""
        ranks = self._node.ranks
        codes = self._exit_codes()
        if not ranks.all_ended() or any(codes):
            return Verdict(exit_code=_worst(codes) or code or 1, explanation=ranks.explanation() or self._said())
        deadline = time.monotonic() + self._node.timeouts.peer_lost
        for member in members:
            told = self._ask(
                partial(self._node.board.exit_codes, member),
                seconds=max(0.0, deadline - time.monotonic()),
            )
            if told is None or len(told) < self._cluster.processes_per_node:
                return Verdict(exit_code=code or 1, explanation=f"Not all ranks of {member.node} came to an end.\n{self._said()}")
            codes += told
        return Verdict(exit_code=_worst(codes) or code, explanation=self._said())


def _worst(codes: list[int]) -> int:
    """The exit code that speaks for several: of a failure before that of ranks that were asked to stop, before 0."""
    failures = [code for code in codes if code]
    return next((code for code in failures if code != ASKED_TO_STOP), failures[0] if failures else 0)
