"""`headrace numerics`: its figures against formulas, what it compares and prints, and how it ends."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.policies import tiny_policy

from headrace.comm.environment import VISIBLE_DEVICES
from headrace.launch.numerics import main
from headrace.launch.report.mismatch import (
    GENERATOR,
    HEALTHY_KL,
    HEALTHY_KL_OF_EXPERTS,
    HEALTHY_KL_OF_FLOAT32,
    TRAINER,
    TRANSFORMERS,
    Mismatch,
    ScoredSample,
    healthy_kl,
    mismatches,
    verdict,
    worst_tokens,
)
from headrace.launch.report.numerics import NumericsRequest

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs" / "use"
PATIENCE_S = 120.0
SHIFT = 0.05
SHIFTED = f'''
"""A generator whose reported log-probs are too high from the ninth token on."""

from dataclasses import replace
from headrace.rollout.generators.builtin import BuiltinGenerator

def shifted(logprobs):
    return [value + {SHIFT} * (position >= 8) for position, value in enumerate(logprobs)]

class Shifted(BuiltinGenerator):
    def step(self):
        return [replace(done, logprobs=shifted(done.logprobs)) for done in super().step()]

def loop(fleet, recipe):
    pass
'''
FEW = ["--max-new-tokens=12", "--samples=2", "--dtype=float32"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("say a", "count to three", "why")))
    return file


@pytest.fixture
def shifted(tmp_path: Path) -> str:
    file = tmp_path / "shifted.py"
    file.write_text(SHIFTED)
    return f"{file}:Shifted"


def sample_of(first: list[float], second: list[float], prompt: int = 0) -> ScoredSample:
    logprobs = {GENERATOR: np.array(first), TRAINER: np.array(second)}
    return ScoredSample(prompt, [1], list(range(len(first))), logprobs)


def rows_of(text: str) -> dict[tuple[str, str], dict[str, float]]:
    """The printed table: by engines and range its numbers."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    engines = ""
    pattern = r"(\w+, \w+)?\s+(all|\d+-\d*)\s+([\d,]+)\s+(\S+e[+-]\d+)\s+(\S+e[+-]\d+)\s+([\d.]+)%"
    for line in text.splitlines():
        if match := re.fullmatch(pattern, line):
            engines = match[1] or engines
            found[engines, match[2]] = {
                "tokens": float(match[3].replace(",", "")),
                "difference": float(match[4]),
                "kl": float(match[5]),
                "far": float(match[6]) / 100,
            }
    return found


def test_the_estimate_of_kl_is_that_of_the_distributions():
    random = np.random.default_rng(0)
    logits = random.normal(size=50)
    p, q = (np.exp(x - np.logaddexp.reduce(x)) for x in (logits, logits + 0.05 * random.normal(size=50)))
    kl = float((p * np.log(p / q)).sum())
    drawn = random.choice(50, size=200_000, p=p)
    found = Mismatch.of(np.log(p)[drawn], np.log(q)[drawn])
    assert abs(found.kl - kl) < 4 * found.kl_error and found.kl_error < kl / 50
    ratios = (q / p)[drawn]
    terms = ratios - 1 - np.log(ratios)
    assert found.kl == pytest.approx(terms.mean(), rel=1e-9)
    assert found.kl_error == pytest.approx(terms.std() / math.sqrt(len(terms)), rel=1e-6)
    assert found.mean_difference == pytest.approx(np.abs(np.log(ratios)).mean(), rel=1e-9)
    assert found.far_share == pytest.approx((np.abs(np.log(ratios)) > 0.1).mean())


def test_a_tiny_difference_does_not_vanish_in_the_estimate():
    first = np.full(10, -3.0)
    assert Mismatch.of(first, first + 1e-6).kl == pytest.approx(5e-13, rel=1e-3)


def test_positions_are_split_into_ranges_and_every_token_is_in_one():
    long = [-1.0] * 40
    found = {name: m for _, name, m in mismatches([sample_of(long, long), sample_of([-1.0] * 3, [-1.5, -1.0, -1.0])])}
    assert {name: m.num_tokens for name, m in found.items()} == {"all": 43, "1-8": 11, "9-32": 24, "33-128": 8}
    assert found["1-8"].mean_difference == pytest.approx(0.5 / 11) and found["9-32"].mean_difference == 0


def test_the_worst_tokens_are_those_with_the_largest_differences_of_either_sign():
    samples = [sample_of([-1.0, -2.0], [-1.0, -2.3]), sample_of([-1.0, -2.0, -3.0], [-1.1, -1.5, -3.0], prompt=1)]
    worst = worst_tokens(samples, 2)
    assert [(token.prompt, token.position, token.token_id) for token in worst] == [(1, 1, 1), (0, 1, 1)]
    assert worst[0].logprobs == {GENERATOR: -2.0, TRAINER: -1.5}
    assert len(worst_tokens(samples, 9)) == 3, "equal tokens are not among them"


def test_the_bound_depends_on_type_and_experts_and_the_verdict_on_the_bound():
    assert healthy_kl("bfloat16", has_experts=False) == HEALTHY_KL
    assert healthy_kl("bfloat16", has_experts=True) == HEALTHY_KL_OF_EXPERTS
    assert healthy_kl("float32", has_experts=True) == HEALTHY_KL_OF_FLOAT32
    found = Mismatch(100, 0.02, 3e-4, 1e-5, 0.01)
    assert not verdict(found, 2e-4, "set x").is_healthy and verdict(found, 2e-4, "set x").text.endswith("; set x")
    assert verdict(found, 3e-4, "set x").is_healthy
    assert "bit for bit" in verdict(Mismatch(100, 0.0, 0.0, 0.0, 0.0), 2e-4, "").text


def test_the_engines_of_a_run_are_healthy_in_float32_and_all_pairs_are_compared(
    policy: Path, questions: Path, capfd: Any
):
    assert main([str(policy), "--data", str(questions), *FEW]) == 0
    text = capfd.readouterr().out
    rows = rows_of(text)
    pairs = {f"{GENERATOR}, {TRAINER}", f"{GENERATOR}, {TRANSFORMERS}", f"{TRAINER}, {TRANSFORMERS}"}
    assert {pair for pair, _ in rows} == pairs
    for pair in pairs:
        parts = [row["tokens"] for (own, name), row in rows.items() if own == pair and name != "all"]
        assert rows[pair, "all"]["tokens"] == sum(parts) > 0
        assert rows[pair, "all"]["difference"] < 1e-5 and rows[pair, "all"]["far"] == 0
    assert "in 6 responses to 3 prompts" in text and text.splitlines()[-1].startswith("healthy: KL(generator, trainer)")


@pytest.mark.parametrize("words", [["generator.exact=true"], ["generator.exact=true", "--dtype=bfloat16"]], ids=len)
def test_exact_mode_is_equal_bit_for_bit(words: list[str], policy: Path, questions: Path, capfd: Any):
    assert main([str(policy), "--data", str(questions), *FEW, *words]) == 0
    text = capfd.readouterr().out
    assert rows_of(text)[f"{GENERATOR}, {TRAINER}", "all"]["difference"] == 0
    assert text.splitlines()[-1] == "healthy: generator and trainer are equal bit for bit"
    assert "largest differences" not in text


def test_a_users_generator_with_wrong_log_probs_is_not_healthy(policy: Path, questions: Path, shifted: str, capfd: Any):
    assert main([str(policy), "--data", str(questions), "--engine", shifted, *FEW]) == 1
    text = capfd.readouterr().out
    rows = {name: row for (pair, name), row in rows_of(text).items() if pair == f"{GENERATOR}, {TRAINER}"}
    assert rows["9-32"]["difference"] == pytest.approx(SHIFT, rel=0.02)
    assert rows["9-32"]["kl"] == pytest.approx(math.exp(-SHIFT) - 1 + SHIFT, rel=0.05)
    assert rows["1-8"]["difference"] < 1e-5
    worst = [line for line in text.splitlines() if line.startswith("  prompt ")]
    assert len(worst) == 5
    for line in worst:
        assert (found := re.search(r"position (\d+), .*generator (\S+), trainer (\S+), transformers (\S+)", line))
        assert int(found[1]) > 8 and float(found[2]) - float(found[3]) == pytest.approx(SHIFT, abs=2e-4)
        assert float(found[3]) == pytest.approx(float(found[4]), abs=2e-4)
    assert "NOT HEALTHY" in text.splitlines()[-1] and f"rollout.engine={shifted}" in text.splitlines()[-1]


def test_the_documented_adapter_of_transformers_is_compared_like_the_built_in_engine(
    policy: Path, questions: Path, capfd: Any
):
    engine = f"{DOCUMENTS / 'transformers_generator.py'}:TransformersGenerator"
    assert main([str(policy), "--data", str(questions), "--engine", engine, *FEW]) == 0
    assert rows_of(capfd.readouterr().out)[f"{GENERATOR}, {TRAINER}", "all"]["difference"] < 1e-4


def test_without_prompts_built_in_questions_are_answered_and_lora_rounds_as_in_a_run(policy: Path, capfd: Any):
    assert main([str(policy), "lora.rank=2", "--samples=1", "--max-new-tokens=2", "--dtype=float32"]) == 0
    assert "in 32 responses to 32 prompts" in capfd.readouterr().out


MISTAKES = {
    "no such model": (["no/such/model"], "model.path: no/such/model does not exist"),
    "no model": (["generator.exact=true"], "name one model"),
    "no samples": (["POLICY", "--samples=0"], "--samples must be at least 1, not 0"),
    "no number": (["POLICY", "--samples=many"], "argument --samples: invalid int value"),
    "no such type": (["POLICY", "--dtype=float8"], "model.dtype=float8 is not allowed"),
    "no such option": (["POLICY", "--sample=3"], "the nearest is --samples"),
    "no such prompts": (["POLICY", "--data=none.jsonl"], "data.path: none.jsonl does not exist"),
    "no such class": (["POLICY", "--engine=SHIFTED.py:Other"], "has no function 'Other'"),
    "no such file": (["POLICY", "--engine=none.py:Engine"], "rollout.engine: cannot read none.py"),
    "a function": (["POLICY", "--engine=SHIFTED.py:loop"], "is a function with a loop of its own"),
    "an engine without exact mode": (
        ["POLICY", f"--engine={DOCUMENTS / 'transformers_generator.py'}:TransformersGenerator", "generator.exact=true"],
        "supports neither generator.exact nor lora.rank",
    ),
    "a foreign trainer": (["POLICY", "trainer.engine=mine.py:Mine"], "trainer.engine: numerics compares with the built-in"),
    "emulated devices": (["POLICY", "rollout.engine=emulated"], "rollout.engine: emulated devices have no policy"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(mistake: str, policy: Path, shifted: str, capfd: Any):
    words, message = MISTAKES[mistake]
    home = shifted.removesuffix(".py:Shifted")
    assert main([word.replace("POLICY", str(policy)).replace("SHIFTED", home) for word in words]) == 2
    error = capfd.readouterr().err
    assert error.startswith("headrace: error: ") and message in error and error.count("\n") == 1


def test_the_first_line_comes_before_torch_is_imported(policy: Path):
    program = """
import os, sys
from headrace.launch import numerics
from headrace.launch.report import numerics as report
def first(text):
    print(text, "torch" in sys.modules, flush=True)
    os._exit(0)
report.say = first
numerics.main(sys.argv[1:])
"""
    command = [sys.executable, "-c", program, str(policy), "--dtype=float32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == f"numerics of {policy} in float32; rollout.engine=builtin False\n"


def test_the_gpus_are_hidden_for_the_cpu_alone_and_only_meanwhile(policy: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[str | None] = []
    monkeypatch.setattr(
        "headrace.launch.report.numerics.compare_engines", lambda _: seen.append(os.environ.get(VISIBLE_DEVICES)) or 0
    )
    monkeypatch.setenv(VISIBLE_DEVICES, "3")
    assert main([str(policy), "--device", "cpu"]) == main([str(policy)]) == 0
    assert seen == ["", "3"] and os.environ[VISIBLE_DEVICES] == "3"


def test_settings_that_change_no_number_are_those_of_one_rank(policy: Path):
    words = [str(policy), "roles.actor=2", "lora.path=gone", "generator.max_running=8", "sampling.temperature=0.7"]
    recipe = NumericsRequest.of(words, 2).recipe
    assert (recipe.roles.actor, recipe.lora.path, recipe.generator.max_running) == (1, "", 8)
    assert (recipe.sampling.temperature, recipe.sampling.max_new_tokens) == (0.7, 128)
