"""The recipes that come with the project, by their names."""

from pathlib import Path

from ...comm.errors import SettingError
from ..command_line import nearest

FOLDER = Path(__file__).resolve().parent


def recipes() -> dict[str, Path]:
    """The file of each recipe by its name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def summary_of(path: Path) -> str:
    """The first line of a recipe's comment."""
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def find_recipe(word: str) -> str:
    """The file that a user's word means: its own if it ends in .yaml or has a slash, else the recipe of that name.

    The file may be missing, as on a later host of a run. Raises `SettingError` for an unknown name.
    """
    if word.endswith((".yaml", ".yml")) or "/" in word:
        return word
    known = recipes()
    if word in known:
        return str(known[word])
    hint = f"; write ./{word} for the file here" if Path(word).is_file() else ""
    raise SettingError(
        f"no recipe {word!r}: {nearest(word, list(known))}{hint}; `headrace run --list` says what each does"
    )
