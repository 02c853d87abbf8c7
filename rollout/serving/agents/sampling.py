"""How an agent's calls sample: as the run does, but for what the agent asks for itself and the log-probs allow.

Log-probs are those of the policy at the temperature of sampling, before filters and penalties (docs/use/algorithms.md). The trainer computes
them at the run's temperature. So an agent may choose filters, but no temperature at which the log-probs would be others.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msgspec.structs import asdict

from ....comm.recipe import Recipe
from ...engine.sampling import SamplingParams
from ..desk import Ticket
from ..fields import RequestRefused
from .conversation import AgentConversation

_SHARED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_LENGTHS = ("max_completion_tokens", "max_tokens")


class RunSampling:
    """The `sampling` settings of a run, for the requests of its agents."""

    def __init__(self, recipe: Recipe) -> None:
        settings = recipe.sampling
        self.longest = settings.max_new_tokens
        """Most tokens of a branch's response."""
        self._values: dict[str, Any] = {name: asdict(settings)[name] for name in _SHARED}
        self._stop = list(settings.stop)
        self._seed = recipe.run.seed
        self._row_tokens = recipe.optimizer.micro_batch
        """Tokens of all branches together, unless one alone may have more: the trainer computes a row in one micro-batch."""

    def complete(self, body: Mapping[str, Any], *, is_ids: bool, sample: int, call: int) -> dict[str, Any]:
        """The body of a request with what the agent leaves to the run. Raises `RequestRefused` for a temperature that is not the run's.

        is_ids: of `/inference/v1/generate`, whose sampling is in an object of its own. sample, call: numbers of the sample and of the
        call in it, by which the random stream is chosen.
        """
        where = "sampling_params." if is_ids else ""
        given = body.get("sampling_params") if is_ids else body
        if given is not None and not isinstance(given, Mapping):
            return dict(body)  # the front refuses it by name
        asked: dict[str, Any] = {name: value for name, value in (given or {}).items() if value is not None}
        self._check_temperature(asked.get("temperature"), where)
        own = {**self._values, "seed": _seed(self._seed, sample, call)}
        if not any(name in asked for name in ("stop", "stop_token_ids")) and self._stop:
            own["stop"] = self._stop
        lengths = [name for name in _LENGTHS if name in asked]
        if not lengths:
            own["max_tokens"] = 1  # `bound` gives what is left
        elif len(lengths) == 1 and _is_count(asked[lengths[0]]):
            asked[lengths[0]] = 1  # `bound` gives this, or what is left
        complete = {**own, **asked}
        return {**body, "sampling_params": complete} if is_ids else complete

    def bound(self, ticket: Ticket, body: Mapping[str, Any], conversation: AgentConversation, context: int) -> None:
        """Give each response the tokens that its branch has left, or fewer if the agent asks for fewer. body: as the agent sent it.

        Raises `RequestRefused` where none is left.
        """
        given = body.get("sampling_params") or body
        asked = next((given[name] for name in _LENGTHS if given.get(name) is not None), None)
        bounded: list[SamplingParams] = []
        for prompt, params in zip(ticket.prompts, ticket.params, strict=True):
            in_row = max(context, self._row_tokens) - conversation.num_after(prompt)
            if in_row < 1:
                problem = (
                    f"the branches of this conversation have as many tokens together as the trainer computes at a time"
                    f" (optimizer.micro_tokens={self._row_tokens}); end it"
                )
                raise RequestRefused(problem, code="conversation_full")
            left = min(in_row, conversation.num_left(prompt, self.longest), context - len(prompt))
            if left < 1:
                problem = (
                    f"the response of this conversation has its longest length, sampling.max_new_tokens={self.longest}; end the"
                    " conversation, or begin a branch"
                )
                raise RequestRefused(problem, code="conversation_full")
            most = left if asked is None else min(left, int(asked))
            bounded.append(replace(params, max_new_tokens=most))
        ticket.params = bounded

    def _check_temperature(self, temperature: object, where: str) -> None:
        own = self._values["temperature"]
        is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
        # Log-probs at temperature 0 are those at temperature 1.
        if is_number and (temperature or 1) != (own or 1):
            problem = (
                f"{temperature} is not the run's sampling.temperature={own:g}: the log-probs would be those of another"
                " temperature than the trainer's. Leave it out"
            )
            raise RequestRefused(problem, f"{where}temperature", code="off_policy")


def _is_count(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < math.inf and value == int(value)
    )


def _seed(run: int, sample: int, call: int) -> int:
    """63 bits of a hash: the same call of the same sample draws by the same random numbers."""
    digest = hashlib.sha256(f"agent {run} {sample} {call}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
