"""All checks of a start: settings that exclude each other, files, data, functions."""

import ast
import os
import sys
import tempfile
from collections.abc import Collection, Iterator
from importlib.machinery import FrozenImporter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from ....comm.environment import JOINING
from ....comm.errors import SettingError
from ....comm.plugins import load_object, source_file
from ....comm.recipe import (
    AlgorithmSettings,
    CommSettings,
    EnvironmentSettings,
    GeneratorSettings,
    Recipe,
    RewardSettings,
    RunSettings,
    TrainerSettings,
)
from ....comm.recipe.run import MCP, is_address
from ....relay.hub.model_check import JOINED
from ....relay.journal.journal import Journal
from ....relay.queue.schedules import SCHEDULES
from ....relay.queue.tasks import pipeline
from ....rollout.environments.openenv import OpenEnvServer
from ....rollout.environments.schemas import tool_schemas
from ....rollout.generators.vllm_engine.package import check_vllm
from ....rollout.rewards.addresses import open_address
from ....rollout.rewards.ready import NEEDS, READY
from ....trainer.memory import PAGE_TOKENS, PolicySizes
from ....trainer.policy.checkpoint_files import find_checkpoint
from ....trainer.policy.families import FAMILIES, Family
from ....trainer.policy.supported import check_exact_supported, check_router_loss, check_supported
from ...placement import check_replicas
from ..model_files import ModelFiles, model_digests, read_config
from ..run_folder import CONFIG_FILE, JOURNAL_FILE, under_way
from .adapter import check_lora
from .agents import check_agents
from .algorithm import check_algorithm, check_optimizer, check_rate
from .data import CheckedData, check_data, check_lengths
from .evaluation import check_best_of_steps, check_evaluation
from .serving import check_serve
from .signatures import check_reward_arguments, check_tools
from .trackers import check_trackers

_ADDRESS = "an address (http://HOST/PATH or judge+http://HOST/v1#model=NAME)"


class CheckedRecipe(NamedTuple):
    """The findings of the checks of a recipe."""

    warnings: list[str]
    num_rows: int
    """Rows of `data.path`; 0 if it is not made yet."""


def check_recipe(recipe: Recipe, *, unmade: Collection[str] = ()) -> CheckedRecipe:
    """Check settings, files, data and functions of a recipe. Leaves no file. Raises `SettingError`.

    `unmade` are settings whose files a start makes first, so that they cannot be checked yet.
    """
    warnings = check_settings(recipe)
    check_names_here()
    check_run_folder(recipe.run)
    check_trackers(recipe.run)
    evaluation = [] if "eval.path" in unmade else check_evaluation(recipe)
    if recipe.is_emulated:
        return CheckedRecipe(warnings, check_data(recipe.data).num_rows)
    check_functions(recipe)
    data = CheckedData([], []) if "data.path" in unmade else check_data(recipe.data)
    check_tools(recipe.environment)
    if recipe.reward.path and ":" not in recipe.rollout.engine:  # an own loop may call rewards in another way
        rows = [row for _, found in evaluation for row in found.first_rows]
        warnings += check_reward_arguments(recipe.reward, data.first_rows, "data.path")
        warnings += check_reward_arguments(recipe.reward, rows, "eval.path")
    if "model.path" in unmade:
        return CheckedRecipe(warnings, data.num_rows)
    policy = ModelFiles.read(recipe.model.path)
    check_family(recipe.generator, recipe.algorithm, policy.folder)
    if recipe.rollout.engine != "vllm":  # it splits other families too
        check_tp(recipe.rollout.tp, policy)
    _check_cache(recipe, policy)
    warnings += check_rate(recipe.optimizer, recipe.lora, policy.folder)
    warnings += check_lora(recipe, policy.folder)
    for settings, found in [(recipe.data, data), *evaluation]:
        warnings += check_lengths(settings, found.prompts, policy, recipe.environment, recipe.sampling.max_new_tokens)
    return CheckedRecipe(warnings, data.num_rows)


def check_names_here() -> None:
    """No file of the present folder has the name of a module that this process has from Python's own library.

    The processes of a run are started with `python -m`, so they would import that file instead. Raises `SettingError`.
    """
    own = sys.stdlib_module_names & sys.modules.keys() - {*sys.builtin_module_names}
    hiding = sorted(path.name for path in Path.cwd().glob("*.py") if path.stem in own and not _is_frozen(path.stem))
    if hiding and "PYTHONSAFEPATH" not in os.environ:
        raise SettingError(
            f"{hiding[0]} in the present folder would be imported in place of Python's own module of that name; rename it, or"
            " start the run in another folder"
        )


def _is_frozen(name: str) -> bool:
    return FrozenImporter.find_spec(name) is not None


def check_settings(recipe: Recipe) -> list[str]:
    """Refuse settings that exclude each other, without files; returns warnings."""
    exact = recipe.generator.exact
    tp = recipe.rollout.tp
    roles = recipe.roles
    queue = recipe.queue
    if tp > 1 and exact:
        raise SettingError("rollout.tp cannot be combined with generator.exact, which runs on one rank only")
    if tp > 1 and recipe.rollout.engine not in ("builtin", "vllm"):
        raise SettingError(f"rollout.tp: rollout.engine={recipe.rollout.engine} has one rank for each replica")
    check_vllm(recipe)
    check_replicas(roles, tp)
    _check_trainer(recipe.trainer, roles.actor, exact=exact)
    _check_comm(recipe.comm)
    _check_schedule(recipe)
    if bool(queue.tasks) != bool(roles.task):
        raise SettingError(f"roles.task={roles.task} ranks for {len(queue.tasks)} queue.tasks; set both or neither")
    if recipe.batch.updates_per_version > recipe.batch.prompts_per_step:
        raise SettingError("batch.updates_per_version: more than batch.prompts_per_step; an update needs a group")
    if roles.reference and recipe.algorithm.kl_coef == 0:
        raise SettingError("roles.reference: nothing needs the initial policy while algorithm.kl_coef=0")
    _check_emulation(recipe)
    check_serve(recipe)
    if recipe.environment.is_set and recipe.rollout.engine == "emulated":
        raise SettingError("environment: rollout.engine=emulated cannot pause trajectories; take builtin")
    if recipe.environment.is_served:
        check_agents(recipe)
    if recipe.is_emulated:
        return []
    check_optimizer(recipe.optimizer, recipe.run.steps)
    return [*check_algorithm(recipe), *check_best_of_steps(recipe.checkpoint)]


def _check_comm(comm: CommSettings) -> None:
    if comm.tls and comm.link == "nccl":
        raise SettingError("comm.tls: NCCL does not encrypt; set comm.link=tcp, or comm.tls=false")
    if comm.tls:
        from ....comm.links.tls import TlsIdentity

        TlsIdentity()


def _check_schedule(recipe: Recipe) -> None:
    """Nothing is set that the schedule would ignore, or that would keep it from completing a step."""
    rules = SCHEDULES[recipe.run.schedule]
    queue = recipe.queue
    prompts = recipe.batch.prompts_per_step
    schedule = f"run.schedule={rules.name}"
    if rules.staleness is not None and queue.max_staleness is not None:
        raise SettingError(f"queue.max_staleness: {schedule} has its own bound; leave this at null")
    if recipe.rollout.max_age is not None and rules.name != "headrace":
        raise SettingError(f"rollout.max_age: {schedule} has its own rule for new weights; take headrace, or null here")
    if rules.whole_batches and isinstance(queue.lead, int) and queue.lead < prompts:
        raise SettingError(f"queue.lead: {schedule} needs room for batch.prompts_per_step={prompts}, not {queue.lead}")


def _check_trainer(trainer: TrainerSettings, actors: int, *, exact: bool) -> None:
    if exact and actors > 1:
        raise SettingError("generator.exact cannot be combined with several actor ranks; set roles.actor=1")
    if exact and trainer.activation_checkpointing is True:
        raise SettingError(
            "trainer.activation_checkpointing cannot be combined with generator.exact, whose layers are not modules"
        )
    if exact and trainer.compile:
        raise SettingError("trainer.compile cannot be combined with generator.exact, whose layers are not modules")
    if exact and trainer.offload:
        raise SettingError("trainer.offload cannot be combined with generator.exact, whose layers are not modules")
    if actors % (trainer.shard_ranks or actors):
        raise SettingError(
            f"trainer.shard_ranks: roles.actor={actors} is not a multiple of {trainer.shard_ranks} ranks a copy"
        )


def _check_emulation(recipe: Recipe) -> None:
    emulated = recipe.is_emulated
    if emulated and recipe.rollout.engine != recipe.trainer.engine:
        raise SettingError("rollout.engine and trainer.engine: emulate both or neither")
    if emulated and recipe.batch.passes > 1:
        raise SettingError("batch.passes: emulated devices train each group once")
    if emulated and recipe.lora.rank:
        raise SettingError("lora.rank: emulated devices have no adapter; their own settings give the size of a version")
    if emulated and recipe.roles.actor > 1:
        raise SettingError("roles.actor: one process emulates all GPUs of the trainer, see lab.train_gpus")
    if emulated:
        load_object("rollout.engine", "headrace.launch.lab.settings:check_lab")(recipe.lab, recipe.run.schedule)
    elif recipe.lab:
        raise SettingError("lab: only emulated devices (rollout.engine, trainer.engine) have these settings")


def check_family(generator: GeneratorSettings, algorithm: AlgorithmSettings, folder: Path) -> None:
    """The policy's family is supported, and has the features that the settings ask for. Reads `config.json` alone."""
    config = SimpleNamespace(**read_config(folder))
    check_supported(config)
    if generator.exact:
        import torch

        check_exact_supported(config, "cuda" if torch.cuda.is_available() else "cpu")
    if algorithm.router_aux_coef:
        check_router_loss(config)


def check_tp(tp: int, policy: ModelFiles) -> None:
    """The policy can be split over the ranks of a replica."""
    if tp == 1:
        return
    from transformers import AutoConfig

    from ....trainer.policy.supported import check_splittable

    check_splittable(AutoConfig.from_pretrained(policy.folder, trust_remote_code=False), tp)


def _check_cache(recipe: Recipe, policy: ModelFiles) -> None:
    """A cache that the recipe bounds holds a sequence of the policy's whole context, without which no rollout starts."""
    given = recipe.generator.kv_gb
    if given is None or recipe.rollout.engine != "builtin":
        return
    sizes = PolicySizes.of(read_config(policy.folder))
    # A fork needs two pages more.
    least = sizes.cache_bytes(policy.context + 2 * PAGE_TOKENS, recipe.model.compute_type) / recipe.rollout.tp / 1e9
    if given < least:
        raise SettingError(
            f"generator.kv_gb: {given:g} GB does not hold one sequence of {policy.context} tokens, the context of model.path, in"
            f" {recipe.model.compute_type}; at least {least:.3g} GB are needed"
        )


def check_run_folder(settings: RunSettings) -> None:
    """The run folder can be made or written, and holds no run unless `run.resume` continues it. It is not made here."""
    folder = Path(_given("run.dir", settings.dir, "a folder for the files of the run"))
    if not folder.exists():
        above = next(parent for parent in folder.absolute().parents if parent.exists())
        try:
            Path(tempfile.mkdtemp(dir=above)).rmdir()  # permissions alone do not tell: /proc, a read-only file system
        except OSError as error:
            raise SettingError(f"run.dir: cannot create {folder}: {error.strerror}") from error
        return
    if not folder.is_dir():
        raise SettingError(f"run.dir: {folder} is not a folder")
    journal = folder / JOURNAL_FILE
    if not os.access(folder, os.W_OK | os.X_OK) or (journal.exists() and not os.access(journal, os.R_OK | os.W_OK)):
        raise SettingError(f"run.dir: no permission to write in {folder}")
    if not journal.exists():
        return
    if Journal.is_in_use(journal):
        raise SettingError(f"run.dir: {under_way(folder)}")
    if settings.resume == "never":
        raise SettingError(
            f"run.dir: {folder} holds a run already; set run.resume=auto to resume it, or another run.dir"
        )


def check_functions(recipe: Recipe) -> None:
    """The functions that the recipe names exist, and the tasks' columns fit together."""
    _check_reward(recipe.reward, recipe.environment)
    _check_servers(recipe.environment)
    pipeline(recipe.queue, recipe.algorithm)
    for task in recipe.queue.tasks:
        check_function("queue.tasks", task.function)
    for setting, engine in (("rollout.engine", recipe.rollout.engine), ("trainer.engine", recipe.trainer.engine)):
        if ".py:" in engine:
            check_function(setting, engine)
    for name in ("advantage", "loss"):
        if ":" in (path := getattr(recipe.algorithm, name)):
            check_function(f"algorithm.{name}", path)
    if recipe.data.curriculum:
        check_function("data.curriculum", recipe.data.curriculum)
    if recipe.queue.sampler:
        check_function("queue.sampler", recipe.queue.sampler)


def _check_reward(reward: RewardSettings, environment: EnvironmentSettings) -> None:
    """There is a reward: a function, or an environment or an agent that gives it."""
    if reward.path or not environment.path:
        check_rewards(reward)
    for path in environment.user_code:
        check_function("environment.path" if path == environment.path else "environment.tools", path)


def _check_servers(environment: EnvironmentSettings) -> None:
    """The servers of environments and tools answer, and their actions and tools can be used. Raises `SettingError`."""
    if environment.server:
        if environment.tools:
            raise SettingError(
                f"environment.tools cannot be combined with {environment.path}, which has actions of its own"
            )
        OpenEnvServer(environment.server, environment.timeout_s).read_form()
    if any(path.startswith(MCP) for path in environment.tools):
        tool_schemas(environment)


def check_files(role: str, recipe: Recipe) -> None:
    """The files that a process of `role` reads are on its host. Raises `SettingError`.

    The first host has checked the recipe as a whole; another host may lack a file, or the run folder of the first.
    """
    if recipe.is_emulated:
        return
    if role in ("actor", "rollout", "shard", "reference"):
        ModelFiles.read(recipe.model.path)
    if role == "actor" and recipe.roles.actor > 1 and not (Path(recipe.run.dir) / CONFIG_FILE).exists():
        raise SettingError(
            f"run.dir: {recipe.run.dir} is not the same folder as on the first host; actor ranks need a shared one for"
            " checkpoints"
        )
    if role == "rollout":
        _check_reward(recipe.reward, recipe.environment)
    if role == "task":
        for task in recipe.queue.tasks:
            check_function("queue.tasks", task.function)


def model_facts(role: str, recipe: Recipe) -> dict[str, str]:
    """Facts about the policy that a process of `role` announces: the hub ends a run whose hosts have different ones, and
    refuses a host that joins with others.

    Digests of `model.path`; in exact mode also the kernels that compute log-probabilities.
    """
    if recipe.is_emulated or role not in ("actor", "rollout", "shard", "reference"):
        return {}
    family = FAMILIES.get(read_config(find_checkpoint(recipe.model.path)).get("model_type", ""), Family())
    with_weights = role in ("actor", "reference") or recipe.lora.rank > 0 or family.has_buffers
    facts = model_digests(recipe.model.path, with_weights=with_weights)
    if recipe.generator.exact and role in ("actor", "rollout"):
        from ....trainer.policy.exact.machine import kernels_of_machine

        facts["exact_kernels"] = kernels_of_machine()
    return facts | ({JOINED: "yes"} if JOINING in os.environ else {})


def check_rewards(settings: RewardSettings) -> None:
    """Every reward function exists, and has a weight if there are any."""
    functions = settings.functions
    if settings.weights and len(settings.weights) != len(functions):
        raise SettingError(
            f"reward.weights: {len(settings.weights)} weights for {len(functions)} functions of reward.path"
        )
    for path in functions.values() or [""]:
        if is_address(path):
            open_address(path, settings.timeout_s)
        elif path not in READY:
            check_function("reward.path", path, f"FILE.py:FUNCTION, {_ADDRESS}, or one of {', '.join(READY)}")
        elif (package := NEEDS.get(path)) is not None and find_spec(package) is None:
            raise SettingError(
                f"reward.path: {path} needs the package {package}: pip install {package.replace('_', '-')}"
            )


def check_function(setting: str, path: str, form: str = "FILE.py:FUNCTION") -> None:
    """`FILE.py:FUNCTION` names a Python file that binds this name; the file is read but not run."""
    home, colon, function = _given(setting, path, form).rpartition(":")
    if not colon or not function.isidentifier():
        raise SettingError(f"{setting}: {path!r} is not of the form {form}")
    file = source_file(home)
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except OSError as error:
        raise SettingError(f"{setting}: cannot read {file}: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        place = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise SettingError(f"{setting}: {file} is not valid Python ({place})") from error
    names = set(_bound_names(tree))
    if function not in names and "*" not in names:
        defined = ", ".join(sorted(n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)))
        raise SettingError(f"{setting}: {file} has no function {function!r}; it defines {defined or 'none'}")


def _given(name: str, value: str, meaning: str) -> str:
    if not value:
        raise SettingError(f"{name} is not set; it names {meaning}")
    return value


def _bound_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in aliases)
            case ast.Assign(targets=targets):
                yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.If() | ast.Try() | ast.With() | ast.For():
                yield "*"
