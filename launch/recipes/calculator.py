"""A task with a tool: `37*48=` is answered right where the policy calls `calc` and copies its result.

    37*48=  <calc>37*48</calc>  <result>1776</result>  1776

The policy writes the first and the last part, the tool the one between. Demonstrations mostly guess, and guesses are wrong, so a
policy that imitates them rarely calls the tool; training by reward changes that.
"""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

CHARACTERS = "0123456789*=<>/acelrstu"
CALLS = 0.4
"""Share of the demonstrations that call the tool."""


def calc(expression: str) -> str:
    """
    Multiply two whole numbers.

    Args:
        expression: Two numbers with a star between, such as 37*48.

    Returns:
        The product.
    """
    factors = re.fullmatch(r"(\d{1,4})\*(\d{1,4})", expression)
    return str(int(factors[1]) * int(factors[2])) if factors else ""


def draw_prompt(random: Random) -> str:
    """Two numbers of two digits with a star between, and an equals sign."""
    return f"{random.randint(10, 99)}*{random.randint(10, 99)}="


def demonstrate(prompt: str, random: Random) -> tuple[str, ...]:
    """The turns of a response and, between them, the tool's results: a guess, or a call and a copy."""
    expression = prompt.removesuffix("=")
    result = calc(expression)
    if random.random() >= CALLS:
        return (str(random.randint(100, 9999)),)
    return (f"<calc>{expression}</calc>", f"<result>{result}</result>", result)


def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """1 for the right product after the last tag, 0 otherwise."""
    answers = [completion.rpartition(">")[2] for completion in completions]
    return [float(answer == wanted) for answer, wanted in zip(answers, columns["answer"], strict=True)]


def write_data(path: Path, num_rows: int, seed: int) -> None:
    """A JSONL file of prompts, with the product as a further column."""
    random = Random(f"calculator {seed}")
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(num_rows):
            prompt = draw_prompt(random)
            stream.write(json.dumps({"prompt": prompt, "answer": calc(prompt.removesuffix("="))}) + "\n")
