"""The files of a policy's checkpoint, read without torch: completeness, size, context length."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ...comm.errors import SettingError
from ...trainer.policy.checkpoint_files import find_checkpoint, weight_files, weights_digest
from ...trainer.policy.families import text_part

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_VOCABULARY_FILES = ("merges.txt", "added_tokens.json")
_WRITTEN_BY = ("_name_or_path", "transformers_version")
"""Settings of a configuration that say where it comes from."""
_NOT_OF_TOKENS = (*_WRITTEN_BY, "name_or_path", "tokenizer_class", "tokenizer_file", "backend", "is_local")
"""Settings of a tokenizer that depend on its location and on the version of `transformers`."""
_SAMPLE_BYTES = 1 << 12


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The folder of a Hugging Face checkpoint, and its `context` in tokens, 0 without a limit."""

    folder: Path
    context: int

    @classmethod
    def read(cls, path: str) -> "ModelFiles":
        """Read `model.path`; raises `SettingError` unless configuration, weights and tokenizer are there."""
        folder = find_checkpoint(path)
        config = read_config(folder)
        if not any((folder / name).exists() for name in _TOKENIZER_FILES):
            raise SettingError(f"model.path: {folder} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})")
        for file in weight_files(folder):
            _check_weights(file)
        return cls(folder, int(config.get("max_position_embeddings") or 0))


def read_config(folder: Path) -> dict[str, Any]:
    """What `config.json` holds of the language model; raises `SettingError` if it cannot be read."""
    try:
        return text_part(json.loads((folder / "config.json").read_text()))
    except FileNotFoundError:
        raise SettingError(f"model.path: {folder} has no config.json, so it is not a Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise SettingError(f"model.path: cannot read {folder / 'config.json'}: {error}") from error


def model_digests(path: str, *, with_weights: bool) -> dict[str, str]:
    """The part of `model.path` that all hosts must have alike: a digest of configuration and tokenizer, and one of the beginnings of all weights."""
    folder = find_checkpoint(path)
    config = {key: value for key, value in read_config(folder).items() if key not in _WRITTEN_BY}
    state = xxhash.xxh3_64(json.dumps(config, sort_keys=True).encode())
    for name, content in _tokenizer_parts(folder):
        state.update(name.encode() + content)
    weights = {"weights_digest": weights_digest(folder, _SAMPLE_BYTES)} if with_weights else {}
    return {"config_digest": state.hexdigest(), **weights}


def _tokenizer_parts(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The files that make the tokenizer: `tokenizer.json` makes the others of a vocabulary needless."""
    is_whole = (folder / "tokenizer.json").exists()
    for name in ("tokenizer.json",) if is_whole else (*_TOKENIZER_FILES, *_VOCABULARY_FILES):
        if (folder / name).exists():
            yield name, (folder / name).read_bytes()
    settings: dict[str, Any] = {}
    with suppress(FileNotFoundError, ValueError):
        settings = json.loads((folder / "tokenizer_config.json").read_text())
    if (template := folder / "chat_template.jinja").exists():  # it comes before the one of the settings
        settings["chat_template"] = template.read_text()
    kept = {key: value for key, value in settings.items() if key not in _NOT_OF_TOKENS}
    yield "tokenizer_config.json", json.dumps(kept, sort_keys=True).encode()


def _check_weights(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        raise SettingError(f"model.path: {file} is not a safetensors file ({error})") from error
