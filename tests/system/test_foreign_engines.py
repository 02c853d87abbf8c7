"""Generators and trainers that the project did not build, in whole runs of it."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from support.system import System
from transformers import AutoModelForCausalLM

from headrace.comm.errors import SettingError
from headrace.comm.plugins import load_object
from headrace.launch.config.load import read_recipe
from headrace.launch.processes.role_process import main_of
from headrace.relay import loop as relay_loop
from headrace.relay.hub import loop as hub_loop
from headrace.relay.journal.hub_state import account_dict
from headrace.relay.journal.replay import replay
from headrace.relay.queue.stream import RunStopped
from headrace.rollout import loop as rollout_loop
from headrace.rollout.generators.base import open_generator
from headrace.rollout.service import GeneratorService
from headrace.trainer import loop as trainer_loop
from headrace.trainer.learners.base import open_learner
from headrace.trainer.policy.model import LOADING

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs" / "use"
TRANSFORMERS = f"{DOCUMENTS / 'transformers_generator.py'}:TransformersGenerator"


@pytest.fixture
def documented_trainer(tmp_path: Path) -> str:
    """The example of docs/use/service.md as a file."""
    file = tmp_path / "my_trainer.py"
    file.write_text((DOCUMENTS / "service.md").read_text().split("```python\n")[1].split("```")[0])
    return f"{file}:main"


@pytest.fixture(autouse=True)
def one_load_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """Roles are threads here, and transformers loads a model under switches that hold for the whole process."""
    load = AutoModelForCausalLM.from_pretrained

    def alone(*arguments: Any, **options: Any) -> Any:
        with LOADING:
            return load(*arguments, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", alone)


def account(system: System) -> dict[str, Any]:
    return account_dict(replay(system.dir / "journal.jsonl"))


@pytest.mark.slow
def test_transformers_own_continuous_batching_generates_what_is_trained(tmp_path: Path):
    """The example of an adapter."""
    system = System(tmp_path, **{"rollout.engine": TRANSFORMERS}).start_all(num_rollouts=1)
    summary = system.wait()
    assert (summary["status"], summary["steps"], summary["version"]) == ("finished", 3, 3)
    assert (account(system)["trained"], account(system)["holds"]) == (12, True)
    metrics = [json.loads(line) for line in (system.dir / "metrics.jsonl").read_text().splitlines()]
    # Its log-probabilities are those of the weights that it reports: new versions were loaded in place.
    fresh = [step["mismatch/logprob_abs_diff"] for step in metrics if step["staleness/max"] == 0]
    assert fresh and max(fresh) < 1e-4


@pytest.mark.parametrize("setting", ["generator.exact=true", "lora.rank=2"])
def test_a_setting_that_a_foreign_generator_lacks_is_refused(setting: str):
    recipe = read_recipe(None, [f"rollout.engine={TRANSFORMERS}", setting])
    with pytest.raises(SettingError, match=r"rollout\.engine"):
        load_object("rollout.engine", TRANSFORMERS)(None, recipe)


def test_the_documented_trainer_consumes_a_runs_experience_and_publishes_weights(
    tmp_path: Path, documented_trainer: str
):
    system = System(tmp_path, **{"trainer.engine": documented_trainer})
    system.start("hub", hub_loop.run)
    system.start("relay", relay_loop.run)
    system.start("rollout", rollout_loop.run)
    system.start("actor", main_of("actor", system.recipe))
    summary = system.wait()
    assert (summary["status"], summary["steps"], summary["version"]) == ("finished", 3, 3)
    assert (account(system)["trained"], account(system)["holds"]) == (12, True)
    assert max(map(int, summary["staleness"])) <= 3


def test_a_run_trains_on_the_rows_of_a_users_generator(tmp_path: Path):
    """Every response repeats one token, with the log-probability of a uniform policy."""
    versions: list[int] = []

    def main(fleet: Any, recipe: Any) -> None:
        service = GeneratorService(fleet, recipe).start()
        names = {name for name, _ in AutoModelForCausalLM.from_pretrained(recipe.model.path).named_parameters()}
        try:
            while True:
                assert service.take_weights().keys() == names
                versions.append(service.version)
                while held := service.prompts(room=4):
                    for number, sample in enumerate(held):
                        assert sample.row["prompt"].startswith("say")
                        with pytest.raises(ValueError, match="2 log-probabilities for 3 tokens"):
                            service.put(sample, [1, 2], [5, 5, 5], [-1.0, -1.0], reward=1.0)
                        service.put(sample, [1, 2], [5, 5, 5], [math.log(1 / 100)] * 3, reward=float(number % 2))
        except RunStopped:
            service.close()

    (tmp_path / "questions.jsonl").write_text('{"prompt": "say a"}\n{"prompt": "say b"}\n')
    system = System(tmp_path, **{"run.steps": 2, "eval.path": f"{tmp_path}/questions.jsonl"})
    system.start("hub", hub_loop.run)
    system.start("relay", relay_loop.run)
    system.start("rollout", main)
    system.start("actor", trainer_loop.run)
    summary = system.wait()
    assert (summary["status"], summary["steps"], account(system)["holds"]) == ("finished", 2, True)
    assert [result["eval/version"] for result in replay(system.dir / "journal.jsonl").evaluations.results] == [0, 2]
    assert versions == sorted(set(versions)) and versions[0] == 0


@pytest.mark.parametrize("role", ["actor", "rollout"])
def test_an_engines_file_is_executed_once_in_its_process(tmp_path: Path, role: str):
    """The worker looks whether it is an adapter, and the role's loop opens it: both get the same class."""
    (tmp_path / "mine.py").write_text(
        f"with open('{tmp_path}/executed', 'a') as file:\n    file.write('x')\n"
        "class Adapter:\n    def __init__(self, fleet, recipe): ...\n"
    )
    setting = {"actor": "trainer.engine", "rollout": "rollout.engine"}[role]
    recipe = read_recipe(None, [f"{setting}={tmp_path}/mine.py:Adapter"])
    loop, open_engine = {"actor": (trainer_loop, open_learner), "rollout": (rollout_loop, open_generator)}[role]
    assert main_of(role, recipe) is loop.run
    fleet: Any = None
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    again = load_object(setting, f"{tmp_path}/elsewhere/mine.py:Adapter")
    assert type(open_engine(fleet, recipe)) is again
    assert (tmp_path / "executed").read_text() == "x"


def test_two_files_of_one_name_are_two_modules(tmp_path: Path):
    classes: list[type] = []
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"class Adapter:\n    home = '{folder}'\n")
        classes.append(load_object("rollout.engine", f"{tmp_path}/{folder}/mine.py:Adapter"))
    for found, folder in zip(classes, ("first", "second"), strict=True):
        assert vars(sys.modules[found.__module__])["Adapter"] is found and vars(found)["home"] == folder


def test_a_file_that_fails_is_executed_again(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("raise RuntimeError('no license')\n")
    with pytest.raises(RuntimeError, match="no license"):
        load_object("rollout.engine", f"{file}:Adapter")
    file.write_text("class Adapter: ...  # it has a license now\n")
    assert load_object("rollout.engine", f"{file}:Adapter").__name__ == "Adapter"


def test_an_engine_that_is_neither_class_nor_function_is_refused(tmp_path: Path):
    (tmp_path / "mine.py").write_text("Adapter = 7\n")
    with pytest.raises(SettingError, match=r"rollout\.engine.*neither"):
        main_of("rollout", read_recipe(None, [f"rollout.engine={tmp_path}/mine.py:Adapter"]))


def test_an_engine_that_is_not_there_is_named_by_its_setting(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("class Adapter: ...\n")
    assert load_object("rollout.engine", f"{file}:Adapter").__name__ == "Adapter"
    for path in (f"{file}:Other", f"{tmp_path / 'other.py'}:Adapter", "no_such_package.module:Adapter"):
        with pytest.raises(SettingError, match=r"rollout\.engine"):
            load_object("rollout.engine", path)
    with pytest.raises(SettingError, match="one of builtin"):
        read_recipe(None, ["rollout.engine=builtim"])
    assert main_of("rollout", read_recipe(None, [f"rollout.engine={file}:Adapter"])) is rollout_loop.run
