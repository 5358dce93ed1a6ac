"""A disk that is full costs metric lines, and no run."""

from __future__ import annotations

import errno
import json

from trainrun.metrics.lines import MetricLines


class FullDisk:
    """Takes some bytes and no more, as a file system does that is full."""

    def __init__(self, file, room):
        self._file, self.room = file, room

    def write(self, data):
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._file.write(data[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_lines_are_whole_or_not_there_and_go_on_when_there_is_room(tmp_path, capsys):
    lines = MetricLines(tmp_path)
    lines.write({"step": 1})
    disk = lines._file = FullDisk(lines._file, room=20)
    lines.write({"step": 2})
    lines.write({"step": 3})
    disk.room = 10_000
    lines.write({"step": 4})
    lines.close()
    (file,) = tmp_path.glob("*.jsonl")
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 4]
    assert capsys.readouterr().err.count("WARNING: metric lines are lost while") == 1
