"""``trainrun checkpoint ls|verify|export|convert|prune|diff``: what a run has saved, whether it is whole, where else it goes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainrun.commands import checkpoint_lines as lines
from trainrun.config import ConfigError, to_mapping
from trainrun.errors import CheckpointError
from trainrun.metrics.byte_bar import ByteBar
from trainrun.metrics.console import sized
from trainrun.store import StoreError, open_store
from trainrun.words import counted

FOUND, DONE, FAILED = 1, 0, 2

Act = Callable[[argparse.Namespace], int]


def add_to(commands: Any) -> None:
    """Add the command's parser, with one below it for each of its verbs."""
    parser = commands.add_parser("checkpoint", help="list, verify, export, convert, prune or compare a run's checkpoints")
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    ls = _add(
        verbs, "ls", _ls, "list checkpoints, damaged ones, and saves that never became one", "when all is whole", _NONE_OR_BAD
    )
    ls.add_argument("--verify", action="store_true", help="read and check every byte too; otherwise only that shards are there")

    verify = _add(verbs, "verify", _verify, "read every tensor, and name those that are damaged", "when all is whole", _BAD)
    which = verify.add_mutually_exclusive_group()
    which.add_argument("step", nargs="?", default="latest", metavar="STEP", help="a step, or latest (the default)")
    which.add_argument("--all", action="store_true", help="all of the run's checkpoints")

    export = _add(verbs, "export", _export, "write the model as Hugging Face's transformers reads it", "when written", _BAD)
    export.add_argument("step", metavar="STEP", help="a step, or latest")
    export.add_argument("target", metavar="DIR", help="an empty or new folder, or s3://bucket/prefix")
    export.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="", help="of the weights (default: as saved)"
    )
    export.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file, such as 500MB (default: 5GB)")
    export.add_argument("--model", default="", metavar="DIR", help="folder of the model that was fine-tuned, if it was moved")
    export.add_argument("--tokenizer", default="", metavar="DIR", help="folder of the data's tokenizer, for a pretrained model")
    export.add_argument("--force", action="store_true", help="replace what is in DIR")

    convert = _add(
        verbs,
        "convert",
        _convert,
        "make a checkpoint of DeepSpeed (ZeRO 1, 2, 3) or of torch.distributed.checkpoint one of trainrun's",
        "when it is committed",
        "",
        run=False,
    )
    convert.add_argument("source", metavar="SOURCE", help="the folder: a directory or an s3:// URL")
    convert.add_argument("target", metavar="LOCATION/RUN", help="the run's folder that is to have it")
    convert.add_argument("--step", type=int, default=None, help="steps done, where the source does not say")
    convert.add_argument("--settings", metavar="FILE", help="the training's settings, recorded for evaluate, generate and export")
    convert.add_argument("--rename", action="append", default=[], metavar="PATTERN=TEXT", help="change parameters' names (regex)")
    convert.add_argument("--drop", metavar="PATTERN", help="leave parameters whose (new) names have a match (regex)")
    convert.add_argument("--parameters-only", action="store_true", help="leave the optimizer's state")

    prune = _add(
        verbs, "prune", _prune, "delete all but some checkpoints; without --yes only say which", "when done", "does not occur"
    )
    prune.add_argument("--keep", type=int, required=True, metavar="N", help="newest checkpoints that stay; 2 or more")
    prune.add_argument("--keep-every", type=int, default=0, metavar="M", help="also keep the first at or after each M steps")
    prune.add_argument("--keep-best", type=int, default=0, metavar="N", help="also keep the N of the best metric")
    prune.add_argument("--best", choices=("lowest", "highest"), help="which metric is best; else as the run was set")
    choice = prune.add_mutually_exclusive_group()
    choice.add_argument("--dry-run", action="store_true", help="delete nothing (the default)")
    choice.add_argument("--yes", action="store_true", help="delete")

    diff = _add(verbs, "diff", _diff, "compare two checkpoints", "when they are the same", "when they differ", run=False)
    diff.add_argument("a", metavar="RUN[@STEP]", help="the run's folder, and a step; the newest without one")
    diff.add_argument("b", metavar="RUN[@STEP]|STEP", help="another, or another step of the same run")


_BAD = "when a checkpoint is damaged"
_NONE_OR_BAD = "when something is damaged or there is no checkpoint"


def _add(verbs: Any, name: str, act: Act, text: str, good: str, bad: str, *, run: bool = True) -> argparse.ArgumentParser:
    """The parser of a verb, which says what its exit codes 0 (``good``) and 1 (``bad``) mean."""
    codes = f"Exit code: 0 {good}, {f'1 {bad}, ' if bad else ''}2 when it could not be done."
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=codes)
    if run:
        parser.add_argument("run", metavar="LOCATION/RUN", help="the run's folder: a directory or an s3:// URL")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(act=lambda options: _guarded(act, options))
    return parser


def _guarded(act: Act, options: argparse.Namespace) -> int:
    """Tell what could not be done apart from what was found."""
    from trainrun.checkpoint.layout import Damaged

    try:
        return act(options)
    except Damaged as error:
        print(f"trainrun: the checkpoint is damaged: {error}", file=sys.stderr)
        return FOUND
    except (ConfigError, CheckpointError, StoreError, OSError) as error:
        print(f"trainrun: {error}", file=sys.stderr)
        return FAILED


def _ls(options: argparse.Namespace) -> int:
    from trainrun.checkpoint.listing import list_checkpoints

    store = open_store(options.run)
    rows = list_checkpoints(store)
    damage = {}
    if options.verify:
        whole = [row.commit for row in rows if row.commit is not None]
        damage = _find_damage(store, whole)
    if options.json:
        print(json.dumps([lines.as_json(row, damage.get(row.step)) for row in rows]))
    else:
        for row in rows:
            print(lines.row(row, damage.get(row.step)))
        if rows and not options.verify:
            print("Shards are there with their lengths; their content was not read (--verify does).", file=sys.stderr)
    if not any(row.status in ("committed", "damaged") for row in rows):
        print(f"There is no checkpoint at {store.url}.", file=sys.stderr)
        return FOUND
    return FOUND if any(row.status == "damaged" for row in rows) or any(damage.values()) else DONE


def _verify(options: argparse.Namespace) -> int:
    from trainrun.checkpoint.listing import choose_step, list_checkpoints

    store = open_store(options.run)
    rows = list_checkpoints(store, None if options.all else choose_step(store, options.step))
    damage = _find_damage(store, [row.commit for row in rows if row.commit is not None])
    rows = [row for row in rows if row.status in ("committed", "damaged")]
    results = [lines.verified(row, damage.get(row.step)) for row in rows]
    if options.json:
        print(json.dumps(results))
    else:
        for result in results:
            print(lines.judgement(result))
    if not results:
        raise CheckpointError(f"There is no checkpoint at {store.url}.")
    return DONE if all(result["verified"] for result in results) else FOUND


def _find_damage(store: Any, commits: list[Any]) -> dict[int, Any]:
    from trainrun.checkpoint.damage import find_damage

    with ByteBar("verified", sum(commit.bytes for commit in commits)) as bar:
        return {commit.step: find_damage(store, commit, done=bar.add) for commit in commits}


def _export(options: argparse.Namespace) -> int:
    from trainrun.checkpoint.export import export
    from trainrun.checkpoint.listing import choose

    store = open_store(options.run)
    commit = choose(store, options.step)
    weights = {name: entry for shard in commit.shards for name, entry in shard.tensors.items() if name.startswith("model/")}
    with ByteBar("exported", sum(entry.length for entries in weights.values() for entry in entries)) as bar:
        remarks = export(
            store,
            commit,
            options.target,
            dtype=options.dtype,
            largest_file=lines.parse_size(options.max_shard_size),
            model=options.model,
            tokenizer=options.tokenizer,
            force=options.force,
            done=bar.add,
        )
    if options.json:
        print(json.dumps({"step": commit.step, "target": options.target, "remarks": remarks}))
        return DONE
    for remark in remarks:
        print(remark, file=sys.stderr)
    print(f"The model of step {commit.step} was written to {options.target}.")
    return DONE


def _convert(options: argparse.Namespace) -> int:
    from trainrun.checkpoint.convert import Choice, convert, open_foreign, parse_pattern, parse_rename
    from trainrun.settle import settle

    choice = Choice(
        renames=[parse_rename(text) for text in options.rename],
        drop=parse_pattern(options.drop) if options.drop else None,
        parameters_only=options.parameters_only,
    )
    settings = to_mapping(settle(Path(options.settings), [])) if options.settings else None
    source = open_foreign(open_store(options.source))
    with ByteBar("converted", source.bytes) as bar:
        result = convert(
            source,
            open_store(options.target),
            step=options.step,
            settings=settings,
            choice=choice,
            done=bar.add,
        )
    if options.json:
        told = {"step": result.commit.step, "bytes": result.commit.bytes, "format": result.format, "remarks": result.remarks}
        print(json.dumps(told))
        return DONE
    for remark in result.remarks:
        print(remark, file=sys.stderr)
    print(f"Step {result.commit.step} ({result.format}, {sized(result.commit.bytes)}) was committed to {options.target}.")
    return DONE


def _prune(options: argparse.Namespace) -> int:
    from trainrun.checkpoint.listing import retention_settings
    from trainrun.checkpoint.retention import Retention

    store = open_store(options.run)
    settings = retention_settings(
        store, keep=options.keep, keep_every=options.keep_every, keep_best=options.keep_best, best=options.best
    )
    retention = Retention(store, settings)
    plan = retention.prune() if options.yes else retention.plan()
    if options.json:
        print(json.dumps({**lines.plan(plan), "deleted": bool(options.yes)}))
        return DONE
    for step, reasons in plan.kept.items():
        print(f"keep    step {step:>9}  ({', '.join(reasons)})")
    for step, problem in plan.damaged.items():
        print(f"damaged step {step:>9}  {problem}")
    for step in plan.deleted_steps:
        print(f"delete  step {step:>9}")
    leftovers = len(plan.commits) + len(plan.objects)
    what = f"{counted(len(plan.deleted_steps), 'checkpoint')} and {counted(leftovers, 'object')}, {sized(plan.bytes)}"
    if not plan.deleted_steps and not leftovers:
        print("Nothing to delete.")
    else:
        print(f"Deleted: {what}." if options.yes else f"Would be deleted: {what}. Give --yes to delete it.")
    return DONE


def _diff(options: argparse.Namespace) -> int:
    from trainrun.checkpoint.compare import Side, compare
    from trainrun.checkpoint.listing import choose

    run, step = lines.run_and_step(options.a)
    other_run, other_step = (run, options.b) if options.b.isdecimal() else lines.run_and_step(options.b)
    sides = []
    for location, wanted in ((run, step), (other_run, other_step)):
        store = open_store(location)
        sides.append(Side(store, choose(store, wanted)))
    with ByteBar("compared", sides[0].commit.bytes) as bar:
        found = compare(sides[0], sides[1], done=bar.add)
    if options.json:
        print(json.dumps(lines.differences_as_json(found)))
    else:
        print("\n".join(lines.differences(found)))
    return FOUND if found else DONE
