"""From DeepSpeed's words to trainrun's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainrun.deepspeed_json.batch import read_batch
from trainrun.deepspeed_json.optimizer import read_optimizer, read_scheduler
from trainrun.deepspeed_json.other import read_others
from trainrun.deepspeed_json.precision import read_number_formats, read_precision
from trainrun.deepspeed_json.section import Section
from trainrun.deepspeed_json.translation import Translation
from trainrun.deepspeed_json.zero import read_zero


def translate(document: Mapping[str, Any]) -> Translation:
    """Everything that a DeepSpeed configuration says, each key read exactly once; nothing is raised."""
    into = Translation()
    top = Section(document, "deepspeed", into.problems)
    into.batch = read_batch(top)
    read_zero(top, into)
    read_precision(top, into)
    read_number_formats(top)
    read_optimizer(top, into)
    read_scheduler(top, into)
    read_others(top, into)
    top.finish()
    return into
