"""The file of samples has each step once and whole, and a bound on its size."""

import json
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.trainer.record import samples_file
from headrace.trainer.record.samples_file import SamplesFile, whole_lines


def line(step: int, number: int, size: int = 0) -> bytes:
    return json.dumps({"step": step, "number": number, "text": "x" * size}, separators=(",", ":")).encode()


def steps_in(path: Path) -> list[int]:
    return [json.loads(each)["step"] for each in path.read_bytes().splitlines()]


def test_steps_that_will_be_written_again_are_removed_and_a_torn_line_too(tmp_path: Path):
    file = SamplesFile(tmp_path, 0, 10)
    for step in (1, 2, 3):
        file.write([line(step, 0), line(step, 1)])
    file.close()
    with file.path.open("ab") as torn:
        torn.write(line(4, 0)[:-3])
    again = SamplesFile(tmp_path, 2, 10)
    assert steps_in(file.path) == [1, 1, 2, 2]
    again.write([line(3, 7)])
    again.close()
    assert steps_in(file.path) == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("num_steps", [40, 400, 1100])
def test_a_long_run_keeps_steps_from_its_beginning_to_its_end_within_the_bound(tmp_path: Path, num_steps: int):
    most = 40_000
    file = SamplesFile(tmp_path, 0, 10, most_bytes=most)
    largest = 0
    for step in range(1, num_steps + 1):
        file.write([line(step, 0, 400), line(step, 1, 400)])
        largest = max(largest, file.path.stat().st_size)
    file.close()
    steps = steps_in(file.path)
    assert largest <= most and steps == sorted(steps)
    kept = sorted({*steps})
    assert [steps.count(step) for step in kept] == [2] * len(kept), "whole steps"
    assert kept[0] == 1 and kept[-1] == num_steps
    gaps = [after - before for before, after in pairwise(kept)]
    assert max(gaps) <= max(4 * num_steps * 900 // most, 1), "evenly spread"
    assert len(kept) * 900 >= most // 5


@pytest.mark.parametrize("why", ["no room", "an error of the disk", "one large step"])
def test_a_file_that_cannot_be_thinned_stays_whole_and_is_tried_again_once_it_has_grown_by_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
):
    tried_at: list[int] = []

    def reads(path: Path, is_wanted: Callable[[int], bool]) -> Iterator[bytes]:
        tried_at.append(path.stat().st_size)
        return whole_lines(path, is_wanted)

    sizes = [40_000] if why == "one large step" else []
    if why == "no room":
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=0, f_frsize=4096))
    elif why == "an error of the disk":
        (tmp_path / "samples.new").mkdir()  # stands for a disk that takes no new file
        monkeypatch.setattr(samples_file, "is_unwritable", lambda error: isinstance(error, IsADirectoryError))
        monkeypatch.setattr(Path, "unlink", lambda self, missing_ok: None)
    file = SamplesFile(tmp_path, 0, 10, most_bytes=2_000)
    monkeypatch.setattr(samples_file, "whole_lines", reads)
    for step, size in enumerate([*sizes, *[800] * 20], 1):
        file.write([line(step, 0, size)])
    file.close()
    if why == "one large step":
        assert len(tried_at) < 8 and steps_in(file.path)[0] == 1
    else:
        assert steps_in(file.path) == [*range(1, 21)]
        assert len({*tried_at}) == len(tried_at) == 5, "each attempt reads the file once where there is no room"
        assert all(after > 1.5 * before for before, after in pairwise(tried_at))
