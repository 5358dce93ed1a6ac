"""What the demo leaves to look at: summary.json and loss.png."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from demo.run_view import RunView


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    path.write_text(json.dumps(summary, indent=2, sort_keys=True) + "\n")


def draw_loss(path: Path, view: RunView, summary: dict[str, Any]) -> None:
    """Training loss in bits per byte, with the commits, the kill and the two baselines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    steps, losses = zip(*view.loss_curve(), strict=True)
    axes.plot(steps, [loss / math.log(2) for loss in losses], linewidth=1, label="training")
    for name, style in (("unigram", ":"), ("bigram", "--")):
        axes.axhline(summary["baselines"][name], linestyle=style, color="gray", label=f"{name}, held out")
    axes.plot(steps[-1], summary["held_out_bits_per_byte"], "o", color="tab:green", label="model, held out")
    for kill in summary["kills"]:
        axes.axvline(kill["at_step"], color="tab:red", linewidth=1, label=f"node {kill['instance_id']} killed")
    axes.plot(view.commits, [axes.get_ylim()[0]] * len(view.commits), "^", color="tab:orange", label="checkpoints", clip_on=False)
    axes.set(xlabel="step", ylabel="bits per byte", title="GPT on the Python standard library, by two nodes")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
