"""Pictures of a terminal and of a page for the documents, and what can be read in them."""

import io
import os
import re
import shutil
import struct
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

from PIL import Image
from rich.console import Console
from rich.text import Text
from support.terminal import Shown

_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""rich's picture would load its font from a server."""
_COLOURS = 128


def keep(picture: Path) -> None:
    """Copy a picture to the folder that the variable PICTURES names, if it is set, as `docs/pictures.sh` does."""
    if folder := os.environ.get("PICTURES"):
        shutil.copy(picture, folder)


def svg_of_terminal(shown: Shown, num_lines: int, title: str) -> str:
    """The last lines of a terminal in a window with a title."""
    console = Console(record=True, width=shown.columns, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    for row in range(max(0, len(shown.lines) - num_lines), len(shown.lines)):
        line = Text.from_ansi(shown.styles.get(row, "") + shown.lines[row].rstrip())
        console.print(line, highlight=False, no_wrap=True, overflow="crop")
    return _FONTS.sub("", console.export_svg(title=title, unique_id="console"))


def lines_of_svg(svg: str) -> list[str]:
    """The texts of a picture, a line each; the title is among them."""
    lines: defaultdict[float, list[tuple[float, str]]] = defaultdict(list)
    for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        text = "".join(element.itertext()).replace("\xa0", " ")
        lines[float(element.get("y", 0))].append((float(element.get("x", 0)), text))
    return ["".join(text for _, text in sorted(parts)).strip() for _, parts in sorted(lines.items())]


def save_small(png: bytes, path: Path) -> None:
    """Write a picture of a page with few colours, which makes it several times smaller."""
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)


def size_of_png(path: Path) -> tuple[int, int]:
    """Width and height in pixels. Raises AssertionError for another file."""
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n"), path
    width, height = struct.unpack(">II", head[16:])
    return width, height
