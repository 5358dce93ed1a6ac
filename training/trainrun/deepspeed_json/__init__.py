"""DeepSpeed JSON files that people already have, read into trainrun's settings. Standard library only, for the CDK side.

Names, types and defaults are those of DeepSpeed 0.19's own configuration classes. docs/deepspeed.md says what becomes of what.
"""

from trainrun.deepspeed_json.batch import BatchSizes
from trainrun.deepspeed_json.document import read_document
from trainrun.deepspeed_json.layer import batch_sizes, whole_batch, with_deepspeed
from trainrun.deepspeed_json.translate import translate
from trainrun.deepspeed_json.translation import Translation
from trainrun.deepspeed_json.tuning import engine_tuning, remarks

__all__ = [
    "BatchSizes",
    "Translation",
    "batch_sizes",
    "engine_tuning",
    "read_document",
    "remarks",
    "translate",
    "whole_batch",
    "with_deepspeed",
]
