"""Numbers in sentences."""

from __future__ import annotations

import pytest

from trainrun.words import counted


@pytest.mark.parametrize(("number", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks")])
def test_one_is_not_many(number: int, text: str) -> None:
    assert counted(number, "rank") == text
