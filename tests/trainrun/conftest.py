"""An S3 on 127.0.0.1 that can be made to fail, a small dataset, and ways to run code on several gloo ranks."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.process
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
import torch
import torch.distributed as dist
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from trainrun.data.write import find_documents, write_dataset
from trainrun.ranks import Ranks
from trainrun.run import Run
from trainrun.settle import settle

sys.path.insert(0, str(Path(__file__).parent))  # rank_programs, for this process and for those it starts

import rank_programs
from fault_store import FaultStore

# Forked from a clean process that has imported torch already, a rank starts in milliseconds.
PROCESSES = multiprocessing.get_context("forkserver")
# (the first optimizer of a process imports torch._dynamo, which takes a second)
PROCESSES.set_forkserver_preload(["rank_programs", "boto3", "torch._dynamo", "trainrun.run"])

TINY = [
    *("--sequence_length=16", "--batch_tokens=128", "--micro_batch=4"),
    *("--model.layers=1", "--model.width=16", "--model.heads=2"),
    *("--optimizer.warmup_steps=3", "--checkpoint.timeout_seconds=20"),
]
"""8 sequences a step: for 1, 2, 4 or 8 ranks."""

torch.set_num_threads(1)  # for matrices this small, threads only wait for each other

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

LONGEST = 60.0
"""Seconds that a group of ranks may take, unless it says otherwise."""


@pytest.fixture(autouse=True)
def no_rank_is_left_behind() -> Iterator[None]:
    """DeepSpeed makes this very process a rank by its environment, which all that later tests start would inherit."""
    before = {name: os.environ.get(name) for name in RANK_VARIABLES}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# S3


class FaultyS3:
    """moto's S3, as a server that can be told to answer some requests with 503 SlowDown."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.requests: list[str] = []
        self.heal()

    def fail(self, pattern: str, times: float = float("inf")) -> None:
        """Answer requests whose "METHOD path?query" matches with SlowDown, so many times."""
        self._pattern, self._times = pattern, times

    def heal(self) -> None:
        """Answer all requests again."""
        self._pattern, self._times = "$^", 0.0

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        self.requests.append(request)
        if self._times > 0 and re.search(self._pattern, request):
            self._times -= 1
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"]
        answer: Iterable[bytes] = self._moto(environ, start_response)
        return answer


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[FaultyS3]:
    server = FaultyS3()
    yield server
    server.stop()


@pytest.fixture
def s3(_s3_server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """The server, healthy at first; AWS_ENDPOINT_URL leads to it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", _s3_server.endpoint)
    _s3_server.requests.clear()
    yield _s3_server
    _s3_server.heal()


@pytest.fixture
def faults(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultStore]:
    """A proxy before the server that can do more harm; AWS_ENDPOINT_URL leads to it."""
    proxy = FaultStore(s3.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    yield proxy
    proxy.stop()


@pytest.fixture
def bucket(s3: FaultyS3) -> str:
    """The name of an empty bucket."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    boto3.client("s3").create_bucket(Bucket=name)
    return name


# Data


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten text files in which the next byte can be learnt."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = np.random.default_rng(0)
    words = ["the", "old", "node", "trains", "a", "model", "on", "text", "and", "stops"]
    for number in range(10):
        (folder / f"{number}.txt").write_text(" ".join(generator.choice(words, 400)))
    return folder


@pytest.fixture(scope="session")
def dataset(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A token dataset of it, in a directory."""
    folder = tmp_path_factory.mktemp("dataset")
    write_dataset(find_documents([str(corpus)]), str(folder), held_out=0.2)
    return str(folder)


# Ranks


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    code: int
    """Exit code; negative for a signal."""
    result: dict[str, Any]
    log: str
    folder: Path

    def parameters(self) -> dict[str, np.ndarray[Any, Any]]:
        with np.load(self.folder / "parameters.npz") as file:
            return dict(file)


class RankRunner:
    """Runs programs of `rank_programs` as the ranks of a run."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self._folder, self._endpoint = folder, endpoint
        self._processes: list[multiprocessing.process.BaseProcess] = []

    def __call__(
        self,
        program: str,
        *,
        world: int = 1,
        only: dict[int, dict[str, Any]] | None = None,
        longest: float = LONGEST,
        **keywords: Any,
    ) -> list[Outcome]:
        """Start ``world`` ranks, wait for all of them, and return how each ended.

        Args:
            only: more keywords for some ranks.
            longest: seconds that all of it may take.
            keywords: for all ranks.
        """
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LONGEST))
        folder = self._folder / uuid.uuid4().hex[:8]
        processes, folders = [], []
        for rank in range(world):
            out = folder / str(rank)
            out.mkdir(parents=True)
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # ours; without it rank 0 would host one on a port to be chosen
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TRAINRUN_STATE": str(out / "state"),
                "AWS_ENDPOINT_URL": self._endpoint,
            }
            own = {**keywords, **(only or {}).get(rank, {})}
            process = PROCESSES.Process(target=rank_programs.enter, args=(program, out, environment, own), daemon=True)
            process.start()
            processes.append(process)
            folders.append(out)
        self._processes += processes
        deadline = time.monotonic() + longest
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
        logs = [(out / "log").read_text() if (out / "log").exists() else "" for out in folders]
        assert not late, f"ranks {late} did not end:\n" + "\n".join(logs)
        return [
            Outcome(process.exitcode or 0, _json_or_empty(out / "result.json"), log, out)
            for process, out, log in zip(processes, folders, logs, strict=True)
        ]

    def end(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()


def _json_or_empty(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


@pytest.fixture
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RankRunner]:
    server = next((name for name in ("faults", "s3") if name in request.fixturenames), None)
    runner = RankRunner(tmp_path / "ranks", request.getfixturevalue(server).endpoint if server else "")
    yield runner
    runner.end()


@pytest.fixture(scope="module")
def lasting_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankRunner]:
    """The same for results that several tests of a module look at."""
    runner = RankRunner(tmp_path_factory.mktemp("ranks"), "")
    yield runner
    runner.end()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Opens runs of one rank in the test's own process: ``alone("--steps=3")``."""
    handler = signal.getsignal(signal.SIGTERM)

    def start(*arguments: str) -> Run:
        torch.manual_seed(0)
        return Run(settle(None, [*TINY, *arguments]), Ranks(0, 1, 0, torch.device("cpu"), None, None), tmp_path / "state")

    yield start
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def tiny() -> list[str]:
    """Overrides for a model and a batch that train in milliseconds."""
    return list(TINY)
