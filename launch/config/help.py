"""`--help`: the usage of the program, and every setting with its default, type, bounds or choices, and meaning.

`python -m headrace.launch.config.help` prints docs/use/configuration.md, which has the same settings.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import inspect as kinds

from .load import sections
from .values import describe, show_value

_USAGE = """\
Trains a language model by asynchronous reinforcement learning.

usage: headrace run RECIPE.yaml|NAME [KEY=VALUE ...] [--dry-run [--settings] | --trace]
       headrace run RECIPE.yaml|NAME [KEY=VALUE ...] --try[=N] [--response TEXT]
       torchrun --nproc-per-node N -m headrace.launch.run RECIPE.yaml [KEY=VALUE ...]
       headrace run join=RUN_FOLDER|HOST:PORT [roles.rollout=N] [roles.relay=N]

  NAME        a recipe that comes with the project
  --list      print the names of these recipes

  --dry-run   print roles, batch arithmetic and memory, make all checks of a start, then stop
  --settings  with --dry-run, also print every setting of the recipe
  --gpus=COUNTxGB
              with --dry-run, the GPUs of each host to plan for, such as 8x80; refused if they are too small.
              Data, functions and weights, which may be elsewhere, are not checked then
  --try[=N]   print the first prompt (or N) as the model will see it, call the rewards and tools once, then stop;
              --response TEXT is what is scored instead of the row's own answer
  --trace     keep the states of all processes, as `trace/` and `trace.json`, when the run has finished: for
              https://ui.perfetto.dev, and for `headrace plan --from RUN`
  --nnodes, --node-rank, --nproc-per-node, --master-addr, --master-port
              on each of several hosts, as in torchrun
  --help      print this page

The first form checks the recipe and starts torchrun with as many ranks as `roles` asks for. It exits with 0 when the run
is finished, 2 for a mistake in the recipe or its files, 130 after Ctrl-C, 143 after SIGTERM, and 1 when the run failed.
The fourth form adds rollouts and relays of this host to a running job.

Settings (of the recipe file, or as KEY=VALUE):
"""
_PAGE = """\
# Configuration

All settings, with the values that each one takes, its default and its meaning. They are in the recipe file, in a section each, or
arguments of the form `KEY=VALUE` on the command line, such as `run.steps=200`. An argument replaces the value of the file. `headrace run
--help` prints the same list. `null` as a default means that the program chooses, or that the feature is off; the meaning says which.

This page is generated from `comm/recipe/` by `python -m headrace.launch.config.help`.
"""

_PAGE_NAME = re.compile(r"docs/use/([\w-]+)\.md")


def usage() -> str:
    """The whole help page."""
    lines = [_USAGE]
    for section, kind in sections():
        lines += [*setting_lines(section, kind), ""]
    return "\n".join(lines)


def page() -> str:
    """All settings as a page of Markdown, with a table for each section."""
    lines = [_PAGE]
    for section, kind in sections():
        entries = {entry.name: entry for entry in kinds.type_info(kind).fields}  # pyright: ignore
        title = _linked(_title(kind).rstrip("."))
        lines += [f"## `{section}`", "", f"{title[:1].upper()}{title[1:]}.", ""]
        lines += ["| setting | takes | default | meaning |", "|---|---|---|---|"]
        for key, text in field_docs(kind).items():
            default = show_value(entries[key].default)
            shown = f"`{default}`" if default else "empty"
            cells = (f"`{section}.{key}`", describe(entries[key].type), shown, _linked(text))
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def _linked(text: str) -> str:
    """The text with links to the pages that it names, as from the folder of these pages."""
    return _PAGE_NAME.sub(r"[\1](\1.md)", text)


def setting_lines(section: str, kind: type, defaults: Mapping[str, Any] | None = None) -> Iterator[str]:
    """A section's title, and each setting with its default, type and meaning. defaults: instead of those of `kind`."""
    entries = {entry.name: entry for entry in kinds.type_info(kind).fields}  # pyright: ignore
    yield f"{section}: {_title(kind)}"
    for key, text in field_docs(kind).items():
        default = entries[key].default if defaults is None else defaults[key]
        yield f"  {section}.{key}={show_value(default)}  ({describe(entries[key].type)})"
        yield from textwrap.wrap(text, width=100, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _title(kind: type) -> str:
    """The subject of a section: its docstring without the name."""
    return (inspect.getdoc(kind) or "").splitlines()[0].partition(": ")[2]


def field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a section, read from its source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field_node, text_node in zip(body.body, body.body[1:], strict=False):
        if isinstance(field_node, ast.AnnAssign) and isinstance(field_node.target, ast.Name):
            match text_node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    docs[field_node.target.id] = " ".join(text.split())
    return docs


if __name__ == "__main__":
    sys.stdout.write(page())
