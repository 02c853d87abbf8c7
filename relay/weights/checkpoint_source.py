"""Versions that no relay holds any more, from the trainer's checkpoints; the journal's digests prove them."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from ...comm.errors import WrongDigest
from ..journal.events import Checkpointed, Published
from ..journal.files import read_events
from .layout import Layout
from .slots import VersionNotAvailable

WeightsLoader = Callable[[Path], Mapping[str, Tensor]]
"""The weights in a checkpoint's folder, on CPU, by the layout's names (those on disk may be others)."""


class CheckpointSource:
    """The checkpoints of one run folder. Version N is the state after N steps; the journal has its digest."""

    def __init__(self, run_dir: Path, load: WeightsLoader) -> None:
        self._run_dir = run_dir
        self._load = load

    def read(self, version: int, layout: Layout, into: np.ndarray) -> str:
        """Put a version into a buffer, uint8 [layout.num_bytes]; returns its digest.

        Raises `VersionNotAvailable` if the run has no checkpoint of it, `WrongDigest` if that is not what was published.
        """
        journal = self._run_dir / "journal.jsonl"
        published = None
        folders = {}
        for _, event in read_events(journal, kinds=(Published, Checkpointed)) if journal.exists() else ():
            if isinstance(event, Published) and event.version == version:
                published = event
            elif isinstance(event, Checkpointed):
                # By its name, since the run folder may have another path here.
                folders[event.step] = self._run_dir / "checkpoints" / Path(event.path).name
        if published is None:
            raise VersionNotAvailable(f"version {version} was never complete on a relay: it is not in the journal")
        folder = folders.get(version)
        if folder is None or not folder.is_dir():
            raise VersionNotAvailable(
                f"no relay holds version {version}, and the run has no checkpoint of step {version};"
                " checkpoint.every and checkpoint.keep decide which are kept"
            )
        layout.write(self._load(folder), into)
        if layout.digest(into) != published.digest:
            raise WrongDigest(f"{folder} does not hold version {version}: its digest differs from that in the journal")
        return published.digest
