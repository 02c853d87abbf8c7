"""The pictures of the documents: a run of the calculator on its console, in the viewer and in TensorBoard, and what can be read there."""

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from support.chromium import Page
from support.pictures import keep, lines_of_svg, save_small, size_of_png, svg_of_terminal
from support.terminal import Terminal

from headrace.comm.messages import MemberStatus, StatusReport
from headrace.launch.status.picture import lines
from headrace.trainer.record.trackers.board import LAYOUT

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 3000.0
"""A bound against hanging tests; the machine may be slow."""
STEPS = 20
WARM_UP_STEPS = 160
"""A third of the recipe's: a policy that is still often wrong has calls worth looking at, and is made in less time."""
MADE_POLICY = ROOT / "runs/calculator-policy/seed-0/policy"
"""Taken where a run of the calculator from this checkout has left one."""
COMMAND = ("run", "calculator", f"run.steps={STEPS}")
COLUMNS, LINES = 120, 36
ROLES = ("hub", "actor-0", "relay-0", "rollout-0", "rollout-1")
FOLDER = ROOT / "docs/use/pictures"
PAGES = {"console.svg": "running.md", "viewer.png": "viewer.md", "tensorboard.png": "trackers.md"}
MAX_BYTES = 150_000
WINDOW = (1400, 900)

COUNT = "document.querySelector('#count').textContent"
DETAIL = "document.querySelector('#detail').innerText.replace(/\\s+/g, ' ')"
FIRST_WRONG = """[...document.querySelectorAll('#visible .row')].findIndex((row) => {
    const [prompt, response] = [...row.children].slice(-2).map((e) => e.textContent);
    return response.startsWith('calc(') && !response.startsWith(`calc(${prompt.slice(0, -1)})`);
})"""
"""The place in the list of the first call of something else than the prompt."""
DEEP_TEXT = """(() => {
    const texts = (node) => node.nodeType === Node.TEXT_NODE ? [node.data]
        : ["STYLE", "SCRIPT", "TEMPLATE", "NOSCRIPT"].includes(node.nodeName) || (node instanceof Element && getComputedStyle(node).display === "none") ? []
        : [...(node.shadowRoot ? node.shadowRoot.childNodes : []), ...node.childNodes].flatMap(texts);
    return texts(document.body).map((text) => text.trim()).filter((text) => text);
})()"""
"""The texts of a page that are there to see, also those of its shadow trees."""

NUM_EMPTY = f"({DEEP_TEXT}.join(' ').match(/Matches \\( ?0 ?\\)/g) || []).length"
"""The number of charts without data, or whose data has not come."""


class Seen(NamedTuple):
    """The folder in which the run was started, and the picture of its console in the middle of it."""

    home: Path
    console: Path

    @property
    def run_dir(self) -> Path:
        return self.home / "runs/calculator"

    def metrics(self) -> list[dict[str, float]]:
        """The lines of `metrics.jsonl`."""
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]


def headrace(*words: str) -> list[str]:
    return [sys.executable, "-m", "headrace", *words]


def within(folder: Path, command: list[str]) -> list[str]:
    """The command, started in a folder."""
    return ["bash", "-c", 'cd "$1" && shift && exec "$@"', "within", str(folder), *command]


def is_worth_showing(text: str) -> bool:
    """Whether the samples of a step are on the screen, and the whole status is below them; whether somebody waits is left to the run."""
    shown = text.splitlines()[-LINES:]
    status = "\n".join(shown[-14:])
    return (
        any(line.startswith("  sample ") for line in shown)
        and re.search(rf"^\d+ of {STEPS} steps .* left$", status, re.MULTILINE) is not None
        and all(re.search(rf"^{role} ", status, re.MULTILINE) for role in ROLES)
        and re.search(r"^groups: .* window \d+$", status, re.MULTILINE) is not None
    )


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """A run of the recipe on a terminal, from a folder of its own."""
    from headrace.launch.recipes.parts import CALCULATOR, TASKS, make_policy  # not for the fast tests

    home = tmp_path_factory.mktemp("pictures")
    policy = home / "runs/calculator-policy/seed-0/policy"
    policy.parent.mkdir(parents=True)
    if MADE_POLICY.is_dir():
        shutil.copytree(MADE_POLICY, policy)
    make_policy(policy, 0, TASKS[CALCULATOR]._replace(warm_up_steps=WARM_UP_STEPS))
    console = home / "console.svg"
    with Terminal(within(home, headrace(*COMMAND)), {}, COLUMNS, LINES) as terminal:
        terminal.until(is_worth_showing, PATIENCE_S)
        console.write_text(svg_of_terminal(terminal.shown, LINES, " ".join(("headrace", *COMMAND))))
        code, text = terminal.end(PATIENCE_S)
    assert code == 0, text
    yield Seen(home, console)


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
def test_the_console_shows_steps_samples_the_processes_and_the_queue(seen: Seen):
    shown = lines_of_svg(seen.console.read_text())
    assert " ".join(("headrace", *COMMAND)) in shown, "the title"
    steps = [line for line in shown if re.search(rf" step +\d+/{STEPS}  reward \d\.\d{{3}}", line)]
    assert len(steps) >= 2
    assert any("<calc>" in line and "<result>" in line for line in shown), "a sample calls the tool"
    assert_has_the_status(shown)
    keep(seen.console)


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_wrong_call_is_found_in_the_viewer_with_three_clicks(seen: Seen, tmp_path: Path):
    """The third click is on the first line whose call is not the product that the prompt asks for: the list shows both."""
    with Terminal(headrace("view", str(seen.run_dir)), {}, 1000) as terminal:
        text = terminal.until(lambda text: "Ctrl-C" in text, PATIENCE_S)
        (address,) = re.findall(r"http://\S+", text)
        page = Page(tmp_path)
        page.resize(*WINDOW)
        page.open(address)
        page.until(f"/^[1-9].* samples$/.test({COUNT})")
        page.until("document.querySelectorAll('.chart').length === 6")
        page.click("#with-calls")
        page.click("#head [data-name=reward] button")
        page.click(f"#visible .row:nth-child({page.run(FIRST_WRONG) + 1})")
        page.until("document.querySelector('#detail details') !== null")
        page.run("document.querySelectorAll('#detail details').forEach((e) => { e.open = true; })")
        detail = page.run(DETAIL)
        (prompt,) = re.findall(r"\d\d\*\d\d(?==)", detail)[:1]
        (call,) = re.findall(r"calc\((.*?)\) → (\d*)", detail)[:1]
        assert call[0] != prompt
        samples = [json.loads(line) for line in (seen.run_dir / "samples.jsonl").read_text().splitlines()]
        calls = [
            (s["prompt"], c["arguments"][0], c["result"])
            for s in samples
            for t in s["turns"]
            for c in t.get("calls", ())
        ]
        assert (f"{prompt}=", *call) in calls
        assert "reward 0" in detail
        charts = page.run("[...document.querySelectorAll('.chart b')].map((e) => e.textContent)")
        assert {"reward/mean", "response_length/mean", "staleness/mean"} <= {*charts}
        offered = page.run("[...document.querySelectorAll('#names label')].map((e) => e.textContent.trim())")
        assert {name for name in offered if name.startswith("tools/")}
        page.run(
            f"(() => {{ const e = document.querySelector('#run'); e.textContent = e.textContent.replace({json.dumps(str(seen.home))}, '/home/me'); }})()"
        )
        save_small(page.picture(), tmp_path / "viewer.png")
    keep(tmp_path / "viewer.png")


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
def test_tensorboard_shows_every_metric_and_the_groups_of_charts(seen: Seen, tmp_path: Path):
    names = {name for line in seen.metrics() for name, value in line.items() if isinstance(value, int | float)} - {
        "step",
        "time_s",
    }
    tensorboard = [sys.executable, "-m", "tensorboard.main", "--logdir", "runs", "--port", "0", "--load_fast", "false"]
    with Terminal(within(seen.home, tensorboard), {}, 1000) as terminal:
        text = terminal.until(lambda text: re.search(r"http://\S+ ", text), PATIENCE_S)
        (address,) = re.findall(r"http://\S+", text)
        page = Page(tmp_path)
        page.resize(*WINDOW)
        page.open(f"{address}#timeseries")
        shown = texts_of(page, "reward")
        counted = {name: int(number) for name, number in re.findall(r"\n([\w ]+)\n(\d+) cards?\b", "\n".join(shown))}
        for group, number in Counter(name.partition("/")[0] for name in names).items():
            assert group in shown and counted.get(group, 1) >= number, (
                f"{group}: {counted}"
            )  # a single card is not counted
        cards = {group + rest for group, rest in pairwise(shown) if rest.startswith("/")}
        assert cards and cards <= names, "those of the groups that are open"
        page.open(f"{address}?#custom_scalars")  # with another address than before, so that it is loaded
        shown = texts_of(page, "learning")
        assert {*LAYOUT, *LAYOUT["learning"]} <= {*shown}
        page.until(f"{NUM_EMPTY} <= 1")  # without evaluations their chart stays empty
        save_small(page.picture(), tmp_path / "tensorboard.png")
    keep(tmp_path / "tensorboard.png")


def texts_of(page: Page, awaited: str) -> list[str]:
    """The texts on a page once one of them is `awaited`."""
    page.until(f"{DEEP_TEXT}.includes({json.dumps(awaited)})")
    return page.run(DEEP_TEXT)


def shape(line: str) -> str:
    """A line of the status with its numbers and gaps made equal."""
    equal = re.sub(r"\d[\d.,:]*", "0", re.sub(r" {2,}", "  ", line))
    return re.sub(r"(0 (h|min|s) )+left", "0 left", equal)


def assert_has_the_status(shown: list[str]) -> None:
    """The lines have the words that the status of today has."""
    queue = {"step": 16, "in_training": 5, "ready": 3, "begun": 8, "window": 24}
    members = [
        MemberStatus(name, "here", 1, 0, state, version=3)
        for name, state in (("hub", "decides"), ("relay-0", "serves"))
    ]
    report = StatusReport(
        12, 12, members, {}, num_steps=STEPS, elapsed_s=125.0, left_s=185.0, step_s=1.9, reward=0.4, queue=queue,
    )  # fmt: skip
    head, groups, *roles = [shape(line.text) for line in lines(report)]
    shapes = [shape(line) for line in shown]
    for wanted in (head, groups, roles[1]):
        assert wanted in shapes, f"{wanted} is not among {shapes}: run docs/pictures.sh"
    for role in ROLES:
        assert any(line.startswith(f"{role} ") for line in shown), role


@pytest.mark.parametrize(("name", "page"), PAGES.items())
def test_a_page_shows_its_picture_with_words_for_those_who_do_not_see_it(name: str, page: str):
    found = re.findall(rf"!\[([^\]]+)\]\(pictures/{re.escape(name)}\)", (ROOT / "docs/use" / page).read_text())
    assert len(found) == 1 and len(found[0].split()) >= 8
    assert (FOLDER / name).stat().st_size <= MAX_BYTES


def test_the_pictures_of_pages_are_of_one_window():
    assert {size_of_png(FOLDER / name) for name in PAGES if name.endswith(".png")} == {WINDOW}
    assert {path.name for path in FOLDER.iterdir()} == {*PAGES}


def test_the_picture_of_the_console_has_the_words_that_the_status_has_today():
    picture = (FOLDER / "console.svg").read_text()
    assert "url(http" not in picture and "href" not in picture, "it loads nothing"
    assert_has_the_status(lines_of_svg(picture))
