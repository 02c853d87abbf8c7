"""Runs a recipe of tinker-cookbook, whose source stays as it is, on the quickstart's task: `python -m support.cookbook RECIPE URL FOLDER KEY=VALUE ...`.

Its downloads are files in FOLDER: the data sets lie there under their names, and the tokenizer is that of `base_model`. The cookbook's own
registry gets a renderer for prompts of the task, since a policy with an alphabet of digits cannot read the cookbook's.
"""

import importlib
import json
import os
import re
import sys
from pathlib import Path
from random import Random
from typing import Any

from headrace.launch.recipes import sort_digits
from headrace.launch.recipes.tiny_policy import EOS_ID

RENDERER = "headrace/digits"
DATA_SETS = {"openai/gsm8k": "main", "HuggingFaceH4/no_robots": "default"}
"""Data sets of the recipes `rl_loop` and `sl_loop`, with their configurations."""


def write_data_sets(folder: Path, num_rows: int, seed: int = 0) -> None:
    """The task as files under the names of the data sets."""
    random = Random(seed)
    prompts = [sort_digits.draw_prompt(random) for _ in range(num_rows)]
    answers = [sort_digits.answer(prompt) for prompt in prompts]
    rows = {
        "openai/gsm8k": [
            {"question": prompt, "answer": f"#### {answer[1:]}"}
            for prompt, answer in zip(prompts, answers, strict=True)
        ],
        "HuggingFaceH4/no_robots": [
            {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
            for prompt, answer in zip(prompts, answers, strict=True)
        ],
    }
    for name, config in DATA_SETS.items():
        place = folder / name
        place.mkdir(parents=True)
        for split, part in (("train", rows[name]), ("test", rows[name][:32])):
            (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
        head = f"configs:\n- config_name: {config}\n  data_files:\n{files}"
        (place / "README.md").write_text(f"---\n{head}---\n")


def digits_renderer(tokenizer: Any) -> Any:
    """The renderer of the task: `56824:` and `#24568`; a response counts as the answer in the form that the recipe grades."""
    base = importlib.import_module("tinker_cookbook.renderers.base")
    tinker = importlib.import_module("tinker")

    def chunk(text: str, *more: int) -> Any:
        return tinker.EncodedTextChunk(tokens=[*tokenizer.encode(text, add_special_tokens=False), *more])

    class DigitsRenderer(base.Renderer):
        @property
        def has_extension_property(self) -> bool:
            return True

        def get_stop_sequences(self) -> list[int]:
            return [EOS_ID]

        def render_message(self, message: Any, ctx: Any) -> Any:
            is_user = message["role"] == "user"
            found = re.search(r"\d+:" if is_user else r"#\d+", message["content"])
            assert found is not None, message
            return base.RenderedMessage(output=[chunk(found[0]) if is_user else chunk(found[0], EOS_ID)])

        def build_generation_prompt(self, messages: Any, role: str = "assistant", prefill: str | None = None) -> Any:
            return super().build_generation_prompt(messages[-1:], role, prefill)

        def _get_generation_suffix(self, role: str, ctx: Any) -> list[int]:
            return []

        def parse_response(self, response: list[int]) -> Any:
            text = tokenizer.decode([token for token in response if token != EOS_ID]).replace(" ", "")
            is_whole = bool(response) and response[-1] == EOS_ID
            content = f"\\boxed{{{text[1:]}}}" if is_whole and text.startswith("#") else text
            return {"role": "assistant", "content": content}, base.ParseTermination.STOP_SEQUENCE

    return DigitsRenderer(tokenizer)


def main(words: list[str]) -> None:
    """Run a recipe with its configuration."""
    recipe, url, folder, *settings = words
    os.chdir(folder)
    renderers = importlib.import_module("tinker_cookbook.renderers")
    model_info: Any = importlib.import_module("tinker_cookbook.model_info")
    renderers.register_renderer(RENDERER, lambda tokenizer, _: digits_renderer(tokenizer))
    model_info.get_recommended_renderer_name = lambda _: RENDERER  # it knows the service's models alone
    module = importlib.import_module(f"tinker_cookbook.recipes.{recipe}")
    values = {key: json.loads(value) for key, _, value in (setting.partition("=") for setting in settings)}
    values |= {"base_url": url, "log_path": str(Path(folder) / f"log-{recipe}")}
    module.main(basic_config(module, values) if recipe == "rl_basic" else module.Config(**values))


def basic_config(module: Any, values: dict[str, Any]) -> Any:
    """The configuration of `rl_basic`: with a penalty by the initial policy, or with `max_steps_off_policy` asynchronous."""
    train = importlib.import_module("tinker_cookbook.rl.train")
    math_env = importlib.import_module("tinker_cookbook.recipes.math_rl.math_env")
    model = values.pop("model_name")
    groups = values.pop("batch_size")
    values["dataset_builder"] = math_env.Gsm8kDatasetBuilder(
        batch_size=groups,
        group_size=values.pop("group_size"),
        renderer_name=RENDERER,
        model_name_for_tokenizer=model,
    )
    age = values.pop("max_steps_off_policy", None)
    if age is None:
        values |= {"kl_penalty_coef": 0.01, "kl_reference_config": train.KLReferenceConfig(base_model=model)}
        values["loss_fn"] = "importance_sampling"
    else:
        values["async_config"] = train.AsyncConfig(max_steps_off_policy=age, groups_per_batch=groups, loss_fn="ppo")
    return module.build_config_blueprint(model).apply(values).make()


if __name__ == "__main__":
    main(sys.argv[1:])
