"""Reward functions that `reward.path` takes by name.

All but `length` are called per sample with the text of the response, so they serve text and chat prompts alike. Of a chat with
several turns it is the policy's last message, without the answers of tools. The ground truth is the column `ground_truth`,
`reward_model.ground_truth`, `answer` or `solution`.
"""

import re
from decimal import Decimal, InvalidOperation

NEEDS = {"math": "math_verify"}
"""The package that a function needs, from an extra of the function's name."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_MARKED = re.compile(r"####\s*\$?-?\d[\d,]*(?:\.\d+)?\.?\s*")
_LATEX = re.compile(r"\$|\\boxed|\\\(|\\\[")
"""Signs around LaTeX in a text."""
_EXPONENT = re.compile(r"[-+]?\d+(?:\.\d+)?[eE][-+]?\d{1,3}")
_SPACED = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_SPACE = re.compile(r"(?<=\d) (?=\d{3}\b)")
_QUANTITY = re.compile(r"[-+]?[\d.,]+ ?(?!(?:pi|sqrt|sin|cos|tan|log|ln|exp)\b)[A-Za-z]{2,}(?:[ /][A-Za-z]+)*")
"""A number with spaces between its thousands, and one with a unit in words: LaTeX reads both as products."""
_THINK = re.compile(r"<think>(?!.*<think>)(.*?)</think>.*\S.*", re.DOTALL)


def gsm8k(solution_str: str, ground_truth: str | float) -> float:
    """1 if the last number of the response, after its last `####` if there is one, is the ground truth's, else 0.

    The ground truth is a number, or GSM8K's published answer, a worked solution that ends in `#### 72`. Equal values count, so
    `72.0` and `1,000` are `72` and `1000`.
    """
    wanted = _last_number(_text(ground_truth))
    given = _last_number(solution_str)
    if wanted is None:
        raise ValueError(f"the ground truth {str(ground_truth)[-60:]!r} has no number")
    return float(given == wanted)


def math(solution_str: str, ground_truth: str | float) -> float | None:
    """1 if math-verify finds the response equal to the ground truth, else 0; None if it cannot read the ground truth.

    The response may state its answer as LaTeX, in `\\boxed{}` or as plain numbers. The ground truth is an answer, with or without
    signs of LaTeX around it, or a worked solution with `\\boxed{}` or `####` before the answer.
    """
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    wanted = _text(ground_truth).rpartition("####")[2].strip()
    if _SPACED.fullmatch(wanted):
        wanted = wanted.replace(" ", "")
        solution_str = _SPACE.sub("", solution_str)
    # Without signs around it LaTeX is read as its first number: `2\sqrt{3}` as 2.
    forms = [wanted] if _LATEX.search(wanted) else [f"${wanted}$", wanted]
    golds = [gold for form in forms if (gold := parse(form))]
    golds = golds if _QUANTITY.fullmatch(wanted) else golds[:1]
    given = parse(solution_str)
    return float(any(verify(gold, given) for gold in golds)) if golds else None


def format(solution_str: str) -> float:
    """1 if the response is `<think>...</think>` and then an answer, else 0 (DeepSeek-R1, section 2.2.2)."""
    return float(_THINK.fullmatch(solution_str.strip()) is not None)


def marked(solution_str: str) -> float:
    """1 if the response ends as GSM8K's published answers do, with a line `#### 72`, and has no other such mark, else 0."""
    *before, last = solution_str.strip().splitlines() or [""]
    return float(_MARKED.fullmatch(last) is not None and "####" not in "".join(before))


def length(completion_ids: list[list[int]]) -> list[float]:
    """Minus the number of the response's tokens, in thousands: its weight is the price of a thousand tokens."""
    return [-len(ids) / 1000 for ids in completion_ids]


READY = {function.__name__: function for function in (math, gsm8k, format, marked, length)}


def _text(ground_truth: str | float) -> str:
    """A ground truth as text; a number has no exponent, which would be read as another number."""
    text = str(ground_truth).strip()
    return f"{Decimal(text):f}" if _EXPONENT.fullmatch(text) else text


def _last_number(text: str) -> Decimal | None:
    """The last number in a text, after its last `####` if there is one."""
    numbers = _NUMBER.findall(text.rpartition("####")[2])
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:
        return None
