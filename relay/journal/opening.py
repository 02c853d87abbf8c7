"""Opens the journal of a run folder: a new one, or one that is continued at its end."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from ...comm.clock import Clock
from ...comm.disk import DiskReserve
from ...comm.errors import HeadraceError, SettingError
from ...comm.recipe import DataSettings, Recipe
from . import events as ev
from .hub_state import HubState
from .journal import Journal
from .replay import recover
from .state import apply


def check_journal_is_there(run_dir: Path, incarnation: int) -> None:
    """Raise `SettingError` if the hub was restarted and its journal is gone: an empty journal would start another run.

    The reserve file beside the journal shows that there was one.
    """
    if incarnation > 1 and (run_dir / DiskReserve.NAME).exists() and not (run_dir / "journal.jsonl").exists():
        raise SettingError(
            f"run.dir: {run_dir / 'journal.jsonl'} was removed while the run was under way; the run cannot continue"
        )


def open_journal(
    recipe: Recipe, needs: Iterable[str], run_id: str, clock: Clock, num_rows: tuple[int, ...] = ()
) -> tuple[HubState, Journal]:
    """The journal in `run.dir`, and the state after its last event.

    It is new, or continued at its end: by the next process of the same run's hub, or by a run that is resumed. The launcher has cut that
    one's journal where the run continues.
    needs: the columns that training needs besides those of the rollout. num_rows: those of each set of the data.
    """
    run_dir = Path(recipe.run.dir)
    path = run_dir / "journal.jsonl"
    samples = recipe.batch.samples_per_prompt
    opened = ev.Opened(
        epoch=1, samples_per_prompt=samples, run_id=run_id, needs=tuple(sorted(needs)), num_rows=num_rows
    )
    deadline_s = recipe.comm.deadline_s / 2  # the other processes wait for the hub while it waits for room
    journal = Journal(path, deadline_s, DiskReserve(run_dir))
    try:
        state = recover(path)
        is_same_run = state.epoch > 0 and state.opened.run_id == run_id
        if state.epoch and not is_same_run and recipe.run.resume != "auto":
            raise SettingError(
                f"run.dir: {run_dir} holds a run; set run.resume=auto to continue it, or another run.dir"
            )
        if state.epoch:
            _check_same_data(state.opened, opened, run_dir, recipe.data)
    except HeadraceError:
        journal.close()
        raise
    event = ev.HubRestarted() if is_same_run else msgspec.structs.replace(opened, epoch=state.epoch + 1)
    stamped = ev.stamped(event, clock.wall())
    journal.append(stamped)
    apply(stamped, state)
    return state, journal


def _check_same_data(before: ev.Opened, opened: ev.Opened, run_dir: Path, data: DataSettings) -> None:
    """Raise `SettingError` if the size of groups or the number of rows of a data set has changed: the order of the data depends on both."""
    if before.samples_per_prompt != opened.samples_per_prompt:
        raise SettingError(f"batch.samples_per_prompt: the run in {run_dir} began with {before.samples_per_prompt}")
    if before.num_rows and len(before.num_rows) != len(opened.num_rows):
        raise SettingError(f"data.path: the run in {run_dir} began with {len(before.num_rows)} sets")
    for path, had, has in zip(data.paths, before.num_rows, opened.num_rows, strict=False):
        if had != has:
            raise SettingError(
                f"data.path: {path} has {has} rows, and the run in {run_dir} began with {had}; correct rows in their"
                " places, or set another run.dir"
            )
