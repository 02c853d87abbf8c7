"""Each name that a run writes is explained on the page of metrics, and the page explains no other.

`System.wait` checks the first half for every run of these tests.
"""

import re
from pathlib import Path

import pytest
from support.metric_names import explained, names_in, unexplained
from support.source_tree import ROOT, texts
from support.system import TURNS, System
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from headrace.relay.hub.token_ledger import KINDS
from headrace.trainer.record.wait_metrics import ROLES

WRITERS = [
    *(ROOT / "trainer").glob("*.py"), *(ROOT / "trainer" / "learners").glob("*.py"), *(ROOT / "trainer" / "record").glob("*.py"),
    *(ROOT / "trainer" / "alarms").glob("*.py"), ROOT / "trainer" / "algorithms" / "kl_table.py",
    *(ROOT / "relay" / "hub").glob("*.py"), ROOT / "relay" / "journal" / "evaluation_metrics.py",
]  # fmt: skip
NOT_IN_EVERY_RUN = re.compile(
    r"alarm/CAUSE|actor/router_aux_loss|kl/age/RANGE|weights/midway|repack/.*|environment/(errors|timeouts)|prompt/turn_frac"
    r"|tools/(NAME/.*|failed_frac|seconds_.*)|wait_s/.*|staleness/(kl|limited_frac)|mismatch/.*|queue/starved_s"
    r"|tokens/(restored|filtered|failed|evicted|superseded|lost|served|recomputed/REASON)|reward/NAME/KEY|rollout/prefix_cache_hit_rate"
    r"|checkpoint/memory_.*|idle/r.*|rollout/.*|weights/pull_s"
)
"""Names that depend on what happens in a run. A text in one of the writers makes each of them."""
TOOLS = '''
class Box:
    """A box that can be opened."""

    def open(self, key: str) -> str:
        """Open the box.

        Args:
            key: of the box
        """
        return key
'''


def written(folder: Path, **settings: object) -> set[str]:
    """The names that a run writes, none of which has a port; TensorBoard has the same."""
    folder.mkdir()
    (folder / "box.py").write_text(TOOLS)
    (folder / "test.jsonl").write_text('{"prompt": "test"}\n')
    system = System(folder, **{name: str(value).format(folder=folder) for name, value in settings.items()})
    system.start_all().wait()
    names = names_in(system.dir / "metrics.jsonl")
    shown = {*EventAccumulator(str(system.dir / "tensorboard")).Reload().Tags()["scalars"]}
    assert names - shown <= {"staleness/hist"} and shown <= names | {"eval/version"} | {
        n for n in shown if "eval/" in n
    }
    assert not [name for name in names | shown if re.search(r":\d|\d{4,}$|localhost", name)]
    return names | shown


@pytest.fixture(scope="module")
def all_written(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("runs")
    ppo = {"algorithm.advantage": "gae", "algorithm.kl_coef": 0.1, "eval.path": "{folder}/test.jsonl", "eval.every": 1}
    tools = TURNS | {"environment.path": "{folder}/box.py:Box", "run.steps": 2}
    return written(folder / "ppo", **ppo) | written(folder / "tools", **tools)


def test_every_name_that_a_run_writes_is_explained(all_written: set[str]):
    assert not unexplained(all_written)


def test_every_name_that_is_explained_is_written(all_written: set[str]):
    missing = {name for name, pattern in explained().items() if not any(map(pattern.fullmatch, all_written))}
    assert not {name for name in missing if not NOT_IN_EVERY_RUN.fullmatch(name)}
    made = {re.escape(text).replace(r"\.\.\.", ".+") for path in WRITERS for text in texts(path) if "/" in text}
    templates = [re.compile(text) for text in made if re.fullmatch(r"[\w/@.+\\{}]+", text)]
    assert not {name for name in missing if not any(template.fullmatch(name) for template in templates)}


def test_the_page_has_every_role_of_a_wait_and_every_end_of_a_token_and_no_other():
    names = {*explained()}
    assert {name for name in names if name.startswith("wait_s/")} == {f"wait_s/{role}" for role in ROLES}
    others = {"tokens/generated", "tokens/ready", "tokens/unfinished", "tokens/served", "tokens/recomputed/REASON"}
    assert {name for name in names if name.startswith("tokens/")} == {f"tokens/{kind}" for kind in KINDS} | others
