"""Makes `resharding` importable by name, for the tests here and for the ranks that they start."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
