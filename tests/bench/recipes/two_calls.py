"""A task of three turns for an instruct model: a product plus a number, by two calls of a calculator that takes one operation.

    What is 34 * 12 + 25?
    <calc>34*12</calc>  <result>408</result>  <calc>408+25</calc>  <result>433</result>  433

The chat template of SmolLM2 knows no tools, so a prompt is text in the template's form, with two worked examples, and the calls
are text. An untrained model copies the first call and seldom makes the second one.
"""

import json
import re
from pathlib import Path
from random import Random

HELD_OUT = 200
TRAINING = 4096
_SHOTS = ((34, 12, 25), (17, 58, 341))
_SYSTEM = "Use the calculator for each step, then write the answer."

Numbers = tuple[int, int, int]


def calc(expression: str) -> str:
    """
    Multiply or add two whole numbers.

    Args:
        expression: Two numbers with * or + between, such as 37*48.

    Returns:
        The result, empty for another expression.
    """
    parts = re.fullmatch(r"(\d{1,6})([*+])(\d{1,6})", expression)
    if parts is None:
        return ""
    first, second = int(parts[1]), int(parts[3])
    return str(first * second if parts[2] == "*" else first + second)


def score(solution_str: str, answer: str) -> float:
    """1 where the last number behind the last tag is the answer, 0 otherwise."""
    return float(re.findall(r"\d+", solution_str.rpartition(">")[2])[-1:] == [answer])


def calls(solution_str: str) -> float:
    """The number of calls that had a result."""
    return float(len(re.findall(r"<result>\d", solution_str)))


def make_prompt(numbers: Numbers) -> str:
    """The text of a prompt: a system message, the examples, the question, and the head of the answer."""
    turns = [("system", _SYSTEM)]
    for shot in _SHOTS:
        turns += [("user", _question(shot)), ("assistant", _demonstrate(shot))]
    turns.append(("user", _question(numbers)))
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def write_data(folder: Path, seed: int) -> None:
    """`prompts.jsonl` and `held-out.jsonl` in `folder`; the held-out prompts are the same for each seed and in no training data."""
    held_out = _draw(Random("two calls"), HELD_OUT, set())
    training = _draw(Random(f"two calls {seed}"), TRAINING, {*held_out, *_SHOTS})
    for name, rows in (("prompts", training), ("held-out", held_out)):
        lines = [json.dumps({"prompt": make_prompt(row), "answer": str(_value(row))}) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def _draw(random: Random, num: int, excluded: set[Numbers]) -> list[Numbers]:
    """Different triples of numbers."""
    found: dict[Numbers, None] = {}
    while len(found) < num:
        numbers = random.randint(11, 99), random.randint(11, 99), random.randint(101, 999)
        if numbers not in excluded:
            found[numbers] = None
    return list(found)


def _question(numbers: Numbers) -> str:
    a, b, c = numbers
    return f"What is {a} * {b} + {c}?"


def _demonstrate(numbers: Numbers) -> str:
    a, b, c = numbers
    product, total = a * b, a * b + c
    return f"<calc>{a}*{b}</calc><result>{product}</result><calc>{product}+{c}</calc><result>{total}</result>{total}"


def _value(numbers: Numbers) -> int:
    a, b, c = numbers
    return a * b + c
