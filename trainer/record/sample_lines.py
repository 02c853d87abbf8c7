"""A sample as a line of `samples.jsonl`, and in short for the console and TensorBoard."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np

from ...comm.recipe import Recipe
from ...relay.dataset.tool_calls import is_error, parse_calls, parse_results
from .shown_rows import Sample
from .token_texts import TokenTexts

_SHOWN = 240
"""Characters of a text on the console."""


class SampleLines:
    """Makes the lines of a run; docs/use/viewer.md describes them."""

    def __init__(self, recipe: Recipe, tokenizer: Any) -> None:
        self._texts = TokenTexts(tokenizer)
        self._functions = recipe.reward.functions
        self._stops = [stop for stop in recipe.sampling.stop if isinstance(stop, str)]
        settings = recipe.environment
        self._has_turns = settings.is_set or settings.is_served
        is_known = not settings.path and len(settings.user_code) == len(settings.tools)
        self._tools = [path.rpartition(":")[2] for path in settings.tools] if is_known else None

    def fields(self, step: int, sample: Sample) -> dict[str, Any]:
        """The line's fields in their order. step: the one that trained the sample, counted from 0, while the line counts from 1."""
        row = sample.row
        notes = msgspec.json.decode(sample.info)
        metrics = notes.get("metrics", {})
        own = np.array(sample.from_policy, bool)
        response = self._texts.whole(sample.response_ids)
        turns = self._turns(sample) if self._has_turns else []
        calls = [call for turn in turns for call in turn.get("calls", ())]
        return {
            "step": step + 1,
            "group": str(row.row.group),
            "sample": row.row.sample,
            "prompt": self._texts.whole(sample.prompt_ids),
            "response": response,
            "reward": row.reward,
            "rewards": {name: value for name, value in metrics.items() if name in self._functions},
            "metrics": {name: value for name, value in metrics.items() if name not in self._functions},
            "notes": notes.get("extra", {}),
            "advantage": sample.advantage,
            "versions": sorted({*np.array(sample.versions)[own].tolist()}) or [row.version],
            "staleness": step - row.version,
            "finish": self._finish(sample, turns[-1]["text"] if turns else response),
            "num_prompt_tokens": len(sample.prompt_ids),
            "num_tokens": len(sample.response_ids),
            "num_trained": sample.num_trained,
            "num_turns": max(sum(turn["by"] == "policy" for turn in turns), 1),
            "num_calls": len(calls),
            "num_failed_calls": sum(call["failed"] for call in calls),
            "turns": turns,
            "tokens": None if sample.logprobs is None else self._tokens(sample, sample.logprobs, own),
        }

    def _turns(self, sample: Sample) -> list[dict[str, Any]]:
        """What the policy drew and what its environment inserted, in turn, with the calls of tools and their results."""
        turns: list[dict[str, Any]] = []
        for is_own, part in groupby(enumerate(sample.from_policy), key=itemgetter(1)):
            places = [place for place, _ in part]
            span = slice(places[0], places[-1] + 1)
            turn: dict[str, Any] = {"by": "policy" if is_own else "environment", "start": span.start, "end": span.stop}
            turns.append({**turn, "text": self._texts.whole(sample.response_ids[span])})
        for turn, after in zip(turns, [*(each["text"] for each in turns[1:]), None], strict=True):
            if turn["by"] != "policy" or (
                after is None and sample.is_cut
            ):  # an environment never sees a turn that is cut
                continue
            spoken = self._texts.spoken(sample.response_ids[turn["start"] : turn["end"]])
            if calls := self._calls(spoken, after):
                turn["calls"] = calls
        return turns

    def _calls(self, turn: str, after: str | None) -> list[dict[str, Any]]:
        is_chat = "<tool_call>" in turn
        names = self._tools
        if names is None and not is_chat and not (after or "").startswith("<result>"):
            names = []  # a class with tools, whose names only its own process knows
        calls = parse_calls(turn, names, is_chat=is_chat)
        if names is None and not is_chat:  # other tags may stand before the calls, which alone have results
            calls = calls[-(after or "").count("<result>") :]
        results = [None] * len(calls) if after is None else parse_results(after, len(calls))
        return [
            {
                "name": _encodable(call.name),
                "arguments": _encodable(call.arguments),
                "result": result,
                "failed": bool(call.problem) or (result is not None and is_error(result)),
            }
            for call, result in zip(calls, results, strict=True)
        ]

    def _finish(self, sample: Sample, last_turn: str) -> str:
        if sample.is_cut:
            return "cut"
        return "stop string" if any(stop in last_turn for stop in self._stops) else "ended"

    def _tokens(self, sample: Sample, logprobs: list[float], own: np.ndarray) -> dict[str, Any]:
        """Columns with an entry for each token of the response; null for tokens that the policy did not draw."""
        generator = np.array(logprobs, np.float32)
        columns: dict[str, Any] = {
            "ids": sample.response_ids,
            "texts": self._texts.each(sample.response_ids),
            "generator": _numbers(generator, own),
        }
        if sample.trainer_logprobs is not None:
            trainer = np.array(sample.trainer_logprobs, np.float32)
            columns["trainer"] = _numbers(trainer, own)
            columns["ratio"] = _numbers(np.exp(trainer.astype(float) - generator).astype(np.float32), own)
        if len({*sample.versions}) > 1:
            columns["versions"] = sample.versions
        if sample.advantages is not None and len({*sample.advantages}) > 1:
            columns["advantages"] = _numbers(np.array(sample.advantages, np.float32), own)
        return columns


def in_short(fields: dict[str, Any]) -> str:
    """A sample as some short lines: its figures, and its texts without what a terminal would obey."""
    parts = "  ".join(f"{name} {value:.3g}" for name, value in fields["rewards"].items())
    advantage = "" if fields["advantage"] is None else f"  advantage {fields['advantage']:+.2f}"
    calls = f"  tool calls {fields['num_calls']} ({fields['num_failed_calls']} failed)" if fields["num_calls"] else ""
    return "\n".join(
        (
            f"  sample {fields['group']}.{fields['sample']}  reward {fields['reward']:.3f}"
            + (f" ({parts})" if parts else "")
            + f"{advantage}  staleness {fields['staleness']}  {fields['num_tokens']} tokens, {fields['finish']}{calls}",
            f"    prompt    {_cut(fields['prompt'])}",
            f"    response  {_cut(fields['response'])}",
        )
    )


def two_of(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The samples with the highest and the lowest reward of the first group."""
    group = [sample for sample in samples if sample["group"] == samples[0]["group"]]
    ranked = sorted(group, key=lambda sample: -sample["reward"])
    return ranked if len(ranked) < 2 else [ranked[0], ranked[-1]]


def _encodable(value: Any) -> Any:
    """What a model wrote as JSON, without halves of surrogate pairs, which UTF-8 does not have."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_encodable(name): _encodable(each) for name, each in value.items()}
    return [_encodable(each) for each in value] if isinstance(value, list) else value


def _cut(text: str) -> str:
    """The beginning and the end of a text, on one line."""
    if (left_out := len(text) - _SHOWN) > 0:
        text = f"{text[: _SHOWN // 2]} [... {left_out:,} characters ...] {text[-_SHOWN // 2 :]}"
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text
    )


def _numbers(values: np.ndarray, is_there: np.ndarray) -> msgspec.Raw:
    """float32 [R] as a JSON list, each number with the fewest digits that give it back."""
    texts = np.where(is_there & np.isfinite(values), values.astype(str), "null")
    return msgspec.Raw(f"[{','.join(texts.tolist())}]".encode())
