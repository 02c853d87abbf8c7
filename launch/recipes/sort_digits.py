"""The quickstart's task: sort the digits of a prompt, `56824:` -> `#24568`. Prompts, demonstrations and the reward.

List lengths have a geometric tail, and so have the responses. Demonstrations are sloppy (some neighbours are swapped):
a policy that imitates them well is right about one time in five, which training by reward then improves.
"""

import json
from pathlib import Path
from random import Random
from typing import Any

CHARACTERS = "0123456789:#"
SHORTEST = 3
LONGEST = 20
LONGER = 0.8
SLIP = 0.4


def draw_prompt(random: Random) -> str:
    """A list of 3 to 20 digits, each length `LONGER` times as likely as the one before, and a colon."""
    length = SHORTEST
    while length < LONGEST and random.random() < LONGER:
        length += 1
    return "".join(random.choices("0123456789", k=length)) + ":"


def answer(prompt: str) -> str:
    """The right response."""
    return "#" + "".join(sorted(prompt.removesuffix(":")))


def demonstrate(prompt: str, random: Random) -> str:
    """A sloppy response: each unequal pair of neighbours may be swapped."""
    digits = list(answer(prompt)[1:])
    place = 0
    while place < len(digits) - 1:
        if digits[place] != digits[place + 1] and random.random() < SLIP:
            digits[place : place + 2] = digits[place + 1], digits[place]
            place += 1
        place += 1
    return "#" + "".join(digits)


def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """1 for the right digits in the right order and nothing else, 0 otherwise."""
    return [float(completion == wanted) for completion, wanted in zip(completions, columns["answer"], strict=True)]


def write_data(path: Path, num_rows: int, seed: int) -> None:
    """A JSONL file of prompts, with the right answer and the list's length as further columns."""
    random = Random(f"sort digits {seed}")
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(num_rows):
            prompt = draw_prompt(random)
            row = {"prompt": prompt, "answer": answer(prompt), "num_digits": len(prompt) - 1}
            stream.write(json.dumps(row) + "\n")
