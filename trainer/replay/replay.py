"""Replay of a finished run: the same batches in the same order give the same losses, however asynchronous the run was.

Asynchrony decides only which trajectories each step trains, and the run folder records that. Each actor rank of the run is a
rank of the replay, with the rows that it trained. Rank 0 is the caller's process; it starts the other ranks. A replay begins with the
initial weights, a checkpoint or a pack, and may compute the gradients of variants beside those of the run (`counterfactual.py`).
"""

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from ...comm.errors import SettingError
from ...comm.recipe import AlgorithmSettings, Recipe
from ..actor_group import ActorGroup
from ..policy.model import default_device
from ..step_log import StepReplay, rows_problem
from ..step_metrics import StepMetrics
from .comparison import COMPARED, Figures, difference, figure_lines
from .counterfactual import CounterfactualActor, TalliedMetrics, Tally
from .pack import (
    Pack,
    has_moments,
    load_state,
    machine,
    recorded_numbers,
    settings_of,
    weights_digest,
    write_pack,
    write_state,
)
from .start import Start, choose_start, recorded_steps, wanted_steps

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""How much loss and gradient norm of a pack may differ on another machine, by the type of computation. Log-probs by two ways of computing
the same policy differ on average by up to 3e-6 and .03 (README); a loss with clips and caps adds tokens on the other side of a bound."""


class Variant(msgspec.Struct, frozen=True):
    """Other settings of `algorithm` than the run's, and the words of the user for them."""

    words: str
    algorithm: AlgorithmSettings


class NewPack(msgspec.Struct, frozen=True):
    """The file of a pack to make of the step, with its weights or without, and the version of Headrace for its head."""

    path: Path
    version: str
    has_weights: bool = True


class StepResult(NamedTuple):
    """A step that was trained again: its metrics, and its figures by the run's loss and by each variant, if there are any."""

    step: int
    metrics: Mapping[str, Any]
    figures: Sequence[Figures]
    digest: str
    """Of the weights before the step, if a pack is made of it."""


class _Replay(msgspec.Struct, frozen=True, kw_only=True):
    """The work of each rank: the steps from the version of `start` to `end`; from `first` on with the variants."""

    recipe: Recipe
    start: Start
    first: int
    end: int
    variants: tuple[Variant, ...] = ()
    pack_folder: str = ""
    """The folder in which a pack of the last step is made."""
    has_weights: bool = True
    """Whether the weights are in the pack."""


def replay_steps(
    recipe: Recipe,
    steps: tuple[int, int] | None = None,
    variants: Sequence[Variant] = (),
    new_pack: NewPack | None = None,
) -> int:
    """Train steps of the run in `run.dir` again, and return how many differ.

    On the machine of the run they are equal bit for bit. Prints one line per step, with the differences, and the figures of variants
    below it. `steps` are the first and the last one, counted from 1; without them all whose rows are there are trained. Raises
    `SettingError` if steps cannot be trained again, a variant cannot be computed, or a pack cannot be made.
    """
    run_dir = Path(recipe.run.dir)
    _check_engine(recipe)
    recorded = recorded_steps(run_dir)
    wanted = wanted_steps(run_dir, recorded, steps)
    end = max(recorded) + 1 if wanted is None else wanted.stop
    start = choose_start(run_dir, recipe.roles.actor, end, wanted)
    first = start.version if wanted is None else wanted.start
    replay = _Replay(recipe=recipe, start=start, first=first, end=end, variants=_checked(recipe.algorithm, variants))
    if start.version:
        print(f"the replay begins after step {start.version}, with {start.checkpoint}")
    if new_pack is None:
        return _train(replay, recorded)[0]
    _check_new(new_pack, replay)
    with TemporaryDirectory(dir=new_pack.path.absolute().parent, prefix=".pack-") as folder:
        replay = msgspec.structs.replace(replay, pack_folder=folder, has_weights=new_pack.has_weights)
        num_different, result = _train(replay, recorded)
        pack = Pack(
            version=new_pack.version, step=result.step, machine=machine(), weights=result.digest,
            settings=settings_of(recipe, has_weights=new_pack.has_weights), has_weights=new_pack.has_weights,
        )  # fmt: skip
        numbers = {name: result.metrics[name] for name in COMPARED}
        write_pack(new_pack.path, pack, numbers, run_dir, Path(folder))
    size = new_pack.path.stat().st_size / 1e6
    print(f"step {result.step + 1} is packed in {new_pack.path} ({size:,.1f} MB), with its prompts and responses")
    return num_different


def replay_pack(
    recipe: Recipe, pack: Pack, folder: Path, checkpoint: str = "", variants: Sequence[Variant] = ()
) -> int:
    """Train the step of a pack, which is unpacked in `folder`; returns 1 if it differs, else 0.

    On another machine than the pack's, loss and gradient norm may differ by `TOLERANCE`. checkpoint: the folder of the weights that the
    pack does not have. Raises `SettingError`, also for other weights than those of the pack.
    """
    _check_engine(recipe)
    recorded = {pack.step: recorded_numbers(folder, pack.step)}
    if why := rows_problem(folder, pack.step, recipe.roles.actor):
        raise SettingError(f"the pack is damaged: {why}")
    if not pack.has_weights and pack.step and not checkpoint:
        raise SettingError(
            f"the pack has no weights; name those after step {pack.step} of its run: --checkpoint RUN/checkpoints/step_{pack.step}"
        )
    if checkpoint and (pack.has_weights or not pack.step):
        whose = "the pack has its weights" if pack.has_weights else "step 1 begins with model.path"
        raise SettingError(f"--checkpoint: {whose}; leave it out")
    here = machine()
    names = sorted({*here, *pack.machine})
    others = [
        f"{name} {pack.machine.get(name)} -> {here.get(name)}"
        for name in names
        if here.get(name) != pack.machine.get(name)
    ]
    if others:
        print(f"the pack is of another machine: {'; '.join(others)}")
    start = Start(pack.step, checkpoint, pack.weights)
    replay = _Replay(
        recipe=recipe, start=start, first=pack.step, end=pack.step + 1, variants=_checked(recipe.algorithm, variants)
    )
    tolerance = TOLERANCE[recipe.model.compute_type] if others else 0.0
    return _train(replay, recorded, tolerance)[0]


def _check_engine(recipe: Recipe) -> None:
    if recipe.trainer.engine != "builtin":
        raise SettingError(
            f"trainer.engine={recipe.trainer.engine}: only steps of the built-in trainer can be replayed"
        )


def _checked(own: AlgorithmSettings, variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """The variants. Raises `SettingError` for one that needs what the run does not have."""
    for variant in variants:
        algorithm = variant.algorithm
        if algorithm.advantage == "gae" and own.advantage != "gae":
            raise SettingError(
                f'--with "{variant.words}": algorithm.advantage=gae needs a critic, and the run has none'
            )
        if algorithm.kl_coef and not own.kl_coef:
            raise SettingError(
                f'--with "{variant.words}": algorithm.kl_coef needs the log-probs of the initial policy, which the rows of a run with'
                " algorithm.kl_coef=0 do not have"
            )
    return tuple(variants)


def _check_new(pack: NewPack, replay: _Replay) -> None:
    """Raise `SettingError` for a pack that cannot be made."""
    if replay.end - replay.first != 1:
        raise SettingError(f"--pack {pack.path}: a pack has one step; name it with --steps N")
    if pack.path.exists():
        raise SettingError(f"--pack {pack.path}: the file exists already")
    if not pack.path.absolute().parent.is_dir():
        raise SettingError(f"--pack {pack.path}: there is no folder {pack.path.absolute().parent}")
    if has_moments(replay.recipe) and replay.recipe.optimizer.name != "adamw":
        raise SettingError(
            f"--pack {pack.path}: the step has several updates, so the pack would need the moments of"
            f" optimizer.name={replay.recipe.optimizer.name}, which it cannot hold"
        )
    if not pack.has_weights and replay.start.version != replay.first:
        raise SettingError(
            f"--without-weights: step {replay.first + 1} does not begin with a checkpoint of the run, which the receiver could have; the"
            f" newest before it is step_{replay.start.version}"
        )


def _train(
    replay: _Replay, recorded: Mapping[int, Mapping[str, Any]], tolerance: float = 0.0
) -> tuple[int, StepResult]:
    """Train the steps on all ranks, and print them; returns how many differ from those that were recorded, and the last one."""
    for number, variant in enumerate(replay.variants, 1):
        print(f"variant {number}: {variant.words or 'no change'}")
    num_different = 0
    result: StepResult | None = None
    with TemporaryDirectory() as folder, _other_ranks(replay, folder):
        for result in _steps(replay, 0, folder):
            found = difference(recorded[result.step], result.metrics, tolerance)
            num_different += found.is_real
            print(f"step {result.step + 1:>4}  loss {result.metrics['actor/pg_loss']:+.6f}  {found.text}", flush=True)
            for line in figure_lines(result.figures):
                print(line)
    assert result is not None, "a replay has steps"
    print(f"{replay.end - replay.start.version} steps replayed, {num_different} of them differ")
    return num_different, result


@contextmanager
def _other_ranks(replay: _Replay, folder: str) -> Iterator[None]:
    """Processes of ranks 1 and later. They end after the last step, or are killed when the body fails."""
    processes = [
        multiprocessing.get_context("spawn").Process(target=_follow, args=(replay, rank, folder), daemon=True)
        for rank in range(1, replay.recipe.roles.actor)
    ]
    for process in processes:
        process.start()
    try:
        yield
        for process in processes:
            process.join(replay.recipe.comm.deadline_s)
    finally:
        for process in processes:
            process.kill()


def _follow(replay: _Replay, rank: int, folder: str) -> None:
    for _ in _steps(replay, rank, folder):
        pass


def _steps(replay: _Replay, rank: int, folder: str) -> Iterator[StepResult]:
    """One rank of the replay: yields each step when it is trained. The ranks connect through a file in `folder`."""
    recipe = replay.recipe
    num_ranks = recipe.roles.actor
    device = default_device()
    group = ActorGroup(rank, num_ranks, device, recipe.comm.deadline_s, recipe.trainer)
    if num_ranks > 1:
        if device.type == "cuda":
            group.device = torch.device("cuda", rank)
            torch.cuda.set_device(group.device)
        group.connect(FileStore(f"{folder}/ranks", num_ranks))
    actor = CounterfactualActor(recipe, group, [variant.algorithm for variant in replay.variants])
    _begin(actor, replay.start)
    for step in range(replay.start.version, replay.end):
        digest = ""
        if replay.pack_folder and step == replay.first:
            digest = weights_digest(actor)
            if replay.has_weights:
                write_state(actor, Path(replay.pack_folder))
        variants = replay.variants if step >= replay.first else ()
        yield _step(actor, step, [variant.algorithm for variant in variants], digest)
    group.close()


def _begin(actor: CounterfactualActor, start: Start) -> None:
    """Give an actor the weights of a start; a collective. Raises `SettingError` for other weights than those of a pack."""
    if start.checkpoint:
        actor.restore(Path(start.checkpoint))
    load_state(actor, Path(actor.recipe.run.dir))
    actor.state.step = start.version
    if start.digest and weights_digest(actor) != start.digest and actor.group.is_lead:
        where = f"--checkpoint {start.checkpoint}" if start.checkpoint else f"model.path={actor.recipe.model.path}"
        raise SettingError(f"{where}: these are not the weights of the pack; their digest is another one")


def _step(actor: CounterfactualActor, step: int, variants: Sequence[AlgorithmSettings], digest: str) -> StepResult:
    """Train a step again; a collective."""
    recipe = actor.recipe
    tally = Tally(recipe.algorithm)
    stats = TalliedMetrics(tally) if variants else StepMetrics()
    saved = StepReplay(Path(recipe.run.dir), step, actor.group.rank)
    saved.check_ranks(actor.group.size)
    with saved.same_threads():
        batches = list(saved.batches())
        actor.begin(batches, variants)
        for batch in batches:
            actor.accumulate(batch, stats)
        metrics = {**actor.step(stats), **stats.metrics(step)}
        if not variants:
            return StepResult(step, metrics, (), digest)
        own = tally.figures(actor.group)._replace(grad_norm=metrics["actor/grad_norm"])
        return StepResult(step, metrics, [own, *actor.figures()], digest)
