"""What is on the disk, as the API's objects: training runs and their saved weights."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ....comm.errors import SettingError
from ....rollout.serving.fields import RequestRefused
from .store import KINDS, Saved, SavedPath, SavedWeights, TrainingRun

Json = Mapping[str, Any]
MOST_LISTED = 1000


class Catalog:
    """Answers questions about saved weights. Raises `RequestRefused` for what is not there."""

    def __init__(self, store: SavedWeights) -> None:
        self._store = store

    def runs(self, query: Mapping[str, str]) -> Json:
        """A page of the training runs, the newest first."""
        runs = self._store.runs()[::-1]
        page, cursor = _page(runs, query, 20)
        return {"training_runs": [self._run(run) for run in page], "cursor": cursor}

    def run(self, run_id: str) -> Json:
        """One training run."""
        return self._run(self._find(run_id))

    def checkpoints(self, run_id: str) -> Json:
        """What a training run has saved."""
        self._find(run_id)
        return {"checkpoints": [_checkpoint(*item) for item in self._store.all(run_id)]}

    def all_checkpoints(self, query: Mapping[str, str]) -> Json:
        """A page of what all training runs have saved, the newest first."""
        found = [item for run in self._store.runs() for item in self._store.all(run.run_id)]
        page, cursor = _page(sorted(found, key=lambda item: -item[1].time), query, 100)
        return {"checkpoints": [_checkpoint(*item) for item in page], "cursor": cursor}

    def weights_info(self, text: str) -> Json:
        """What is needed to load saved weights."""
        try:
            path = SavedPath.parse(text)
            self._store.folder(path)
        except SettingError as error:
            raise RequestRefused(str(error), "tinker_path", status=404, code="unknown_path") from error
        run = self._find(path.run_id)
        layers = {"train_unembed": False, "train_mlp": run.train_mlp, "train_attn": run.train_attn} if run.rank else {}
        return {"base_model": run.base_model, "is_lora": run.rank > 0, "lora_rank": run.rank or None, **layers}

    def remove(self, run_id: str, kind: str, name: str) -> Json:
        """Delete saved weights."""
        try:
            if kind not in KINDS:
                raise SettingError(f"checkpoint_id: {kind}/{name} is not one of {', '.join(KINDS)}")
            self._store.remove(SavedPath(run_id, kind, name))
        except SettingError as error:
            raise RequestRefused(str(error), status=404, code="unknown_path") from error
        return {}

    def _find(self, run_id: str) -> TrainingRun:
        try:
            return self._store.run(run_id)
        except SettingError as error:
            raise RequestRefused(str(error), status=404, code="unknown_run") from error

    def _run(self, run: TrainingRun) -> Json:
        newest: dict[str, Json] = {}
        last = run.since
        for path, saved in self._store.all(run.run_id):
            newest.setdefault(path.kind, _checkpoint(path, saved))
            last = max(last, saved.time)
        return {
            "training_run_id": run.run_id,
            "base_model": run.base_model,
            "model_owner": "local",
            "is_lora": run.rank > 0,
            "lora_rank": run.rank or None,
            "last_request_time": _when(last),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": run.user_metadata,
        }


def _page(items: Sequence[Any], query: Mapping[str, str], usual: int) -> tuple[Sequence[Any], Json]:
    numbers: dict[str, int] = {}
    for name, default in (("limit", usual), ("offset", 0)):
        text = query.get(name, str(default))
        if not text.isdecimal() or int(text) > 10**9:
            raise RequestRefused(f"must be a whole number, not {text!r}", name)
        numbers[name] = int(text)
    start = numbers["offset"]
    limit = min(numbers["limit"], MOST_LISTED)
    return items[start : start + limit], {"offset": start, "limit": limit, "total_count": len(items)}


def _checkpoint(path: SavedPath, saved: Saved) -> Json:
    return {
        "checkpoint_id": f"{path.kind}/{path.name}",
        "checkpoint_type": KINDS[path.kind],
        "time": _when(saved.time),
        "tinker_path": str(path),
        "size_bytes": saved.num_bytes,
        "public": False,
        "user_metadata": saved.user_metadata,
        "expires_at": None if saved.expires_at is None else _when(saved.expires_at),
    }


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
