"""How ``trainrun checkpoint`` reads its arguments, and what it prints."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from trainrun.config import ConfigError
from trainrun.metrics.console import duration, sized
from trainrun.words import counted

if TYPE_CHECKING:
    from trainrun.checkpoint.compare import Differences
    from trainrun.checkpoint.damage import Damage
    from trainrun.checkpoint.listing import Listed
    from trainrun.checkpoint.retention import Plan

UNITS = {"": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3}


def parse_size(text: str) -> int:
    """Bytes, of "500MB" and the like.

    Raises:
        ConfigError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    size = int(float(match[1]) * UNITS.get(match[2].upper(), 0)) if match else 0
    if size < 1:
        raise ConfigError([f"{text!r} is no size. Write a number with KB, MB, GB, KiB, MiB or GiB, such as 5GB."])
    return size


def run_and_step(text: str) -> tuple[str, str]:
    """``RUN@STEP`` as both, the step "latest" where there is none."""
    match = re.fullmatch(r"(.+)@(\d+|latest)", text)
    return (match[1], match[2]) if match else (text, "latest")


def row(listed: Listed, damage: Damage | None) -> str:
    """One line of ``ls``."""
    age = age_of(listed.age_seconds)
    if listed.status in ("incomplete", "set aside"):
        what = f"attempt {listed.attempt}" if listed.attempt else ""
        return f"step {listed.step:>9}  {age:>8}  {sized(listed.bytes):>9}  {listed.status}  {what}".rstrip()
    judgement = "  verified" if damage is not None and not damage else ""
    if listed.status == "damaged":
        judgement = f"  DAMAGED: {listed.problem}"
    elif damage:
        judgement = f"  DAMAGED: {first_problem(damage)}"
    if listed.commit is None:
        return f"step {listed.step:>9}{judgement}"
    commit = listed.commit
    metric = "" if commit.metric is None else f"  metric {commit.metric:.6g}"
    spread = f"{counted(commit.world, 'rank')} x {commit.settings.get('strategy', '?')}"
    return f"step {listed.step:>9}  {age:>8}  {sized(listed.bytes):>9}  {commit.tokens:>15,} tokens  {spread}{metric}{judgement}"


def as_json(listed: Listed, damage: Damage | None) -> dict[str, Any]:
    """The same for machines. "verified" is null where the content was not read in this call."""
    mapping: dict[str, Any] = {
        "step": listed.step,
        "status": listed.status,
        "time": listed.time,
        "age_seconds": round(listed.age_seconds, 1),
        "bytes": listed.bytes,
        "attempt": listed.attempt,
        "verified": None if damage is None else not damage,
    }
    if listed.commit is not None:
        commit = listed.commit
        mapping |= {"tokens": commit.tokens, "world": commit.world, "metric": commit.metric}
        mapping |= {"strategy": commit.settings.get("strategy"), "mesh": commit.mesh}
    problem = listed.problem or (first_problem(damage) if damage else "")
    return mapping | ({"damage": problem} if problem else {})


def age_of(seconds: float) -> str:
    """Days beyond two of them, else h:mm:ss."""
    return f"{seconds / 86400:.0f} days" if seconds > 2 * 86400 else duration(seconds)


def first_problem(damage: Damage) -> str:
    """The damage in a few words."""
    tensors = f"{counted(len(damage.tensors), 'tensor')} not as written, such as {min(damage.tensors)}" if damage.tensors else ""
    return "; ".join([*damage.problems[:1], *([tensors] if tensors else [])])


def verified(listed: Listed, damage: Damage | None) -> dict[str, Any]:
    """The result of ``verify`` for one checkpoint; without ``damage`` its COMMIT could not be read."""
    if damage is None:
        return {"step": listed.step, "verified": False, "bytes": 0, "problems": [listed.problem], "tensors": {}}
    return {
        "step": listed.step,
        "verified": not damage,
        "bytes": damage.read,
        "problems": damage.problems,
        "tensors": damage.tensors,
    }


def judgement(result: dict[str, Any]) -> str:
    """The same for people: a line, and one for each damaged tensor."""
    if result["verified"]:
        return f"step {result['step']:>9}  verified, {sized(result['bytes'])} read"
    problems = "; ".join(result["problems"]) or f"{counted(len(result['tensors']), 'tensor')} not as written"
    tensors = [f"  {name}: {', '.join(keys)}" for name, keys in sorted(result["tensors"].items())]
    return "\n".join([f"step {result['step']:>9}  DAMAGED: {problems}", *tensors])


def plan(found: Plan) -> dict[str, Any]:
    """What ``prune`` does, for machines."""
    return {
        "kept": {str(step): list(reasons) for step, reasons in found.kept.items()},
        "damaged": {str(step): problem for step, problem in found.damaged.items()},
        "deleted_steps": list(found.deleted_steps),
        "objects": [item.key for item in (*found.commits, *found.objects)],
        "bytes": found.bytes,
    }


def differences(found: Differences) -> list[str]:
    """What ``diff`` prints."""
    printed = [f"{counted(found.equal, 'tensor')} the same bit for bit, {len(found.different)} not."]
    printed += [f"only in A: {name}" for name in found.only_a]
    printed += [f"only in B: {name}" for name in found.only_b]
    printed += [f"other kind: {name} is {a} in A, {b} in B" for name, (a, b) in found.kinds.items()]
    printed += [f"differs: {name} by up to {largest:.3g}" for name, largest in sorted(found.different.items())]
    printed += [f"setting {name}: {a!r} in A, {b!r} in B" for name, (a, b) in found.settings.items()]
    return printed + [f"{name}: {_short(a)} in A, {_short(b)} in B" for name, (a, b) in found.others.items()]


def differences_as_json(found: Differences) -> dict[str, Any]:
    """The same for machines; a difference that is no number is null."""
    return {
        "equal": found.equal,
        "different": {name: largest if math.isfinite(largest) else None for name, largest in found.different.items()},
        "only_a": found.only_a,
        "only_b": found.only_b,
        "kinds": found.kinds,
        "settings": found.settings,
        "others": found.others,
    }


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
