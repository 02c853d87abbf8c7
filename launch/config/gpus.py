"""The GPUs of a host that a run may use, found without a CUDA context, which would take memory of each of them."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...comm.environment import VISIBLE_DEVICES
from ...comm.errors import SettingError

_PLACES = ("/usr/bin", "/usr/local/nvidia/bin", "/usr/lib/wsl/lib")
"""Folders of nvidia-smi in images whose PATH leaves them out."""
_QUERY = ("--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
_GB = 1e9
_DRIVER = Path("/dev")
"""Where the driver has a file `nvidia<N>` for each GPU that this process may open."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of a host, by their names in `CUDA_VISIBLE_DEVICES`. `gb` is the memory of the smallest, 0 if unknown."""

    names: tuple[str, ...] = ()
    gb: float = 0.0

    @classmethod
    def of_this_host(cls) -> "Gpus":
        """The GPUs in the job's `CUDA_VISIBLE_DEVICES`; if it is not set, all that nvidia-smi or else the driver shows."""
        sizes = _from_nvidia_smi() or {file.name.removeprefix("nvidia"): 0.0 for file in _device_files()}
        job = os.environ.get(VISIBLE_DEVICES)
        names = tuple(name for name in sizes if name.isdigit()) if job is None else tuple(_visible(job, sizes))
        return cls(names, min((_size(name, sizes) for name in names), default=0.0))

    @classmethod
    def parse(cls, text: str) -> "Gpus":
        """The GPUs of `--gpus=COUNTxGB`, to plan for; raises SettingError."""
        count, x, gb = text.partition("x")
        try:
            found = cls(tuple(map(str, range(int(count)))), float(gb))
        except ValueError:
            found = cls()
        if not x or not found.names or not found.gb > 0:
            raise SettingError(f"--gpus={text} is not COUNTxGB, the GPUs of a host, such as --gpus=8x80")
        return found


def _from_nvidia_smi() -> dict[str, float]:
    """The memory in GB of each GPU, under its number and its UUID; empty without nvidia-smi."""
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=os.pathsep.join(_PLACES))
    if program is None:
        return {}
    try:
        listing = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    sizes: dict[str, float] = {}
    for line in listing.splitlines():
        number, uuid, mebibytes = (line.replace(" ", "").split(",") + ["", ""])[:3]
        if number.isdigit():
            sizes[number] = sizes[uuid] = float(mebibytes) * (1 << 20) / _GB if mebibytes.isdigit() else 0.0
    return sizes


def _device_files() -> list[Path]:
    files = [file for file in _DRIVER.glob("nvidia[0-9]*") if file.name.removeprefix("nvidia").isdigit()]
    return sorted(files, key=lambda file: int(file.name.removeprefix("nvidia")))


def _visible(job: str, sizes: Mapping[str, float]) -> Iterator[str]:
    """The entries of `CUDA_VISIBLE_DEVICES` that CUDA uses: those before the first that names no GPU."""
    for entry in map(str.strip, job.split(",")):
        is_known = entry in sizes or not sizes if entry.isdigit() else entry.startswith(("GPU-", "MIG-"))
        if not is_known:
            return
        yield entry


def _size(name: str, sizes: Mapping[str, float]) -> float:
    """GB of one GPU; CUDA takes the beginning of a UUID for it."""
    if name.isdigit():
        return sizes.get(name, 0.0)
    return next((size for known, size in sizes.items() if known.startswith(name)), 0.0)
