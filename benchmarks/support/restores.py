"""Ways to write a checkpoint, and to restore it into a model and an optimizer just made: trainrun's and its peers'."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from support.saves import PART, is_there, plain_state, s3, s3fs_writer, s3torchconnector_writer, transfers
from support.training import Trainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Restore(NamedTuple):
    """One way to restore, and to write what is restored."""

    write: Callable[[], object]
    read: Callable[[], object]


def all_restores(trainer: Trainer, location: str) -> dict[str, Restore]:
    """Every way that this installation has, by its name, at ``location``: a bucket or a directory."""
    restores = {"trainrun, verified": Restore(lambda: trainer.state.save(now=True), trainer.state.resume)}
    if location.startswith("s3://"):
        bucket = location.removeprefix("s3://")
        restores["torch.load + boto3"] = Restore(
            lambda: s3().upload_fileobj(_saved(trainer), bucket, "torch", Config=transfers()),
            lambda: _load_plain(trainer, _downloaded(bucket, "torch")),
        )
        if is_there("s3torchconnector"):
            restores["DCP load, s3torchconnector"] = _dcp(
                trainer, s3torchconnector_writer(f"{location}/dcp"), partial(_s3torchconnector_reader, f"{location}/dcp")
            )
        if is_there("s3fs"):
            restores["DCP load, s3fs"] = _dcp(trainer, s3fs_writer(f"{location}/fs"), partial(_s3fs_reader, f"{location}/fs"))
    else:
        restores["torch.load"] = Restore(
            lambda: torch.save(plain_state(trainer), f"{location}/torch"),
            lambda: _load_plain(trainer, f"{location}/torch"),
        )
        folder = f"{location}/dcp"
        restores["DCP load"] = _dcp(trainer, dcp.FileSystemWriter(folder), partial(dcp.FileSystemReader, folder))
    return restores


def _dcp(trainer: Trainer, writer: Any, reader: Callable[[], Any]) -> Restore:
    def read() -> None:
        model, optimizer = get_state_dict(trainer.gpt, trainer.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, storage_reader=reader(), process_group=trainer.group)
        set_state_dict(trainer.gpt, trainer.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def write() -> None:
        model, optimizer = get_state_dict(trainer.gpt, trainer.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, storage_writer=writer, process_group=trainer.group)

    return Restore(write, read)


def _s3torchconnector_reader(url: str) -> Any:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader

    options = S3ClientConfig(force_path_style=True, part_size=PART)
    return S3StorageReader(region="us-east-1", path=f"{url}/", s3client_config=options)


def _s3fs_reader(url: str) -> Any:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(url)


def _saved(trainer: Trainer) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(plain_state(trainer), file)
    file.seek(0)
    return file


def _downloaded(bucket: str, key: str) -> io.BytesIO:
    file = io.BytesIO()
    s3().download_fileobj(bucket, key, file, Config=transfers())
    file.seek(0)
    return file


def _load_plain(trainer: Trainer, file: Any) -> None:
    states = torch.load(file, map_location="cpu", weights_only=True)
    trainer.gpt.load_state_dict(states["model"])
    trainer.optimizer.load_state_dict(states["optimizer"])
