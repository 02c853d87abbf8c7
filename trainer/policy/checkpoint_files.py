"""The files of a Hugging Face checkpoint: the folder that `model.path` names, and its weights. Imports no torch."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import xxhash

from ...comm.errors import SettingError

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_LANGUAGE_MODEL = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(.*)")
"""A tensor of the language model of a multimodal checkpoint."""
_BLOCK_BYTES = 1 << 22
WITHOUT_WEIGHTS = ("*.json", "*.model", "*.txt", "*.jinja")
_PATTERNS = (*WITHOUT_WEIGHTS, "*.safetensors")
CONFIG = "config.json"


def find_checkpoint(path: str | Path, patterns: Sequence[str] = _PATTERNS) -> Path:
    """The folder of a checkpoint, of which the files of these `patterns` are downloaded from the Hub where `path` is an id.

    Raises SettingError if it cannot be found.
    """
    folder = Path(path)
    name = str(path)
    if not path:
        raise SettingError("model.path is not set; it names the folder of a Hugging Face checkpoint")
    if folder.is_dir():
        return folder
    if folder.exists():
        raise SettingError(f"model.path: {path} is a file; give the folder of a Hugging Face checkpoint")
    if not _HUB_ID.fullmatch(name) or folder.parent.exists():
        raise SettingError(f"model.path: {path} does not exist")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=[*patterns]))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SettingError(
            f"model.path: {path} does not exist, and it cannot be downloaded from the hub ({reason})"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, as its index names them; raises SettingError for a file that is not there."""
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise SettingError(f"model.path: {index} is not an index of weights ({error!r})") from error
        if not all(
            isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name for name in names
        ):
            raise SettingError(f"model.path: {index} names a file that is not a safetensors file of its folder")
        files = [folder / name for name in sorted(names)]
    else:
        files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise SettingError(f"model.path: {folder} has no *.safetensors weights{_advice(folder)}")
    if missing := [file.name for file in files if not file.exists()]:
        raise SettingError(f"model.path: {folder} has no {', '.join(missing)}, which {index.name} names")
    return files


def weights_digest(path: str | Path, most_bytes: int = sys.maxsize) -> str:
    """An xxh3 of the names, types, shapes and bytes of a checkpoint's weights, however they are divided over files.

    It reads every byte, so a process computes it once; with `most_bytes` only the first so many of each tensor.
    """
    tensors: dict[str, str] = {}
    for file in weight_files(find_checkpoint(path)):
        with file.open("rb") as opened:  # the format: the header's length (8 bytes), the header as JSON, the tensors
            start = 8 + int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(start - 8))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                low, high = entry["data_offsets"]
                state = xxhash.xxh3_64(f"{name} {entry['dtype']} {entry['shape']} ".encode())
                opened.seek(start + low)
                end = min(high, low + most_bytes)
                for place in range(low, end, _BLOCK_BYTES):
                    state.update(opened.read(min(_BLOCK_BYTES, end - place)))
                tensors[name] = state.hexdigest()
    return xxhash.xxh3_64_hexdigest("".join(tensors[name] for name in sorted(tensors)).encode())


def language_model(names: Iterable[str]) -> dict[str, str]:
    """Names of the tensors of a checkpoint's language model, each with its name in a checkpoint that holds nothing else."""
    found = {name: _LANGUAGE_MODEL.fullmatch(name) for name in names}
    if not any(found.values()):
        return {name: name for name in found}
    own = {name: match[1] for name, match in found.items() if match is not None}
    heads = {name: name for name in found if name.startswith("lm_head.")}
    return {name: rest if rest.startswith("lm_head.") else f"model.{rest}" for name, rest in own.items()} | heads


def _advice(folder: Path) -> str:
    if not next(folder.glob("*.bin"), None):
        return ""
    return (
        "; its *.bin files are pickles, which can run code. Convert them: AutoModelForCausalLM.from_pretrained(PATH)"
        ".save_pretrained(NEW_PATH) writes safetensors"
    )
