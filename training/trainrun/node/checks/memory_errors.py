"""Errors of GPU memory that a driver still knows of: uncorrectable ones, and rows that could not be or are yet to be replaced."""

from __future__ import annotations

from trainrun.node.checks.output import output_of
from trainrun.node.outcome import StepFailed
from trainrun.spec import ClusterSpec

FIELDS = {
    "ecc.errors.uncorrected.volatile.total": "uncorrectable memory errors since the driver was loaded; a reboot clears them",
    "remapped_rows.failure": "row of memory could not be replaced by a spare one: this GPU is to be replaced",
    "remapped_rows.pending": "row of memory waits for a reset to be replaced by a spare one: a reboot does that",
}
"""Fields of nvidia-smi --query-gpu, and what it means when they are neither 0 nor No
(docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/). A GPU or a driver without such a field answers [N/A]."""
NOTHING = ("0", "No", "N/A", "[N/A]", "[Not Supported]", "")


def check_memory_errors(cluster: ClusterSpec) -> str:
    """Ask the driver, as far as it knows.

    Raises:
        StepFailed: there are such errors, GPU by GPU.
    """
    if cluster.accelerator != "nvidia":
        return "no GPU memory expected"
    listing = output_of("nvidia-smi", f"--query-gpu=index,{','.join(FIELDS)}", "--format=csv,noheader")
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines() if line.strip()]
    rows = [row for row in rows if len(row) == 1 + len(FIELDS)]
    if not rows:
        return "nvidia-smi of this driver tells nothing about memory errors"
    bad = [
        f"GPU {row[0]}: {field} is {cell} ({meaning})"
        for row in rows
        for (field, meaning), cell in zip(FIELDS.items(), row[1:], strict=True)
        if cell not in NOTHING
    ]
    if bad:
        raise StepFailed(
            f"nvidia-smi shows errors of GPU memory, and a sound GPU has none: {'; '.join(bad)}. "
            "Replace the instance: others that start on this hardware may meet the same."
        )
    return f"no memory errors on {len(rows)} GPUs"
