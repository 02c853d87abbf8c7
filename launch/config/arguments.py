"""The words of `headrace run`, sorted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...comm.errors import SettingError
from ..command_line import CommandParser

_HOST_OPTIONS = ("nnodes", "node-rank", "nproc-per-node", "master-addr", "master-port")
"""Options of torchrun, which takes them with underscores too."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The words of a command line."""

    recipe: str | None
    """The recipe's file or name."""
    overrides: Sequence[str]
    is_dry_run: bool = False
    with_settings: bool = False
    is_list: bool = False
    """Whether only the names of the recipes are asked for."""
    gpus: str | None = None
    """The GPUs to plan for, `COUNTxGB`."""
    hosts: Mapping[str, str] = field(default_factory=dict)
    """Those of torchrun's options that are given, without their dashes."""
    join: str = ""
    """The folder or address of the run that this host joins."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Arguments":
        """Sort the words; raises `SettingError` for an option that does not exist. `--help` prints the page."""
        given = _parser().parse_intermixed_args(words)
        if given.settings and not given.dry_run:
            raise SettingError("--settings: only with --dry-run; of a run, config.yaml has all settings")
        if given.gpus is not None and not given.dry_run:
            raise SettingError("--gpus: only with --dry-run; a run uses the GPUs in CUDA_VISIBLE_DEVICES")
        join = [word for word in given.words if word.startswith("join=")]
        others = [word for word in given.words if word not in join]
        recipe = next((word for word in others if "=" not in word), None)
        if recipe is not None:
            others.remove(recipe)
        options = {name: getattr(given, name.replace("-", "_")) for name in _HOST_OPTIONS}
        return cls(
            recipe,
            others,
            given.dry_run,
            given.settings,
            given.list,
            given.gpus,
            {name: text for name, text in options.items() if text is not None},
            join[-1].removeprefix("join=") if join else "",
        )


def _parser() -> CommandParser:
    parser = CommandParser("run", page=_page)
    parser.add_argument("words", nargs="*")
    for flag in ("--dry-run", "--settings", "--list"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--gpus")
    for name in _HOST_OPTIONS:
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}")))
    return parser


def _page() -> str:
    from .help import usage

    return usage()
