"""The bar of commands that move bytes: on terminals only, and right whichever thread tells it."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from trainrun.metrics.byte_bar import ByteBar


def test_bytes_are_shown_on_a_terminal_and_gone_at_the_end(terminal: Any) -> None:
    terminal.connect()
    terminal.resize(120)
    with ByteBar("verified", 8 * 1024**2) as bar:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(bar.add, [1024**2] * 8))
        (line,) = terminal.screen()
        assert re.fullmatch(r"\[#{40}\] 8 MiB of 8 MiB verified  \S+ \w+/s  0:00 left", line)
        bar.add(1024**3)  # an estimate that was too low
        assert "8 MiB of 8 MiB verified" in terminal.screen()[0]
        print("a line above")
    assert terminal.screen() == ["a line above", ""]


def test_without_a_terminal_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with ByteBar("verified", 0) as bar:
        bar.add(5)
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "")
