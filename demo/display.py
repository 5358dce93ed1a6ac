"""One progress display: a live one on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import indent

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_LINE_EVERY_SECONDS = 5.0


def clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes}:{rest:02d}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Display:
    """Phases with their seconds, and below the current one whatever it shows of itself."""

    def __init__(self, title: str) -> None:
        self.console = Console(highlight=False)
        self.title = title
        self.seconds: dict[str, float] = {}
        self._started = time.monotonic()
        self._current: tuple[str, float] | None = None
        self._done: list[Text] = []
        self._detail = Text()
        self._share: float | None = None
        self._last_plain = 0.0
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4)

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._live.start()
        else:
            self.console.print(self.title, soft_wrap=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    @contextmanager
    def phase(self, name: str, text: str) -> Iterator[None]:
        """Show `text` while the block runs, and its seconds under `name` when it is done."""
        start = time.monotonic()
        self._current = (text, start)
        if not self.console.is_terminal:
            self.console.print(f"... {text}", soft_wrap=True)
        try:
            yield
        except BaseException:
            self.note(f"✗ {text}", style="red")
            raise
        finally:
            self._current, self._detail, self._share = None, Text(), None
        self.seconds[name] = round(time.monotonic() - start, 2)
        self.note(f"✓ {text}", style="green", seconds=self.seconds[name])

    def note(self, text: str, *, style: str = "", seconds: float | None = None) -> None:
        """A line that stays."""
        line = Text(text if seconds is None else f"{text}  {seconds:.1f} s", style=style)
        self._done.append(line)
        if not self.console.is_terminal:
            self.console.print(line, soft_wrap=True)

    def show(self, text: str, *, share: float | None = None) -> None:
        """What the current phase shows of itself; `share` between 0 and 1 draws a bar."""
        self._detail, self._share = Text(text), share
        now = time.monotonic()
        if not self.console.is_terminal and text and now - self._last_plain >= PLAIN_LINE_EVERY_SECONDS:
            self._last_plain = now
            self.console.print(indent(text, "    "), soft_wrap=True)

    def _render(self) -> Group:
        parts: list[Text | Table] = [Text(f"{self.title}   {clock(time.monotonic() - self._started)}", style="bold")]
        parts += self._done
        if self._current:
            text, start = self._current
            parts.append(Text(f"▸ {text}  {time.monotonic() - start:.0f} s", style="cyan"))
            if self._share is not None:
                bar = Table.grid()  # a bar alone does not end its line
                bar.add_row(ProgressBar(total=1.0, completed=self._share, width=60))
                parts.append(bar)
            parts.append(self._detail)
        return Group(*parts)
