"""Reads the trainer's state from a checkpoint without running anything that the checkpoint contains.

DCP writes its metadata as a pickle, and everything that is not a tensor with `torch.save`. By itself it executes any code that such
files name. The manifest's digests have no key, so anyone who can write to the folder can replace a file. This reader accepts only
the classes of DCP's own metadata in the metadata, and reads the rest with `weights_only`.
"""

import io
import pickle
import re
from collections.abc import Collection
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),  # the layout of a name
    ("torch", "Size"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}
"""Module and name of everything that a metadata file may name."""


def load_checked(
    state_dict: dict[str, Any], folder: Path, *, is_alone: bool, optional: Collection[str] = ()
) -> Collection[str]:
    """DCP's `load` from a folder that anybody may have written; a collective unless `is_alone`. Returns the names it has.

    optional: names that keep their present values where the checkpoint has none.

    Raises `ValueError` for metadata that is refused, with the name of the class, and DCP's `CheckpointException`.
    """
    reader = _Reader(folder)
    try:
        stored = reader.read_metadata().state_dict_metadata  # alone first: DCP prints a long traceback when this fails
    except (pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, TypeError) as error:
        raise ValueError(f"its metadata cannot be read: {error}") from error
    missing = [name for name in optional if name not in stored]
    load(state_dict, storage_reader=reader, planner=_Planner(missing), no_dist=is_alone)
    return stored


def _member(kind: object, name: object) -> Enum:
    """The member of an enum: Python 3.11.0 to 3.11.3 write one as a call of `getattr`, which could do anything."""
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(name, str) and name in kind.__members__:
        return kind[name]
    raise ValueError("its metadata calls builtins.getattr for more than a member of an enum")


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in _KNOWN:
            raise ValueError(f"its metadata names {module}.{name}, which no checkpoint of a trainer needs")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"its metadata is a {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    def __init__(self, missing: Collection[str]) -> None:
        super().__init__()
        self._missing = missing

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(*args, **kwargs)
        self.state_dict = {name: value for name, value in self.state_dict.items() if name not in self._missing}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """DCP unpickles all bytes that it gets here. So they are read safely first and pickled again."""
        safe = io.BytesIO()
        name = read_item.dest_index.fqn
        try:
            torch.save(torch.load(value, weights_only=True), safe)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL (\S+)", str(error))  # PyTorch goes on to say how its check is turned off
            raise ValueError(f"its {name} {f'names {named[1]}' if named else 'cannot be read'}") from error
        safe.seek(0)
        super().load_bytes(read_item, safe)
