"""`tests/gpu.sh` on a machine without a GPU: its parts work, a part that fails stops no other one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("gpu.sh")
PARTS = [
    "environment",
    "gpu-tests",
    "kernels",
    "exact",
    "runs",
    "decode",
    "prefill",
    "train",
    "copies",
    "profile",
]


def run(*words, **environment):
    command = ["bash", str(SCRIPT), *map(str, words)]
    given = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=1800, check=False)


def test_an_unknown_option_is_refused_by_name():
    done = run("--dryrun")
    assert done.returncode == 2 and "unknown option --dryrun" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_without_a_gpu_the_command_says_what_can_be_run():
    done = run()
    assert done.returncode == 2 and "--dry-run" in done.stderr


def test_the_limits_of_the_parts_leave_nine_minutes_at_most():
    limits = re.findall(r"^(?:\(\(dry\)\) \|\| )?(?:part|tests|figures) \S+ (\d+)", SCRIPT.read_text(), re.MULTILINE)
    assert len(limits) == len(PARTS) + 1
    assert sum(map(int, limits)) <= 9 * 60 - 10


def test_a_part_that_fails_stops_no_other_one_and_is_named_in_the_table(tmp_path):
    path = tmp_path / "table.json"
    done = run("--dry-run", "--json", path, PYTHON="false", LOGS=str(tmp_path / "logs"))
    assert done.returncode == 1
    table = done.stdout.partition("seconds\n")[2].splitlines()
    assert [line.split()[:2] for line in table[:-1]] == [[part, "failed"] for part in PARTS]


@pytest.mark.slow
def test_the_dry_run_goes_through_all_parts_and_writes_their_figures(tmp_path):
    path = tmp_path / "table.json"
    done = run("--dry-run", "--json", path, LOGS=str(tmp_path / "logs"))
    assert done.returncode == 0, done.stdout
    parts = {part["part"]: part for part in json.loads(path.read_text())}
    assert [*parts] == PARTS and all(part["result"] in ("ok", "nothing to run") for part in parts.values())
    for name in ("environment", "exact", "runs", "decode", "prefill", "train", "copies", "profile"):
        assert parts[name]["figures"], name
