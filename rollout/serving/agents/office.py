"""The conversations of a run's agents: who has which sample, for how long, and how each of them ends.

An agent claims a sample, calls the policy, and ends with a reward or a failure. One that says nothing for `environment.timeout_s` has
failed. So has one that ends without a call. Everything here runs in the thread of one event loop.
"""

import asyncio
import hmac
import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....comm.recipe import Recipe
from ....comm.recipe.run import REWARD_STATISTICS
from ....relay.receipts import digests_used, seal
from ...engine.sequence import Completion
from ...leased_row import LARGEST, LeasedRow
from ..desk import Piece
from ..fields import Fields, RequestRefused
from ..front import Front, Work
from .conversation import AgentConversation, Turn
from .rows import completed
from .sampling import RunSampling

log = logging.getLogger(__name__)

MOST_OPEN = 4096
"""Conversations at a time."""
REMEMBERED = 4096
"""Conversations that are over and are still known, so that a repeated end gets the same answer."""
CLAIM_S = 25.0
"""Longest time for which a claim waits for a sample."""
MOST_REASON = 200
"""Most characters of a failure's reason that are kept."""
Json = dict[str, Any]
_Answer = tuple[Json, Sequence[Turn]]
_METRIC = re.compile(r"[\w.-]{1,64}", re.ASCII)


class SampleSource(Protocol):
    """Where the samples come from and go to; see `samples.AgentSamples`."""

    async def take(self, timeout_s: float) -> LeasedRow:
        """A sample. Raises `TimeoutError`, and `RequestRefused` where there will be none."""
        ...

    def give_back(self, held: LeasedRow) -> None:
        """Let another agent have a sample that was never used."""
        ...

    def finish(self, held: LeasedRow, completion: Completion | None, failure: str = "") -> None:
        """End a sample."""
        ...


@dataclass(slots=True, eq=False)
class OpenConversation:
    """One sample with its agent, also for a while after its end."""

    id: str
    key: str
    """The API key that opens this conversation alone."""
    held: LeasedRow
    front: Front
    turns: AgentConversation = field(default_factory=AgentConversation)
    num_calls: int = 0
    """Calls that were accepted."""
    open_responses: int = 0
    """Responses of calls under way."""
    heard_at: float = 0.0
    """When it was claimed, or when its last call ended."""
    seconds: list[float] = field(default_factory=list)
    """The agent's time before each call but the first."""
    answers: dict[str, "asyncio.Task[_Answer]"] = field(default_factory=dict)
    """The calls with a key of the client's."""
    timer: asyncio.TimerHandle | None = None
    outcome: Json = field(default_factory=dict)
    """How it has ended: `reward` or `failure`; empty while it is open."""
    state_at_end: Json = field(default_factory=dict)
    """What `AgentOffice.state` says of it since then; its tokens are not kept."""

    def forget_tokens(self) -> None:
        """Keep no more of it than what a repeated request needs."""
        held = self.held
        self.held = LeasedRow(held.row_id, held.attempt, held.version, held.row)
        self.turns = AgentConversation()
        self.answers = {}


class AgentOffice:
    """Opens, keeps and ends conversations."""

    def __init__(self, front: Front, samples: SampleSource, recipe: Recipe) -> None:
        self._front = front
        self._samples = samples
        self._sampling = RunSampling(recipe)
        self._idle_s = recipe.environment.timeout_s
        self._max_turns = recipe.environment.max_turns
        self._known: OrderedDict[str, OpenConversation] = OrderedDict()
        self._claims: dict[str, asyncio.Task[OpenConversation]] = {}
        """Claims with a key of the client's."""
        self._claim_keys: dict[str, str] = {}
        """Of each conversation that was claimed with one."""
        self._has_functions = bool(recipe.reward.path)
        self._num_open = 0
        self.ended = ""
        """How the run has ended; empty while it goes on. What is open then is left unfinished."""

    # ------------------------------------------------------------------------------------------------------------ claims

    async def claim(self, key: str) -> OpenConversation:
        """A conversation about a sample of its own; with a key of the client's always the same one. Raises `RequestRefused`."""
        if not key:
            return await self._claim()
        if key not in self._claims:
            self._claims[key] = asyncio.ensure_future(self._claim_once(key))
        return await asyncio.shield(self._claims[key])

    def abandon(self, conversation: OpenConversation) -> None:
        """Its client has left before it got the answer to its claim."""
        if not conversation.outcome and not conversation.num_calls:
            self._stop_timer(conversation)
            self._num_open -= 1
            del self._known[conversation.id]
            self._samples.give_back(conversation.held)

    async def _claim_once(self, key: str) -> OpenConversation:
        try:
            return await self._claim(key)
        except BaseException:
            del self._claims[key]  # the next try may succeed
            raise

    async def _claim(self, key: str = "") -> OpenConversation:
        if self.ended:
            raise RequestRefused(f"the run has ended ({self.ended})", status=410, code="run_ended")
        if self._num_open >= MOST_OPEN:
            raise RequestRefused(f"{MOST_OPEN} conversations are open; try again later", status=429, code="too_many")
        try:
            held = await self._samples.take(CLAIM_S)
        except TimeoutError as error:
            problem = f"the run had no sample to generate within {CLAIM_S:g} s; ask again"
            raise RequestRefused(problem, status=503, code="no_sample") from error
        conversation = OpenConversation(
            f"conv-{secrets.token_hex(12)}", f"agent-{secrets.token_hex(24)}", held, self._front.apart()
        )
        self._known[conversation.id] = conversation
        self._num_open += 1
        if key:
            self._claim_keys[conversation.id] = key
        self._await_call(conversation)
        return conversation

    def is_key_of(self, number: str, authorization: str) -> bool:
        """Whether a header shows the own key of a conversation."""
        found = self._known.get(number)
        shown = authorization.encode()
        return found is not None and hmac.compare_digest(shown, f"Bearer {found.key}".encode())

    def find(self, number: str) -> OpenConversation:
        """The conversation of this id. Raises `RequestRefused`."""
        if (found := self._known.get(number)) is None:
            problem = f"there is no conversation {number!r}: it ended long ago, or this server has started again; claim another one"
            raise RequestRefused(problem, status=404, code="unknown_conversation")
        return found

    # ------------------------------------------------------------------------------------------------------------- calls

    def begin(self, conversation: OpenConversation, kind: str, body: Mapping[str, Any]) -> Work:
        """Read a call of the policy, which is `chat`, `text` or `ids`, and count it as begun. Raises `RequestRefused`.

        `end_call` follows, whatever happens.
        """
        self.check_open(conversation)
        front = conversation.front
        reader = {"chat": front.chat, "text": front.text, "ids": front.ids}[kind]
        sample = conversation.held.row_id.number
        complete = self._sampling.complete(body, is_ids=kind == "ids", sample=sample, call=conversation.num_calls)
        work = reader(complete)
        asked = work.ticket.num_samples
        if conversation.turns.num_turns + conversation.open_responses + asked > self._max_turns:
            problem = (
                f"a conversation has at most environment.max_turns={self._max_turns} responses of the policy; end it"
            )
            raise RequestRefused(problem, code="too_many_turns")
        self._sampling.bound(work.ticket, body, conversation.turns, front.model.context)
        front.desk.submit(work.ticket)
        now = asyncio.get_running_loop().time()
        if conversation.num_calls and not conversation.open_responses:
            conversation.seconds.append(now - conversation.heard_at)
        conversation.num_calls += 1
        conversation.open_responses += asked
        self._stop_timer(conversation)
        return work

    def end_call(self, conversation: OpenConversation, work: Work) -> None:
        """The call is over, and the agent has the word."""
        conversation.front.desk.release(work.ticket)
        conversation.open_responses -= work.ticket.num_samples
        if not conversation.outcome:
            self._await_call(conversation)

    async def answer(self, conversation: OpenConversation, kind: str, body: Mapping[str, Any], key: str) -> Json:
        """The whole answer to a call; with a key of the client's always the same one. Raises `RequestRefused`.

        Without a key the call is dropped where the client leaves; with one it goes on, and the answer waits for the client's next try.
        """
        if not key:
            found, turns = await self._answer(conversation, kind, body)
            self._add(conversation, turns, "")
            return found
        if key not in conversation.answers:
            conversation.answers[key] = asyncio.ensure_future(self._answer_once(conversation, kind, body, key))
        found, turns = await asyncio.shield(conversation.answers[key])
        self._add(conversation, turns, key)
        return found

    def _add(self, conversation: OpenConversation, turns: Sequence[Turn], key: str) -> None:
        """Add turns that a client gets now, maybe once more."""
        for number, turn in enumerate(() if conversation.outcome else turns):
            conversation.turns.add(turn, f"{key}/{number}" if key else "")

    async def _answer_once(
        self, conversation: OpenConversation, kind: str, body: Mapping[str, Any], key: str
    ) -> _Answer:
        try:
            return await self._answer(conversation, kind, body)
        except BaseException:
            del conversation.answers[key]  # the next try may succeed
            raise

    async def _answer(self, conversation: OpenConversation, kind: str, body: Mapping[str, Any]) -> _Answer:
        work = self.begin(conversation, kind, body)
        try:
            found = await conversation.front.whole(work)
            return dict(found), turns_of(work)
        finally:
            self.end_call(conversation, work)

    def end_stream(self, conversation: OpenConversation, work: Work) -> None:
        """A stream is over. What it has sent so far are turns, also where the client left before its end."""
        self._add(conversation, turns_of(work), "")
        self.end_call(conversation, work)

    # -------------------------------------------------------------------------------------------------------------- ends

    def end(self, conversation: OpenConversation, body: Mapping[str, Any]) -> Json:
        """End a conversation as a request says; repeated, it changes nothing. Raises `RequestRefused`."""
        outcome = read_outcome(body)
        if "metrics" in outcome and self._has_functions:
            raise RequestRefused("the functions of reward.path note the metrics of this run; leave it out", "metrics")
        if conversation.outcome:
            if conversation.outcome.get("asked", conversation.outcome) != outcome:
                problem = f"the conversation has ended already: {_shown(conversation.outcome)}"
                raise RequestRefused(problem, status=410, code="conversation_over")
            return self.state(conversation)
        if "failure" in outcome:
            self._fail(conversation, f"the agent: {outcome['failure']}", "error", outcome)
        elif not conversation.turns.num_turns:
            self._fail(conversation, "the agent ended without a response of the policy", "error", outcome)
        else:
            conversation.held.info = {"metrics": outcome.get("metrics", {})}
            self._finish(conversation, outcome, "")
        return self.state(conversation)

    def check_open(self, conversation: OpenConversation) -> None:
        """Raise `RequestRefused` for a conversation that is over."""
        if conversation.outcome:
            problem = f"the conversation is over: {_shown(conversation.outcome)}"
            raise RequestRefused(problem, status=410, code="conversation_over")

    def state(self, conversation: OpenConversation) -> Json:
        """What is known of a conversation, as JSON."""
        if conversation.state_at_end:
            return conversation.state_at_end
        turns = conversation.turns
        status = "open" if not conversation.outcome else "failed" if "failure" in conversation.outcome else "ended"
        found: Json = {
            "id": conversation.id,
            "prompt": conversation.held.row_id.prompt,
            "sample": conversation.held.row_id.sample,
            "attempt": conversation.held.attempt,
            "status": status,
            "turns": turns.num_turns,
            "drawn_tokens": turns.num_drawn,
            "branches": [
                {
                    "prompt_tokens": len(branch.prompt_ids),
                    "response_tokens": len(branch.response_ids),
                    "drawn_tokens": sum(branch.loss_mask),
                }
                for branch in turns.branches
            ],
            "idle_timeout_s": self._idle_s,
            "max_turns": self._max_turns,
            "max_new_tokens": self._sampling.longest,
        }
        shown = {name: value for name, value in conversation.outcome.items() if name != "asked"}
        return found | shown

    def _sealed(self, state: Json, digests: Mapping[int, str]) -> Json:
        """The state of a conversation that has ended, with its receipt. digests: of the weights of its tokens' versions."""
        found = state | {"weight_digests": digests_used(digests, digests)}
        key = self._front.receipt_key
        return found | ({"receipt": seal(key, found)} if key else {})

    def _await_call(self, conversation: OpenConversation) -> None:
        """Note that the agent has the word, and fail it if it keeps that for too long."""
        loop = asyncio.get_running_loop()
        conversation.heard_at = loop.time()
        self._stop_timer(conversation)
        if not conversation.open_responses:
            conversation.timer = loop.call_later(self._idle_s, self._on_silence, conversation)

    def _on_silence(self, conversation: OpenConversation) -> None:
        if self.ended:
            return
        reason = f"the agent said nothing for {self._idle_s:g} s (environment.timeout_s)"
        self._fail(conversation, reason, "late", {})

    def _stop_timer(self, conversation: OpenConversation) -> None:
        if conversation.timer is not None:
            conversation.timer.cancel()
            conversation.timer = None

    def _fail(self, conversation: OpenConversation, reason: str, kind: str, asked: Json) -> None:
        conversation.held.broken_by = kind
        self._finish(conversation, {"failure": reason, "asked": asked}, reason)

    def _finish(self, conversation: OpenConversation, outcome: Json, failure: str) -> None:
        self._stop_timer(conversation)
        conversation.outcome = outcome
        self._num_open -= 1
        held = conversation.held
        completion = None
        if conversation.turns.num_turns:
            tokenizer = self._front.model.tokenizer
            completion = completed(
                held, conversation.turns, conversation.seconds, outcome.get("reward", 0.0), tokenizer.decode
            )
        self._samples.finish(held, completion, failure)
        conversation.state_at_end = self._sealed(self.state(conversation), held.digests)
        conversation.front = self._front  # its memory is not needed any more
        conversation.forget_tokens()
        while len(self._known) - self._num_open > REMEMBERED:
            number = next(number for number, each in self._known.items() if each.outcome)
            del self._known[number]
            self._claims.pop(self._claim_keys.pop(number, ""), None)


def turns_of(work: Work) -> Sequence[Turn]:
    """The turns that a call's pieces are, in the order of its responses; one without a token is none."""
    by_sample: dict[int, list[Piece]] = {}
    for piece in work.pieces:
        by_sample.setdefault(piece.sample, []).append(piece)
    found: list[Turn] = []
    for sample, pieces in sorted(by_sample.items()):
        token_ids = [token for piece in pieces for token in piece.token_ids]
        if not token_ids:
            continue
        logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
        versions = [version for piece in pieces for version in piece.versions]
        end = pieces[-1].end
        message = work.messages.get(sample)
        messages = [*work.chat.messages, message] if work.chat is not None and message is not None else ()
        prompt = work.ticket.prompts[sample // work.ticket.params[0].n]
        reason = end.finish_reason if end is not None else "stop"
        text = end.text if end else ""
        found.append(Turn(prompt, token_ids, logprobs, versions, reason, text, messages, pieces[-1].digests))
    return found


def read_outcome(body: Mapping[str, Any]) -> Json:
    """`reward`, with `metrics` if there are any, or `failure`. Raises `RequestRefused`."""
    fields = Fields(body)
    reward = fields.take("reward", float)
    failure = fields.take("failure", str)
    metrics = fields.take("metrics", dict, {})
    fields.finish()
    if (reward is None) == (failure is None):
        raise RequestRefused("give either the reward, a number, or the failure, a text", "reward")
    if failure is not None:
        return {"failure": failure[:MOST_REASON] or "it gave no reason"}
    if not abs(reward) <= LARGEST:  # so for NaN, too
        raise fields.refusal("reward", f"{reward} is no number that a row can store")
    for name, value in metrics.items():
        if not _METRIC.fullmatch(name) or name in REWARD_STATISTICS:
            reserved = ", ".join(REWARD_STATISTICS)
            raise RequestRefused(
                f"{name!r}: a name has 1 to 64 letters, digits, _, . or -, and is not {reserved}", "metrics"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise RequestRefused("must be a finite number", f"metrics.{name}")
    return {"reward": reward, **({"metrics": metrics} if metrics else {})}


def _shown(outcome: Json) -> str:
    return f"failed ({outcome['failure']})" if "failure" in outcome else f"reward {outcome['reward']:g}"
