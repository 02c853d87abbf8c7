"""From the tokens of a generator to the JSON of an answer, in OpenAI's form. Nothing here does I/O.

Each choice has, besides OpenAI's fields, `weight_version`: for each token of the response the version of the weights that drew it. Its
end has `weight_digests`, the digest of each version, and of a run `receipt`. With `return_token_ids` it has `token_ids`, and the answer
has `prompt_token_ids`, as in vLLM.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from ...relay.dataset.tool_calls import parse_calls
from ...relay.receipts import Said, digests_used, tokens_digest
from .desk import Piece, Ticket
from .messages import Message
from .requests import AnswerForm

TOOL_MARK = "<tool_call>"
"""The beginning of a call in a response (`relay.dataset.tool_calls`)."""
Json = dict[str, Any]


class TokenTexts:
    """The text of single tokens, for log-probs. Used by one thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token])
        return self._texts[token]


@dataclass(frozen=True, slots=True)
class Answer:
    """What is the same in all parts of the answer to one request."""

    kind: str
    """`chat.completion`, `text_completion` or `generate`."""
    model: str
    form: AnswerForm
    texts: TokenTexts
    parses_calls: bool = False
    key: bytes = b""
    """With which receipts are sealed; empty for none."""
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    # ------------------------------------------------------------------------------------------------------ whole answers

    def whole(self, ticket: Ticket, pieces: Sequence[Piece], messages: Sequence[Message]) -> Json:
        """The answer to a request that does not stream. messages: of a chat, that of each response."""
        choices = [self._choice(ticket, piece, messages) for piece in pieces]
        if self.kind == "generate":
            return {"request_id": self.id, "choices": choices, "usage": usage(ticket, pieces)}
        found = self._head("") | {"choices": choices, "usage": usage(ticket, pieces)}
        if self.form.with_ids and self.kind == "chat.completion":
            found["prompt_token_ids"] = ticket.prompts[0]
        return found

    def _choice(self, ticket: Ticket, piece: Piece, messages: Sequence[Message]) -> Json:
        assert piece.end is not None
        choice: Json = {"index": piece.sample}
        reason = piece.end.finish_reason
        text = ""
        calls: Sequence[Json] = ()
        if self.kind == "chat.completion":
            message = messages[piece.sample]
            choice["message"] = chat_message(message)
            reason = finish_reason(piece, message)
            text = choice["message"]["content"] or ""
            calls = choice["message"].get("tool_calls", ())
        elif self.kind == "text_completion":
            text = choice["text"] = piece.end.text
            if self.form.with_ids:
                choice["prompt_token_ids"] = prompt_of(ticket, piece.sample)
        choice |= {"finish_reason": reason, **self._tokens(piece)}
        return choice | self._certificate(ticket, [piece], reason, text, calls)

    # ------------------------------------------------------------------------------------------------------------ streams

    def first(self, ticket: Ticket, sample: int) -> Json:
        """The part of a chat's stream that begins a response: the role, and with `return_token_ids` the prompt's tokens."""
        choice = {
            "index": sample,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        found = self._head(".chunk") | {"choices": [choice]}
        return found | ({"prompt_token_ids": ticket.prompts[0]} if self.form.with_ids else {})

    def part(self, ticket: Ticket, pieces: Sequence[Piece], texts: Sequence[str], message: Message | None) -> Json:
        """The newest of a response's pieces, with the newest of its texts: what is certain by now.

        message: of a chat, the whole one with the last tokens.
        """
        piece = pieces[-1]
        text = texts[-1]
        choice: Json = {"index": piece.sample}
        reason = piece.end.finish_reason if piece.end else None
        calls: Sequence[Json] = ()
        if self.kind == "chat.completion":
            delta: Json = {"content": text} if text else {}
            choice["delta"] = delta
            if message is not None:
                reason = finish_reason(piece, message)
                if message.get("tool_calls"):
                    calls = [{"index": i, **_call(call)} for i, call in enumerate(message["tool_calls"])]
                    delta["tool_calls"] = calls
        else:
            choice["text"] = text
            if self.form.with_ids and len(pieces) == 1:
                choice["prompt_token_ids"] = prompt_of(ticket, piece.sample)
        choice |= {"finish_reason": reason, **self._tokens(piece)}
        if piece.end:
            choice |= self._certificate(ticket, pieces, reason or "", "".join(texts), calls)
        return self._head(".chunk") | {"choices": [choice]}

    def last(self, ticket: Ticket, pieces: Sequence[Piece]) -> Json:
        """The part with the numbers of tokens. pieces: the ends of all responses."""
        return self._head(".chunk") | {"choices": [], "usage": usage(ticket, pieces)}

    # ---------------------------------------------------------------------------------------------------------- internals

    def _head(self, part: str) -> Json:
        is_chat = self.kind == "chat.completion"
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self.id}",
            "object": self.kind + (part if is_chat else ""),
            "created": self.created,
            "model": self.model,
        }

    def _tokens(self, piece: Piece) -> Json:
        """What a choice says of its tokens."""
        found: Json = {
            "logprobs": self._logprobs(piece) if self.form.with_logprobs else None,
            "weight_version": piece.versions,
        }
        return found | ({"token_ids": piece.token_ids} if self.form.with_ids else {})

    def _certificate(
        self, ticket: Ticket, pieces: Sequence[Piece], reason: str, text: str, calls: Sequence[Json]
    ) -> Json:
        """What the end of a choice says of the weights, with the receipt of all that was sent of it. pieces: of this response."""
        versions = [version for piece in pieces for version in piece.versions]
        found: Json = {"weight_digests": digests_used(pieces[-1].digests, versions)}
        if not self.key:
            return found
        logprobs = [logprob for piece in pieces for logprob in piece.logprobs] if self.form.with_logprobs else None
        sample = pieces[-1].sample
        said = Said(self.id, sample, versions, found["weight_digests"], text, calls, reason, logprobs)
        prompt = tokens_digest(prompt_of(ticket, sample))
        tokens = tokens_digest(token for piece in pieces for token in piece.token_ids)
        return found | {"receipt": said.receipt(self.key, prompt, tokens)}

    def _logprobs(self, piece: Piece) -> Json:
        names = [f"token_id:{token}" if self.form.names_ids else self.texts[token] for token in piece.token_ids]
        if self.kind == "text_completion":
            return {"tokens": names, "token_logprobs": piece.logprobs, "top_logprobs": None, "text_offset": None}
        content = [
            {"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": []}
            for name, logprob in zip(names, piece.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def message_of(text: str, *, parses_calls: bool) -> Message:
    """The message that a response is: its text, and the calls in it if all of them can be read."""
    calls = parse_calls(text, None, is_chat=True) if parses_calls and TOOL_MARK in text else []
    if not calls or any(call.problem for call in calls):
        return {"role": "assistant", "content": text}
    made = [
        {"id": f"call_{uuid4().hex}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    return {"role": "assistant", "content": text[: text.index(TOOL_MARK)], "tool_calls": made}


def chat_message(message: Message) -> Json:
    """A message as an answer contains it: the arguments of calls are JSON in a text."""
    calls = message.get("tool_calls")
    found: Json = {"role": "assistant", "content": message["content"]}
    if calls:
        found["content"] = message["content"] if message["content"].strip() else None
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def finish_reason(piece: Piece, message: Message) -> str:
    """`tool_calls` for a message that ends with calls."""
    assert piece.end is not None
    return "tool_calls" if message.get("tool_calls") and piece.end.finish_reason == "stop" else piece.end.finish_reason


def prompt_of(ticket: Ticket, sample: int) -> list[int]:
    """The prompt's tokens of one of a request's responses."""
    return ticket.prompts[sample // ticket.params[0].n]


def usage(ticket: Ticket, pieces: Sequence[Piece]) -> Json:
    """The numbers of tokens of a request. pieces: the ends of all responses."""
    num_prompt = sum(map(len, ticket.prompts))
    num_drawn = sum(len(piece.end.token_ids) for piece in pieces if piece.end)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_drawn, "total_tokens": num_prompt + num_drawn}


def _call(call: Json) -> Json:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": text}}
