"""The words of `headrace run`, sorted."""

import itertools
import os
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
    num_tried: str | None = None
    """Rows of the data to try without a run, as it is written."""
    response: str | None = None
    """The text to score then in place of a row's own answer."""
    with_trace: bool = False
    """The run keeps its traces when it has finished."""
    hosts: Mapping[str, str] = field(default_factory=dict)
    """Those of torchrun's options that are given, without their dashes."""
    join: str = ""
    """The folder or address of the run that this host joins."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Arguments":
        """Sort the words; raises `SettingError` for an option that does not exist. `--help` prints the page."""
        if number := next((n for word, n in itertools.pairwise(words) if word == "--try" and n.isdecimal()), ""):
            raise SettingError(f"--try {number}: write --try={number}")
        # In `--try RECIPE` the recipe would be taken for the number of rows
        given = _parser().parse_intermixed_args(["--try=1" if word == "--try" else word for word in words])
        if given.settings and not given.dry_run:
            raise SettingError("--settings: only with --dry-run; of a run, config.yaml has all settings")
        if given.gpus is not None and not given.dry_run:
            raise SettingError("--gpus: only with --dry-run; a run uses the GPUs in CUDA_VISIBLE_DEVICES")
        if given.response is not None and given.num_tried is None:
            raise SettingError("--response: only with --try")
        join = [word for word in given.words if word.startswith("join=")]
        others = [word for word in given.words if word not in join]
        recipe = next((word for word in others if not is_setting(word)), None)
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
            given.num_tried,
            given.response,
            given.trace,
            {name: text for name, text in options.items() if text is not None},
            join[-1].removeprefix("join=") if join else "",
        )


def is_setting(word: str) -> bool:
    """Whether a word is `KEY=VALUE`: a folder may be called `lr=1e-5`, and a recipe be in it."""
    return "=" in word and "/" not in word.partition("=")[0] and not os.path.exists(word)


def _parser() -> CommandParser:
    parser = CommandParser("run", page=_page)
    parser.add_argument("words", nargs="*")
    for flag in ("--dry-run", "--settings", "--list", "--trace"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--gpus")
    parser.add_argument("--try", dest="num_tried")
    parser.add_argument("--response")
    for name in _HOST_OPTIONS:
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}")))
    return parser


def _page() -> str:
    from .help import usage

    return usage()
