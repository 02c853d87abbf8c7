"""The card of a trained model: what it says, what it leaves out, and whose changes it keeps."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.launch.config.load import read_recipe, save_recipe
from headrace.launch.config.run_checkpoints import TrainedModel
from headrace.launch.report.model_card import CARD, MARK, card, changed_settings, write_card, write_cards
from headrace.relay.checkpoints import CheckpointFolder

SETTINGS = ("optimizer.lr=2e-5", "sampling.max_new_tokens=64", "sampling.stop=[</answer>]", "comm.interface=eth7")


def make_run(folder: Path, *words: str, steps: int = 4) -> Path:
    """The folder of a finished run without weights: recipe, metrics, summary, and a checkpoint with an adapter."""
    places = [f"run.dir={folder}", f"model.path={folder.parent / 'models' / 'base'}", f"data.path={folder}/sums.jsonl"]
    save_recipe(read_recipe(None, [*places, f"reward.path={folder}/rewards.py:score", *SETTINGS, *words]))
    lines: list[dict[str, Any]] = []
    for step in range(steps):
        lines.append({"step": step, "time_s": 60.0 * (step + 1), "reward/mean": step / 10})
        if step % 2:
            lines[-1] |= {"eval/version": float(step - 1), "eval/test/avg@1": step / 100}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99, "ti')
    hf = folder / "checkpoints" / f"step_{steps}" / "hf"
    adapter = hf.with_name("adapter")
    for path, name in ((hf, "config.json"), (adapter, "adapter_config.json")):
        path.mkdir(parents=True)
        (path / name).write_text("{}")
    CheckpointFolder(folder).seal(steps)
    summary = {"steps": steps, "export": str(hf), "reward_first": 0.1, "reward_last": 0.2}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "secret project" / "my run")


def parts(text: str) -> tuple[dict[str, Any], str]:
    """The YAML header, and the rest."""
    empty, head, rest = text.split("---\n", 2)
    assert not empty
    return yaml.safe_load(head), rest


def test_a_card_has_the_header_of_the_hub_and_says_how_the_model_was_trained(run: Path):
    head, text = parts(card(TrainedModel.find(str(run))))
    assert head["library_name"] == "transformers" and head["pipeline_tag"] == "text-generation"
    assert head["tags"] == ["headrace", "reinforcement-learning"]
    assert "base_model" not in head, "the Hub does not know a folder"
    for line in (
        "# my run",
        "trained by reinforcement learning with Headrace, from base, for 4 steps",
        "| data | sums.jsonl |",
        "| reward | rewards.py:score |",
        "| batch | 16 prompts with 8 samples each |",
        "optimizer.lr=2e-05\n",
        "sampling.max_new_tokens=64\n",
        'sampling.stop=["</answer>"]\n',
        "| reward | 0.100 -> 0.200  (first and last 3 steps) |",
        "| held-out: eval/test/avg@1 | first 0.010 (step 0) -> best 0.030 (step 2) |",
        "| time | 4 min |",
        "| transformers | ",
    ):
        assert line in text, line


def test_a_card_has_no_folder_and_no_network_of_the_machine(run: Path):
    text = card(TrainedModel.find(str(run)))
    assert "secret project" not in text and "eth7" not in text and "run.dir" not in text


def test_the_card_of_an_earlier_checkpoint_ends_with_its_own_step(run: Path):
    earlier = run / "checkpoints" / "step_2" / "hf"
    earlier.mkdir(parents=True)
    (earlier / "config.json").write_text("{}")
    text = card(TrainedModel.find(str(earlier)))
    assert "| reward | 0.100  (mean of step 2) |" in text and "| time | 2 min |" in text
    assert "| held-out: eval/test/avg@1 | first 0.010 (step 0) -> best 0.030 (step 2) |" in text, (
        "in the line of step 3"
    )


def test_a_base_model_and_data_of_the_hub_are_named_with_the_licence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cached = tmp_path / CARD
    cached.write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    files = {"config.json": str(tmp_path / "config.json"), CARD: str(cached)}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: files[file])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub" / "datasets--org--sums").mkdir(parents=True)
    run = make_run(tmp_path / "run", "model.path=org/base", "data.path=[org/sums,more.jsonl]", "lora.rank=4")
    head, text = parts(card(TrainedModel.find(str(run))))
    assert (head["base_model"], head["license"], head["datasets"]) == ("org/base", "apache-2.0", ["org/sums"])
    assert "from org/base, for 4 steps" in text and "| data | org/sums, more.jsonl |" in text
    head, text = parts(card(TrainedModel.find(str(run / "checkpoints" / "step_4" / "adapter"))))
    assert (head["library_name"], head["base_model"]) == ("peft", "org/base")
    assert "lora" in head["tags"] and "This adapter (LoRA) was trained" in text and "AutoPeftModel" in text


def test_a_card_has_no_address_of_a_server(tmp_path: Path):
    judge = "judge+https://judge.corp.internal:8443/v1?api_key=SECRET#model=/srv/models/judge-8b&key=JUDGE_KEY"
    run = make_run(tmp_path / "run", f"reward.path=['{judge}','http://10.1.2.3:9000/score?token=SECRET']")
    text = card(TrainedModel.find(str(run)))
    assert "| reward | a judge (judge-8b), a server |" in text
    assert not any(secret in text for secret in ("corp", "8443", "SECRET", "JUDGE_KEY", "10.1.2.3", "srv"))


@pytest.mark.parametrize("folder", ["clients/acme", "../acme", "~/acme", "/home/acme", "acme:1/acme"])
def test_of_a_file_a_card_has_the_last_name_alone(folder: str):
    words = [f"environment.tools=[{folder}/tools.py:search]", f"lora.path={folder}/adapter", "lora.rank=4"]
    recipe = read_recipe(None, [*words, "data.system_prompt=yes/no", "sampling.stop=[</a>,/think]"])
    assert {*changed_settings(recipe)} == {
        "data.system_prompt=yes/no",
        "lora.rank=4",
        "lora.path=adapter",
        'sampling.stop=["</a>","/think"]',
        'environment.tools=["tools.py:search"]',
    }


def test_a_data_folder_that_is_elsewhere_is_no_data_set_of_the_hub(tmp_path: Path):
    run = make_run(tmp_path / "run", "data.path=data/acme_prompts")
    head, text = parts(card(TrainedModel.find(str(run))))
    assert "datasets" not in head and "| data | acme_prompts |" in text


def test_a_long_text_is_named_by_its_length():
    recipe = read_recipe(None, [f"data.chat_template={'{{ x }}' * 100}", "environment.tools=[/home/me/tools.py:calc]"])
    assert list(changed_settings(recipe)) == [
        "data.chat_template=(700 characters)",
        'environment.tools=["tools.py:calc"]',
    ]
    assert list(changed_settings(read_recipe(None))) == []


def test_the_end_of_a_run_writes_the_cards_of_the_model_and_of_its_adapter(run: Path):
    summary = json.loads((run / "summary.json").read_text())
    write_cards(summary)
    folder = Path(summary["export"])
    assert "AutoModelForCausalLM" in (folder / CARD).read_text()
    assert "AutoPeftModel" in (folder.with_name("adapter") / CARD).read_text()
    assert not CheckpointFolder(run).problem(4), "the checkpoint stays whole"
    write_cards({"export": ""})
    write_cards({"export": str(run / "elsewhere")})


def test_a_card_that_the_user_has_taken_over_stays(run: Path):
    model = TrainedModel.find(str(run))
    path = write_card(model)
    path.write_text(f"{MARK}\nmine\n")
    assert "# USER/model" in write_card(model, "USER/model").read_text(), "the mark is still there"
    path.write_text("mine\n")
    write_card(model, "USER/model")
    assert path.read_text() == "mine\n"


def test_a_card_that_cannot_be_written_is_a_warning(run: Path, capfd: Any):
    summary = json.loads((run / "summary.json").read_text())
    (run / "config.yaml").write_text("run: [")
    write_cards(summary)
    assert f"warning: {Path(summary['export']) / CARD} is not written" in capfd.readouterr().err


def test_a_model_without_a_run_has_a_short_card(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    head, text = parts(card(TrainedModel.find(str(tmp_path)), "org/model"))
    assert head["tags"] == ["headrace"]
    assert "# org/model" in text and 'from_pretrained("org/model")' in text and "## Training" not in text
