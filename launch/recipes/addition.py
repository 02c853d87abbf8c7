"""A task for an instruct model: the sum of two numbers of two digits. Prompts, held-out prompts and the reward.

Rows are chat messages, so the model's own chat template applies. The held-out prompts are the same for each seed, and none of
their pairs of numbers is in the training data, in either order.
"""

import json
import os
import re
from itertools import combinations_with_replacement
from pathlib import Path
from random import Random
from typing import Any

HELD_OUT = 200
PROMPTS_FILE = "prompts.jsonl"
HELD_OUT_FILE = "held-out.jsonl"

Pair = tuple[int, int]


def score(solution_str: str, answer: str) -> float:
    """1 where the last number of the response is the right one, 0 otherwise."""
    numbers = re.findall(r"\d+", solution_str)
    return float(numbers[-1:] == [answer])


def make_row(pair: Pair) -> dict[str, Any]:
    """A prompt of one message of the user, and the right answer."""
    question = f"What is {pair[0]} + {pair[1]}? Answer with the number only."
    return {"prompt": [{"role": "user", "content": question}], "answer": str(sum(pair))}


def held_out() -> list[Pair]:
    """The pairs of the evaluation."""
    return _all_pairs()[:HELD_OUT]


def training(seed: int) -> list[Pair]:
    """Each of the 3,895 other pairs once, in an order that depends on the seed."""
    pairs = _all_pairs()[HELD_OUT:]
    random = Random(f"addition {seed}")
    random.shuffle(pairs)
    return [_in_some_order(pair, random) for pair in pairs]


def write_data(folder: Path, seed: int) -> None:
    """The files of the training prompts and of the held-out ones in `folder`; a run that reads a file keeps the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in ((PROMPTS_FILE, training(seed)), (HELD_OUT_FILE, held_out())):
        made = folder / f"{name}.{os.getpid()}"
        made.write_text("".join(json.dumps(make_row(pair)) + "\n" for pair in pairs), encoding="utf-8")
        made.replace(folder / name)


def _all_pairs() -> list[Pair]:
    """Two numbers from 10 to 99, each pair once, in one fixed order."""
    random = Random("addition")
    pairs = list(combinations_with_replacement(range(10, 100), 2))
    random.shuffle(pairs)
    return [_in_some_order(pair, random) for pair in pairs]


def _in_some_order(pair: Pair, random: Random) -> Pair:
    return pair if random.random() < 0.5 else (pair[1], pair[0])
