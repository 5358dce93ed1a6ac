"""One dense line a step, for people."""

from __future__ import annotations

from typing import Any


def step_line(record: dict[str, Any]) -> str:
    """The line of a metrics record."""
    step, steps = record["step"], record["steps"]
    return (
        f"step {step:>{len(str(steps))}}/{steps}  {100 * step / steps:5.1f}%  loss {record['loss']:.4f}  "
        f"lr {record['learning_rate']:.2e}  norm {record['gradient_norm']:.2f}  "
        f"{scaled(record['tokens_per_second'])} tok/s  {scaled(record['tokens'])} tokens  "
        f"{record['world']} x {record['precision']}  {duration(record['seconds_left'])} left"
    )


def scaled(number: float) -> str:
    """Three digits and a unit: 81.2k."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 1000:
            return f"{number:.3g}{unit}" if abs(number) < 999.5 else f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.4g}T"


def duration(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
