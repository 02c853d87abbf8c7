"""What the commands that serve a model have in common: the model that their words name, and an end by Ctrl-C or SIGTERM."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...comm.environment import sleeping_threads
from ...comm.errors import SettingError

if TYPE_CHECKING:
    from ...comm.recipe import Recipe
    from ..config.named_model import TrainedModel


class ServedWords(NamedTuple):
    """The model of a command line. `word` is the one that names it."""

    word: str
    model: "TrainedModel"
    recipe: "Recipe"
    """With the settings of the words, and this machine's defaults."""


def read_served(words: Sequence[str], effective: tuple[str, ...]) -> ServedWords:
    """The model and the settings of a command line. effective: how settings begin that have an effect. Raises `SettingError`."""
    from ..config.arguments import is_setting
    from ..config.checks.recipe import check_family
    from ..config.device_defaults import with_device_defaults
    from ..config.gpus import Gpus
    from ..config.model_files import ModelFiles
    from ..config.named_model import read_named

    settings = [word for word in words if is_setting(word)]
    if idle := [word for word in settings if not word.startswith(effective)]:
        raise SettingError(
            f"{idle[0].partition('=')[0]} has no effect on a server; --help lists the settings that have one"
        )
    model, recipe = read_named(words)
    recipe = with_device_defaults(recipe, Gpus.of_this_host())
    check_family(recipe.generator, recipe.algorithm, ModelFiles.read(model.path).folder)
    return ServedWords(next(word for word in words if word not in settings), model, recipe)


def until_interrupted(role: str, serve: Callable[[], None]) -> None:
    """Call `serve`, which Ctrl-C or SIGTERM ends. role: whose settings the message about a full GPU names."""
    from ..processes.full_gpu import full_gpu_in_one_line
    from ..processes.signals import interrupted_by_sigterm

    with sleeping_threads(), interrupted_by_sigterm():
        try:
            with full_gpu_in_one_line(role):
                serve()
        except KeyboardInterrupt:
            print(flush=True)


def in_url(host: str) -> str:
    """A host as addresses have it."""
    return f"[{host}]" if ":" in host else host
