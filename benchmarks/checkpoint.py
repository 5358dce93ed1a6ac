"""What a checkpoint costs: trainrun against torch.save + boto3 and against torch.distributed.checkpoint (DCP), in one run.

A GPT with AdamW trains by trainrun's loop; what differs is the save. Contenders take turns in an order that is drawn anew each
round, with steps without a save before and after each; medians over the rounds count. All write to a sink on this machine
(`support.sink`), never to AWS. Measured are

- the stall: the seconds in which the loop stands still because of a save, against a plain copy of the same bytes into memory that
  is there already; with steps of some 0.5 s, which leave time for the copy, and with steps of milliseconds, which do not
- the time lost by a save: the seconds of all steps until it is done, less those that as many steps take without one. The sink
  takes --megabytes-per-second, so that the upload lasts for many steps
- the time to commit, against the bare upload of the same bytes, while nothing trains, to the sink at that rate and at its fastest
- the restore into a model and an optimizer just made, from a directory and from the sink at its fastest; trainrun's is verified

    python benchmarks/checkpoint.py --json build/checkpoint.json

Peers that are no part of the project's lock are measured where `benchmarks/requirements.txt` was installed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from support.report import print_report
from support.sink import environment, running_sink
from torch import Tensor

if TYPE_CHECKING:
    from support.saves import Save
    from support.training import Trainer

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "build" / "peers"
PHASES = ("steps", "commit", "commit at the sink's fastest", "restore from a directory", "restore from S3")
BETWEEN_SECONDS = 2.0
"""Of steps without a save, between two saves."""
LONGEST_SAVE = 60.0
FASTEST = "s3://fast"

Row = dict[str, float]
Results = dict[str, list[Row]]
"""Of each contender, round by round."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="saves and restores of each contender (default: 3)")
    parser.add_argument("--parameters", type=float, default=85.0, help="millions, of 12 bytes with AdamW's moments (default: 85)")
    parser.add_argument("--sequence-length", type=int, default=64, help="tokens of a step, which make its length (default: 64)")
    parser.add_argument("--megabytes-per-second", type=int, default=300, help="what the sink takes (default: 300)")
    parser.add_argument("--ranks", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--phase", choices=PHASES, action="append", help="default: all of them")
    parser.add_argument("--few", action="store_true", help="only trainrun and the peers that lose least")
    parser.add_argument("--verbose", action="store_true", help="show what the workers say, such as each save's numbers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    results: dict[str, Any] = {}
    with running_sink() as endpoint:
        for phase in options.phase or PHASES:
            with tempfile.TemporaryDirectory() as folder:
                run_workers(phase, options, endpoint, Path(folder))
                results[phase] = json.loads(Path(folder, "result.json").read_text())
    print_report(results, options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"options": vars(options), "results": results}, indent=1, default=str) + "\n")


def run_workers(phase: str, options: argparse.Namespace, endpoint: str, folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}", __file__]
    passed = ("rounds", "parameters", "sequence_length", "megabytes_per_second", "ranks")
    command += [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in passed]
    command += [f"--phase={phase}", f"--worker={folder}", *(["--few"] if options.few else [])]
    paths = [str(PEERS), str(ROOT / "training")]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TRAINRUN_STATE": str(folder / "state")}
    began = time.monotonic()
    with (folder / "log").open("w+") as log:
        told = None if options.verbose else log
        done = subprocess.run(command, stdout=told, stderr=told, env={**environment(endpoint), **own})
        if done.returncode:
            sys.exit(f"The measurement ended with {done.returncode}:\n{(folder / 'log').read_text()[-6000:]}")
    print(f"{phase}: measured in {time.monotonic() - began:.0f} s", file=sys.stderr)


def work(options: argparse.Namespace) -> None:
    """One rank in one phase."""
    from support.training import Trainer, write_tokens

    phase, folder = options.phase[0], options.worker
    torch.set_num_threads(1)
    if os.environ["RANK"] == "0":
        (folder / "state").mkdir()
        write_tokens(folder)
        (folder / "written").touch()
    while not (folder / "written").exists():
        time.sleep(0.1)
    location = {
        "steps": f"s3://at-{options.megabytes_per_second}-steps",
        "commit": f"s3://at-{options.megabytes_per_second}-commit",
        "commit at the sink's fastest": FASTEST,
        "restore from S3": "s3://kept",
        "restore from a directory": str(folder / "checkpoints"),
    }[phase]
    shape = {name: getattr(options, name) for name in ("parameters", "sequence_length", "ranks")}
    trainer = Trainer(folder, location, **shape)
    for _ in range(2):  # the optimizer's state is made in the first
        trainer.step()
    measure: Callable[..., Any] = {"steps": measure_steps, "commit": measure_commit, "restore": measure_restore}[phase.split()[0]]
    result = measure(trainer, location, options)
    if trainer.run.ranks.first:
        (folder / "result.json").write_text(json.dumps(result))
    # Children and threads of several clients are still there; not one of them has anything left to do.
    sys.stdout.flush()
    os._exit(0)


# Steps


def measure_steps(trainer: Trainer, location: str, options: argparse.Namespace) -> dict[str, Any]:
    from support.saves import FEW, all_saves

    saves = {name: save for name, save in all_saves(trainer, FASTEST).items() if name in FEW or not options.few}
    for save in saves.values():  # the first of each starts processes and takes memory
        save_once(trainer, save)
        save.url = location
    copies = [torch.zeros_like(tensor) for tensor in trainer.tensors]
    result = {
        "bytes": sum(copy.nbytes for copy in copies),
        "long": rounds_of_steps(trainer, saves, copies, options.rounds),
    }
    if options.ranks == 1:  # with several, ddp wants the gradients that short steps have not
        trainer.gpt.short = True
        result["short"] = rounds_of_steps(trainer, {name: saves[name] for name in FEW if name in saves}, copies, options.rounds)
    return result


def plain_copy(trainer: Trainer, copies: list[Tensor]) -> float:
    """Seconds to copy what a checkpoint holds into memory that is there already, by this one thread."""
    began = time.perf_counter()
    for copy, tensor in zip(copies, trainer.tensors, strict=True):
        copy.copy_(tensor)
    return time.perf_counter() - began


def rounds_of_steps(trainer: Trainer, saves: Mapping[str, Save], copies: list[Tensor], rounds: int) -> dict[str, Any]:
    """The seconds of a step without a save, and what each save cost, beside a plain copy just before it, round by round."""
    results: Results = {name: [] for name in saves}
    source = random.Random(0)  # the same order on all ranks
    steps = [step_without(trainer)]
    for _ in range(rounds):
        for name in source.sample(list(saves), len(saves)):
            copy = plain_copy(trainer, copies)
            row = save_once(trainer, saves[name])
            row["copy"] = copy
            steps.append(step_without(trainer))
            row["lost"] = row["wall"] - row["steps"] * statistics.mean(steps[-2:])
            results[name].append(row)
            print(f"{name:<34}" + "".join(f"{column:>8} {value:<8.3f}" for column, value in row.items()), flush=True)
    return {"step": statistics.median(steps), "saves": results}


def step_without(trainer: Trainer) -> float:
    """Seconds of a step without a save: the mean, as what else the machine does falls on steps with a save too."""
    began = time.perf_counter()
    steps = 0
    while not steps or not trainer.all_agree(time.perf_counter() - began > BETWEEN_SECONDS):
        trainer.step()
        steps += 1
    return (time.perf_counter() - began) / steps


def save_once(trainer: Trainer, save: Save) -> Row:
    """Save, and train on until it is done."""
    trainer.step()  # no contender finds the checkpoint of this step there already
    trainer.before_update, trainer.stalled = save.before_update, 0.0
    began = time.perf_counter()
    trainer.stall(save.begin)
    steps = 0
    while steps < 2 or not trainer.all_agree(save.done()):
        assert time.perf_counter() - began < LONGEST_SAVE, f"{type(save).__name__} is not done"
        trainer.step()
        steps += 1
    return {"wall": time.perf_counter() - began, "stall": trainer.stalled, "steps": steps}


# Commit


def measure_commit(trainer: Trainer, location: str, options: argparse.Namespace) -> Results:
    from support.report import TRAINRUN
    from support.saves import s3, transfers

    from trainrun.store import open_store

    data = memoryview(bytearray(sum(tensor.nbytes for tensor in trainer.tensors)))
    store, client, bucket = open_store(location), s3(), location.removeprefix("s3://")

    def save() -> None:
        trainer.state.save()
        trainer.state.wait()

    calls: dict[str, Callable[[], object]] = {
        TRAINRUN: save,
        "trainrun's store, upload only": lambda: store.put("bare", data),
        "boto3, upload only": lambda: client.upload_fileobj(io.BytesIO(data), bucket, "bare-boto3", Config=transfers()),
    }
    return in_turn(calls, options.rounds, trainer.step)


# Restore


def measure_restore(trainer: Trainer, location: str, options: argparse.Namespace) -> Results:
    from support.restores import all_restores

    restores = all_restores(trainer, location)
    for restore in restores.values():
        restore.write()
    calls = {name: restore.read for name, restore in restores.items()}
    return in_turn(calls, options.rounds, trainer.optimizer.state.clear)


def in_turn(calls: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[], object]) -> Results:
    """The seconds of each call, round by round, and those of the CPU that this process spent on it; ``before`` comes before each.

    The first round does not count.
    """
    results: Results = {name: [] for name in calls}
    source = random.Random(0)
    for number in range(rounds + 1):
        for name in source.sample(list(calls), len(calls)):
            before()
            began, cpu = time.perf_counter(), time.process_time()
            calls[name]()
            if number:
                results[name].append({"wall": time.perf_counter() - began, "cpu": time.process_time() - cpu})
    return results


if __name__ == "__main__":
    main()
