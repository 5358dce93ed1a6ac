"""What benchmarks/checkpoint.py prints: tables of medians, and which goals they meet."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

TRAINRUN, NICED = "trainrun", "the same, its child at nice 19"

MOST_STALL_SECONDS = 0.010
MOST_STALL_COPIES = 1.2
MOST_LOST = 0.5
"""Of what the best peer loses."""
MOST_COMMIT = 1.25
"""Of the bare upload."""

Results = Mapping[str, Sequence[Mapping[str, float]]]


def print_report(results: Mapping[str, Any], options: argparse.Namespace) -> None:
    """All phases that were measured."""
    goals: list[str] = []
    for phase, result in results.items():
        if phase == "steps":
            goals += print_steps(result, options)
        elif phase.startswith("commit"):
            goals += print_walls(phase, result, most=MOST_COMMIT)
        else:
            goals += print_walls(phase, result, most=1.0)
    print("\nGoals")
    for goal in goals:
        print(goal)


def print_steps(result: Mapping[str, Any], options: argparse.Namespace) -> Iterable[str]:
    """The stall and the time lost; the goals."""
    size, rate = result["bytes"] / 1e9, options.megabytes_per_second
    print(f"State of {size:.2f} GB, ranks: {options.ranks}, to a sink that takes {rate} MB/s")
    for kind in ("long", "short"):
        if kind in result:
            part = result[kind]
            title = f"steps of {1000 * part['step']:.0f} ms"
            print(f"\n{title:<34}{'stall ms':>10}{'copy ms':>10}{'lost s':>10}{'done s':>10}{'steps':>10}")
            for name, rows in part["saves"].items():
                columns = ("stall", "copy", "lost", "wall", "steps")
                stall, copy, lost, wall, steps = (median(rows, column) for column in columns)
                print(f"{name:<34}{1000 * stall:>10.1f}{1000 * copy:>10.0f}{lost:>10.2f}{wall:>10.2f}{steps:>10.0f}")
            yield from goals_of_steps(kind, part["saves"])


def goals_of_steps(kind: str, saves: Results) -> Iterable[str]:
    stall = median(saves[TRAINRUN], "stall")
    if kind == "long":
        yield goal(f"stall where the copy overlaps: {1000 * stall:.1f} ms", stall, MOST_STALL_SECONDS, "10 ms")
    else:
        copies = statistics.median(row["stall"] / row["copy"] for row in saves[TRAINRUN])
        name = f"stall where it cannot: {1000 * stall:.0f} ms, {copies:.2f} of the plain copy just before it"
        yield goal(name, copies, MOST_STALL_COPIES, f"{MOST_STALL_COPIES}")
    lost = {name: median(rows, "lost") for name, rows in saves.items()}
    own, niced = lost.pop(TRAINRUN), lost.pop(NICED, None)
    if lost:
        best = min(lost, key=lost.__getitem__)
        name = f"lost, {kind} steps: {own:.2f} s, {own / lost[best]:.2f} of {best}"
        yield goal(name, own, MOST_LOST * lost[best], f"{MOST_LOST}")
    if niced is not None:
        yield goal(f"lost, {kind} steps: {own:.2f} s, against DCP with its child at nice 19", own, niced, f"{niced:.2f} s")


def print_walls(phase: str, result: Results, *, most: float) -> Iterable[str]:
    """Seconds of each, and those of the CPU in this process alone; trainrun's against the least of the others."""
    walls = {name: median(rows, "wall") for name, rows in result.items()}
    print(f"\n{phase:<34}{'s':>10}{'least':>10}{'most':>10}{'CPU s':>10}")
    for name, rows in result.items():
        seconds = [row["wall"] for row in rows]
        print(f"{name:<34}{walls[name]:>10.2f}{min(seconds):>10.2f}{max(seconds):>10.2f}{median(rows, 'cpu'):>10.2f}")
    own = next(walls.pop(name) for name in list(walls) if name.startswith(TRAINRUN))
    best = min(walls, key=walls.__getitem__)
    yield goal(f"{phase}: {own:.2f} s, {own / walls[best]:.2f} of {best}", own, most * walls[best], f"{most}")


def goal(name: str, value: float, most: float, said: str) -> str:
    """A line."""
    return f"{'met   ' if value <= most else 'MISSED'}  {name} (goal: at most {said})"


def median(rows: Sequence[Mapping[str, float]], column: str) -> float:
    """Over the rounds."""
    return statistics.median(row[column] for row in rows)
