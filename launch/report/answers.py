"""Saved answers of a run's front, against its journal and its receipts: which of them are true, and what is wrong with the others.

A file has one answer, a list, or a line for each: whole answers, parts of streams (also as `data: ...`), and ends of conversations, as they
came or as the `openai` package writes them. The parts of a stream are joined.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...comm.errors import SettingError
from ...relay.receipts import Said, seal, tokens_digest
from .published import Published, digests_problem

Json = Mapping[str, Any]


@dataclass(slots=True)
class SavedResponse:
    """A response as its answer, or the parts of its stream, say it."""

    id: str
    index: int
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    versions: list[int] = field(default_factory=list[int])
    digests: dict[str, str] = field(default_factory=dict[str, str])
    text: str = ""
    calls: list[Json] = field(default_factory=list[Json])
    reason: str = ""
    logprobs: list[float] | None = None
    receipt: str = ""

    def add(self, answer: Json, choice: Json) -> None:
        """Join a whole choice, or the next part of one."""
        if self.prompt_ids is None:
            self.prompt_ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        if (token_ids := choice.get("token_ids")) is not None:
            self.token_ids = [*(self.token_ids or []), *token_ids]
        self.versions += choice.get("weight_version") or []
        self.digests = choice.get("weight_digests") or self.digests
        message = choice.get("message") or choice.get("delta") or {}
        self.text += choice.get("text") or message.get("content") or ""
        self.calls += message.get("tool_calls") or []
        self.reason = choice.get("finish_reason") or self.reason
        if (logprobs := choice.get("logprobs")) is not None:
            self.logprobs = [*(self.logprobs or []), *_logprobs(logprobs)]
        self.receipt = choice.get("receipt") or self.receipt

    def problem(self, key: bytes, published: Published) -> str:
        """What is wrong with it; empty if it is as the run has sent it."""
        parts = self.receipt.split(".")
        if len(parts) != 3:
            return "it has no receipt: it is not an answer of a run, or its end is missing"
        prompt, tokens, _ = parts
        if self.prompt_ids is not None and tokens_digest(self.prompt_ids) != prompt:
            return "the tokens of its prompt are not those of its receipt"
        if self.token_ids is not None and tokens_digest(self.token_ids) != tokens:
            return "its tokens are not those of its receipt"
        if self.token_ids is not None and len(self.token_ids) != len(self.versions):
            return f"it has {len(self.token_ids)} tokens and {len(self.versions)} versions"
        if found := digests_problem(self.versions, self.digests, published):
            return found
        said = Said(self.id, self.index, self.versions, self.digests, self.text, self.calls, self.reason, self.logprobs)
        if said.receipt(key, prompt, tokens) != self.receipt:
            return (
                "its seal is another one: versions, digests, text, calls of tools, log-probs, finish reason or id are not what the"
                " run has sent"
            )
        return ""


@dataclass(slots=True)
class SavedAnswers:
    """The answers of a file. `ends` are those of conversations."""

    responses: list[SavedResponse] = field(default_factory=list[SavedResponse])
    ends: list[Json] = field(default_factory=list[Json])
    _under_way: dict[tuple[str, int], SavedResponse] = field(default_factory=dict[tuple[str, int], SavedResponse])

    def add(self, answer: Any) -> None:
        """Add an answer, or a part of a stream."""
        if not isinstance(answer, dict):
            raise TypeError(f"{answer!r} is not an object")
        if "choices" not in answer:
            self.ends.append(answer)
            return
        number = str(answer.get("id") or answer.get("request_id") or "").rpartition("-")[2]
        for choice in answer["choices"]:
            name = number, int(choice["index"])
            if name not in self._under_way:
                self._under_way[name] = SavedResponse(*name)
                self.responses.append(self._under_way[name])
            self._under_way[name].add(answer, choice)
            if self._under_way[name].receipt:
                del self._under_way[name]  # it is whole; the same answer may be there once more


def read_answers(file: Path) -> SavedAnswers:
    """The answers in a file. Raises `SettingError` for one that has anything else."""
    found = SavedAnswers()
    try:
        for answer in _objects(file.read_text(encoding="utf-8")):
            found.add(answer)
    except OSError as error:
        raise SettingError(f"--answers: {file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise SettingError(f"--answers: {file} has something else than answers of a server: {error}") from error
    if not found.responses and not found.ends:
        raise SettingError(f"--answers: {file} has no answer")
    return found


def end_problem(end: Json, key: bytes, published: Published) -> str:
    """What is wrong with the end of a conversation; empty if it is as the run has sent it."""
    digests = end.get("weight_digests")
    if not end.get("receipt") or not isinstance(digests, dict):
        return "it has no receipt: it is not the end of a conversation"
    if found := digests_problem(map(int, digests), digests, published):
        return found
    if seal(key, {name: value for name, value in end.items() if name != "receipt"}) != end["receipt"]:
        return (
            "its seal is another one: the reward, the numbers of tokens or another field are not what the run has sent"
        )
    return ""


def _objects(text: str) -> Iterator[Any]:
    try:
        whole = json.loads(text)
    except ValueError:
        for line in text.splitlines():
            content = line.strip().removeprefix("data:").strip()
            if content and content != "[DONE]":
                yield json.loads(content)
        return
    yield from whole if isinstance(whole, list) else [whole]


def _logprobs(found: Json) -> Sequence[float]:
    if (content := found.get("content")) is not None:
        return [each["logprob"] for each in content]
    return found["token_logprobs"]
