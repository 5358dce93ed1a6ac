"""Ways to save the training's state in a bucket: trainrun's and its peers'."""

from __future__ import annotations

import abc
import importlib.util
import io
import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import torch
import torch.distributed.checkpoint as dcp
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from support.report import NICED, TRAINRUN
from support.sink import MIB
from support.training import Trainer
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

PART = 32 * MIB


class Save(abc.ABC):
    """One way to save."""

    def __init__(self, trainer: Trainer, url: str) -> None:
        self.trainer, self.url = trainer, url
        self._number = 0

    @abc.abstractmethod
    def begin(self) -> None:
        """Save the present state. Training goes on when this returns."""

    def before_update(self) -> None:  # noqa: B027 - nothing to do for most
        """Is called when the optimizer is about to change the state."""

    def done(self) -> bool:
        """Whether the checkpoint is written; raises when it could not be."""
        return True

    def new_url(self) -> str:
        """Where the next checkpoint goes."""
        self._number += 1
        return f"{self.url}/{type(self).__name__}-{id(self)}-{self._number}"


class Trainrun(Save):
    """``state.save()``, and the wait in ``run.step()``."""

    def __init__(self, trainer: Trainer, url: str) -> None:
        super().__init__(trainer, url)
        before_update = trainer.state.before_update
        trainer.state.before_update = lambda: trainer.stall(before_update)  # type: ignore[method-assign]

    def begin(self) -> None:
        self._step = self.trainer.run.completed
        self.trainer.state.save()

    def done(self) -> bool:
        return self.trainer.state.saved_step == self._step


class TorchSave(Save):
    """torch.save into memory, and boto3's upload of it, by rank 0."""

    def begin(self) -> None:
        if self.trainer.run.ranks.first:
            file = io.BytesIO()
            torch.save(plain_state(self.trainer), file)
            file.seek(0)
            bucket, _, key = self.new_url().removeprefix("s3://").partition("/")
            s3().upload_fileobj(file, bucket, key, Config=transfers())


class DCP(Save):
    """torch.distributed.checkpoint in each of its ways.

    Args:
        writer: makes the storage writer of a URL.
        method: None is synchronous.
        stager: makes the stager that is kept from save to save; None leaves it to DCP, which makes one for each.
        nice: of the process that writes.
    """

    def __init__(
        self,
        trainer: Trainer,
        url: str,
        *,
        writer: Callable[[str], Any],
        method: AsyncCheckpointerType | None = None,
        stager: Callable[[], DefaultStager] | None = None,
        nice: int = 0,
    ) -> None:
        super().__init__(trainer, url)
        self._writer, self._method, self._nice = writer, method, nice
        self._stager = stager() if stager else None
        self._staged: Future[Any] | None = None
        self._written: Future[Any] | None = None
        self._child: Any = None

    def begin(self) -> None:
        model, optimizer = get_state_dict(self.trainer.gpt, self.trainer.optimizer)
        states = {"model": model, "optimizer": optimizer}
        writer = self._writer(self.new_url())
        if self._method is None:
            dcp.save(states, storage_writer=writer, process_group=self.trainer.group)
            return
        executor._CHECKPOINT_PROCESS = self._child  # it keeps one for all
        answer = dcp.async_save(
            states,
            storage_writer=writer,
            process_group=self.trainer.group,
            async_checkpointer_type=self._method,
            async_stager=self._stager,
        )
        if isinstance(answer, Future):
            self._written = answer
        else:
            self._staged, self._written = answer.staging_completion, answer.upload_completion

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def done(self) -> bool:
        if self._written is None:
            return True
        if not self._written.done():
            return False
        self._written.result()
        if self._method is AsyncCheckpointerType.PROCESS and self._child is None:
            self._child = executor._CHECKPOINT_PROCESS
            for thread in Path(f"/proc/{self._child._save_process.pid}/task").iterdir() if self._nice else ():
                os.setpriority(os.PRIO_PROCESS, int(thread.name), self._nice)
        return True


def s3torchconnector_writer(url: str) -> Any:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageWriter

    options = S3ClientConfig(force_path_style=True, part_size=PART)
    return S3StorageWriter(region="us-east-1", path=f"{url}/", s3client_config=options)


def s3fs_writer(url: str) -> Any:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter(url, sync_files=False)  # True would sync all of this machine's disks: a file in S3 has no fsync


FEW = (TRAINRUN, "DCP async, thread", "DCP async, process, kept stager", NICED)
"""Trainrun's and those that lose least."""


def all_saves(trainer: Trainer, url: str) -> dict[str, Save]:
    """Every way that this installation has, by its name."""
    saves: dict[str, Save] = {TRAINRUN: Trainrun(trainer, url)}
    thread, process = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
    cached = partial(DefaultStager, StagingOptions(False, True, False, False))  # shared memory that is kept
    if is_there("s3torchconnector"):
        way = partial(DCP, trainer, url, writer=s3torchconnector_writer)
        saves["DCP async, thread"] = way(method=thread)
        saves["DCP async, process, kept stager"] = way(method=process, stager=cached)
        saves[NICED] = way(method=process, stager=cached, nice=19)
        saves["DCP async, process"] = way(method=process)
        saves["DCP save"] = way()
    saves["torch.save + boto3"] = TorchSave(trainer, url)
    if is_there("s3fs"):
        way = partial(DCP, trainer, url, writer=s3fs_writer)
        saves["DCP async, thread, s3fs"] = way(method=thread)
        saves["DCP save, s3fs"] = way()
    return saves


def plain_state(trainer: Trainer) -> dict[str, Any]:
    """What one hands to torch.save."""
    return {"model": trainer.gpt.state_dict(), "optimizer": trainer.optimizer.state_dict()}


def s3() -> Any:
    """boto3's client at its best over http, for a server on this machine."""
    return boto3.client("s3", config=Config(s3={"addressing_style": "path", "payload_signing_enabled": False}))


def transfers() -> TransferConfig:
    return TransferConfig(multipart_chunksize=PART, multipart_threshold=PART, max_concurrency=8)


def is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
