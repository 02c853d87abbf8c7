"""GSM8K goes from its files through template and reward without a conversion."""

import json
from pathlib import Path

import pytest
from support.assets import GSM8K
from support.policies import STORIES

from headrace.comm.errors import SettingError
from headrace.comm.recipe import DataSettings
from headrace.launch.config.load import read_recipe
from headrace.relay.dataset.opening import checked_prompts, open_rows
from headrace.rollout.engine.chat_template import prompt_tokens
from headrace.rollout.rewards.function import RewardFunction
from headrace.rollout.rewards.ready import gsm8k
from headrace.trainer.policy.model import load_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if think %}<think>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(STORIES)


@pytest.fixture(params=["published", "verl"])
def data(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSettings:
    """The published file as it is, and the rows that verl's example makes of it, as parquet."""
    words = [
        "data.system_prompt=Be brief.",
        f"data.chat_template={TEMPLATE}",
        "data.chat_template_kwargs={think: true}",
    ]
    if request.param == "published":
        return read_recipe(None, [f"data.path={GSM8K}", "data.prompt_column=question", *words]).data
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()[:8]]
    verl = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": row["question"]}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["answer"].rpartition("#### ")[2]},
            "extra_info": {"split": "test", "index": index, "answer": row["answer"]},
        }
        for index, row in enumerate(rows)
    ]
    datasets.Dataset.from_list(verl).to_parquet(tmp_path / "test.parquet")
    return read_recipe(None, [f"data.path={tmp_path / 'test.parquet'}", *words]).data


def test_gsm8k_goes_through_data_template_and_reward_as_published_and_in_verls_form(data: DataSettings, tokenizer):
    rows = open_rows(data)
    first = next(iter(checked_prompts(rows, data.paths[0], data.prompt_column)))
    question = json.loads(GSM8K.read_text().splitlines()[0])["question"]
    assert first == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    text = f"system: Be brief.\nuser: {question}\n<think>"
    row = json.loads(rows[0])
    assert prompt_tokens(row, tokenizer, data) == tokenizer(text, add_special_tokens=False)["input_ids"]
    columns = {name: [value] * 2 for name, value in row.items() if name != "prompt"}
    answers = [[{"role": "assistant", "content": text}] for text in ("She makes $18.", "She makes $81.")]
    batch = {"prompts": [first] * 2, "completions": answers, "completion_ids": [[1]] * 2, "columns": columns}
    assert RewardFunction("gsm8k", gsm8k).score(batch).rewards == [1.0, 0.0]


def test_a_template_may_be_a_file(tmp_path: Path, tokenizer):
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}!")
    settings = DataSettings(chat_template=str(tmp_path / "chat.jinja"))
    row = {"prompt": [{"role": "user", "content": "Once"}]}
    assert tokenizer.decode(prompt_tokens(row, tokenizer, settings)).strip() == "Once!"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", r"data\.chat_template: .* has no chat template; name a file with one"),
        ("tokenizer", r"data\.chat_template: .* has no chat template; name a file with one"),
        ("missing.jinja", r"data\.chat_template: cannot read missing\.jinja"),
        (
            "{{ raise_exception('no system role') }}",
            r"data\.chat_template: the template rejects a prompt: .*no system role",
        ),
    ],
)
def test_a_template_that_is_missing_or_refuses_a_prompt_names_its_setting(template: str, message: str, tokenizer):
    with pytest.raises(SettingError, match=message):
        prompt_tokens({"prompt": [{"role": "user", "content": "x"}]}, tokenizer, DataSettings(chat_template=template))


@pytest.mark.parametrize(
    "word", ["data.chat_template_kwargs={enable_thinking: false}", "data.chat_template_kwargs.enable_thinking=false"]
)
def test_arguments_of_the_template_have_their_types(word: str):
    assert read_recipe(None, [word]).data.chat_template_kwargs == {"enable_thinking": False}
