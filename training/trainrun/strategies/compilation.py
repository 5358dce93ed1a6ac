"""torch.compile of a model's units."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from torch import nn

from trainrun.config import ConfigError


def compile_units(units: Sequence[nn.Module]) -> None:
    """Compile each unit at its first call; equal units share the compiled code.

    Raises:
        ConfigError: no C++ compiler, without which the first call would fail.
    """
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            [
                f"compile is true, but this machine has no C++ compiler ({compiler} is not on PATH), which torch.compile needs. "
                "Install one, name it by $CXX, or set compile to false."
            ]
        )
    for unit in units:
        unit.compile()
