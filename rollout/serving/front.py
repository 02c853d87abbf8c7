"""The work behind the routes: a request is read, its sequences go to the desk, and the answer is written whole or as a stream."""

import asyncio
import copy
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...comm.recipe import DataSettings
from .conversations import ChatPrompt, Conversations
from .desk import AnyDesk, Piece, Ticket
from .fields import RequestRefused
from .known_texts import KnownTexts
from .messages import Message
from .requests import AnswerForm, Sampling, read_chat, read_ids, read_text
from .responses import TOOL_MARK, Answer, TokenTexts, message_of
from .text_stream import TextStream

log = logging.getLogger(__name__)

_STREAM_END = b"data: [DONE]\n\n"
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind a front."""

    name: str
    """That requests use."""
    context: int
    """Most tokens of prompt and response together."""
    vocab_size: int
    tokenizer: Any
    """One that no other thread uses."""
    data: DataSettings
    """With the chat template."""


@dataclass(frozen=True, slots=True)
class Work:
    """A request that is read: its sequences, and how to answer. `chat` is the prompt of a chat."""

    ticket: Ticket
    answer: Answer
    chat: ChatPrompt | None = None
    pieces: list[Piece] = field(default_factory=list)
    """What has come of its responses."""
    messages: dict[int, Message] = field(default_factory=dict)
    """Of a chat: what each response has become, by its place."""
    texts: Sequence[str] = ()
    """Of a text completion: the prompts, empty for those of token ids."""


class Front:
    """Answers requests. All of it runs in the thread of one event loop."""

    def __init__(self, model: ServedModel, desk: AnyDesk, timeout_s: float, receipt_key: bytes = b"") -> None:
        """timeout_s: longest time of one request. receipt_key: with which answers are sealed (`relay.receipts`); empty for none."""
        self.model = model
        self.desk = desk
        self.receipt_key = receipt_key
        self._timeout_s = timeout_s
        self._conversations = Conversations(model.tokenizer, model.data)
        self._texts = TokenTexts(model.tokenizer)
        self._known_texts: KnownTexts | None = None

    def apart(self) -> "Front":
        """The same front with a memory of its own: the tokens of its conversations are never those of another client's."""
        other = copy.copy(self)
        other._conversations = Conversations(self.model.tokenizer, self.model.data)
        other._known_texts = KnownTexts(self.model.tokenizer)
        return other

    # --------------------------------------------------------------------------------------------------------- requests

    def chat(self, body: Json) -> Work:
        """Read a request of `/v1/chat/completions`. Raises `RequestRefused`."""
        asked = read_chat(body, self.model.name)
        prompt = self._conversations.prompt(asked.messages, asked.tools, asked.template_values)
        ticket = self._ticket("messages", [prompt.token_ids], asked.sampling, asked.form)
        return Work(ticket, self._answer("chat.completion", asked.form, parses_calls=asked.calls_tools), prompt)

    def text(self, body: Json) -> Work:
        """Read a request of `/v1/completions`. Raises `RequestRefused`."""
        asked = read_text(body, self.model.name)
        encode = self.model.tokenizer.encode if self._known_texts is None else self._known_texts.tokens
        prompts = [encode(each) if isinstance(each, str) else each for each in asked.prompts]
        ticket = self._ticket("prompt", prompts, asked.sampling, asked.form)
        texts = [each if isinstance(each, str) else "" for each in asked.prompts]
        return Work(ticket, self._answer("text_completion", asked.form), texts=texts)

    def ids(self, body: Json) -> Work:
        """Read a request of `/inference/v1/generate`. Raises `RequestRefused`."""
        asked = read_ids(body, self.model.name)
        return Work(
            self._ticket("token_ids", [asked.prompt], asked.sampling, asked.form), self._answer("generate", asked.form)
        )

    # ---------------------------------------------------------------------------------------------------------- answers

    async def whole(self, work: Work) -> Json:
        """The answer, once all responses have ended. The request is submitted. Raises `RequestRefused`."""
        ends: list[Piece] = []
        deadline = self._deadline()
        while len(ends) < work.ticket.num_samples:
            ends.append(await self._next(work, deadline))
        ends.sort(key=lambda piece: piece.sample)
        messages = [self._message(work, piece) for piece in ends] if work.chat else []
        return work.answer.whole(work.ticket, ends, messages)

    async def events(self, work: Work) -> AsyncIterator[bytes]:
        """The answer as server-sent events. The request is submitted. An error is the last event."""
        try:
            async for part in self._parts(work):
                yield _event(part)
        except RequestRefused as error:
            yield _event(error.body())
        except Exception:
            log.exception("a stream failed")
            yield _event(RequestRefused.internal().body())
        yield _STREAM_END

    async def _parts(self, work: Work) -> AsyncIterator[Json]:
        ticket = work.ticket
        answer = work.answer
        samples = range(ticket.num_samples)
        marks = [stop for stop in ticket.params[0].stops if isinstance(stop, str)]
        marks += [TOOL_MARK] if answer.parses_calls else []
        streams = [TextStream(self.model.tokenizer, marks) for _ in samples]
        pieces: list[list[Piece]] = [[] for _ in samples]
        texts: list[list[str]] = [[] for _ in samples]
        ends: list[Piece] = []
        deadline = self._deadline()
        for sample in samples if work.chat else ():
            yield answer.first(ticket, sample)
        while len(ends) < len(samples):
            piece = await self._next(work, deadline)
            text = streams[piece.sample].add(piece.token_ids)
            message = None
            if piece.end is not None:
                ends.append(piece)
                message = self._message(work, piece) if work.chat else None
                text += streams[piece.sample].rest(message["content"] if message else piece.end.text)
            pieces[piece.sample].append(piece)
            texts[piece.sample].append(text)
            yield answer.part(ticket, pieces[piece.sample], texts[piece.sample], message)
        if answer.form.with_usage:
            yield answer.last(ticket, ends)

    # --------------------------------------------------------------------------------------------------------- internals

    def _ticket(self, field: str, prompts: Sequence[list[int]], sampling: Sampling, form: AnswerForm) -> Ticket:
        """The sequences of a request whose prompts are in `field`. Raises `RequestRefused` for tokens that the model does not
        have, or too many."""
        for prompt in prompts:
            if not prompt:
                raise RequestRefused("has no tokens", field)
            if min(prompt) < 0 or max(prompt) >= self.model.vocab_size:
                raise RequestRefused(f"has token ids outside the vocabulary of {self.model.vocab_size}", field)
        params = [sampling.params(field, len(prompt), self.model.context) for prompt in prompts]
        return Ticket(prompts, params, form.streams)

    def _answer(self, kind: str, form: AnswerForm, *, parses_calls: bool = False) -> Answer:
        return Answer(kind, self.model.name, form, self._texts, parses_calls, self.receipt_key)

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout_s

    async def _next(self, work: Work, deadline: float) -> Piece:
        """The next piece. Raises `RequestRefused` after the deadline, and for a model that computes no numbers."""
        try:
            piece = await work.ticket.next(deadline - asyncio.get_running_loop().time())
        except TimeoutError as error:
            raise self.desk.late(work.ticket, self._timeout_s) from error
        if piece.end is not None and piece.end.finish_reason == "error":
            raise RequestRefused("the model's logits are not finite", status=500, code="not_finite")
        work.pieces.append(piece)
        if piece.end is not None and work.texts and self._known_texts is not None:
            place = piece.sample // work.ticket.params[0].n
            if work.texts[place]:
                self._known_texts.remember(work.texts[place], work.ticket.prompts[place], piece.end.token_ids)
        return piece

    def _message(self, work: Work, piece: Piece) -> Message:
        """The message that a response of a chat is; its tokens are kept for the next turn."""
        assert piece.end is not None and work.chat is not None
        message = message_of(piece.end.text, parses_calls=work.answer.parses_calls)
        work.messages[piece.sample] = message
        self._conversations.remember(work.chat, message, piece.end.token_ids)
        return message


Reader = Callable[[Json], Work]


def _event(part: Json) -> bytes:
    return b"data: " + msgspec.json.encode(part) + b"\n\n"
