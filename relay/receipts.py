"""Receipts: digests by which `headrace audit` tells an answer or a row of a run from one that was changed.

That of a row is in the journal. That of an answer goes out with it: `PROMPT.TOKENS.SEAL`, three digests in hexadecimal digits. The seal
cannot be made without a key, which is in the run's private folder.
"""

import hashlib
import os
import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

KEY_FILE = "private/receipt_key"
"""Its place in the run folder, of which others may read the rest."""
_BYTES = 12
"""96 bits: other tokens of the same digest cannot be found."""
_KEY_BYTES = 32


def open_key(run_dir: Path) -> bytes:
    """The key of the receipts of a run; its first process that asks makes it. It stays the same when the run is resumed.

    Raises `OSError`.
    """
    path = run_dir / KEY_FILE
    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
            stream.write(secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):
            os.link(new, path)
        new.unlink()
    return path.read_bytes()


def row_receipt(columns: Mapping[str, np.ndarray]) -> str:
    """The receipt of a row: a digest of its columns, each with its name and type."""
    state = hashlib.blake2b(digest_size=_BYTES)
    for name, column in sorted(columns.items()):
        state.update(f"{name} {column.dtype.str} {column.shape}\n".encode())
        state.update(np.ascontiguousarray(column).data)
    return state.hexdigest()


def tokens_digest(token_ids: Iterable[int]) -> str:
    """The digest of tokens, as a receipt has it, or of other whole numbers."""
    return _digest(array("q", token_ids).tobytes())


def seal(key: bytes, content: Mapping[str, Any]) -> str:
    """The seal of what an answer says. content: JSON values, which may have gone through other programs: 1.0 and 1 are equal."""
    return _digest(msgspec.json.encode(_plain(content), order="sorted"), key)


class Said(NamedTuple):
    """What an answer says of one response, besides the tokens themselves."""

    id: str
    """Of the answer, without OpenAI's prefix."""
    sample: int
    """Its index."""
    versions: Sequence[int]
    digests: Mapping[str, str]
    """Of the weights of each version, by its number in digits."""
    text: str = ""
    calls: Sequence[Mapping[str, Any]] = ()
    """Of tools, in OpenAI's form."""
    reason: str = ""
    logprobs: Sequence[float] | None = None

    def receipt(self, key: bytes, prompt: str, tokens: str) -> str:
        """The receipt. prompt, tokens: their digests."""
        calls = [[call["id"], call["function"]["name"], call["function"]["arguments"]] for call in self.calls]
        logprobs = (
            "" if self.logprobs is None else _digest(array("d", (each + 0.0 for each in self.logprobs)).tobytes())
        )
        content = {
            **self._asdict(), "versions": tokens_digest(self.versions), "logprobs": logprobs, "calls": calls,
            "prompt": prompt, "tokens": tokens,
        }  # fmt: skip
        return f"{prompt}.{tokens}.{seal(key, content)}"


def note_digest(digests: dict[int, str], version: int, digest: str) -> None:
    """Note the digest of a version. Where two different weights had this number, neither is known: ""."""
    if digests.setdefault(version, digest) != digest:
        digests[version] = ""


def digests_used(digests: Mapping[int, str], versions: Iterable[int]) -> dict[str, str]:
    """The digest of each of these versions, by its number in digits, as in JSON; empty for one that is not known."""
    return {str(version): digests.get(version, "") for version in sorted({*versions})}


def _digest(content: bytes, key: bytes = b"") -> str:
    return hashlib.blake2b(content, digest_size=_BYTES, key=key).hexdigest()


def _plain(value: Any) -> Any:
    """The value without differences that JSON does not know."""
    if isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return value
