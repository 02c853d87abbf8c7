"""From the JSON of a request to what is asked: the prompt, how to sample, and the form of the answer. Nothing here does I/O.

The fields are those of OpenAI's API, and of vLLM's for token ids. What has no effect here is refused by its name.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...comm.errors import SettingError
from ..engine.sampling import SamplingParams
from .fields import Fields, RequestRefused
from .messages import Message, Tool, read_messages, read_tools

MOST_SAMPLES = 128
"""Most responses to one request."""
_COMPLETION_TOKENS = 16
"""`max_tokens` of a text completion that names none, as in OpenAI's API."""
_ENGINE_NAMES = {"max_new_tokens": "max_tokens"}
"""Names of `SamplingParams` that a request writes differently."""
_NEUTRAL: dict[str, Sequence[Any]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "length_penalty": (1,),
    "use_beam_search": (False,), "min_tokens": (0,), "include_stop_str_in_output": (False,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "truncate_prompt_tokens": (), "store": (False,), "service_tier": ("auto", "default"),
    "prompt_logprobs": (), "priority": (0,),
}  # fmt: skip
_NEUTRAL_IN_CHAT: dict[str, Sequence[Any]] = {
    **_NEUTRAL, "top_logprobs": (0,), "response_format": ({"type": "text"},), "parallel_tool_calls": (True,),
    "modalities": (["text"],), "add_generation_prompt": (True,), "continue_final_message": (False,), "echo": (False,),
    "functions": (), "function_call": (), "reasoning_effort": (), "audio": (), "prediction": (), "chat_template": (),
}  # fmt: skip
_NEUTRAL_IN_TEXT: dict[str, Sequence[Any]] = {**_NEUTRAL, "best_of": (1,), "echo": (False,), "suffix": ("",)}
_NEUTRAL_OF_IDS: dict[str, Sequence[Any]] = {
    **_NEUTRAL, "skip_special_tokens": (True, False), "detokenize": (True, False), "flat_logprobs": (True, False),
    "extra_args": ({},), "bad_words": ([],),
}  # fmt: skip
_LABELS = ("user", "metadata")
"""Fields that name the caller and have no effect by their definition."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What the answer contains."""

    streams: bool = False
    with_usage: bool = False
    """A stream ends with the numbers of tokens."""
    with_ids: bool = False
    with_logprobs: bool = False
    names_ids: bool = False
    """The token of a log-prob is written `token_id:N`."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request samples, before the length of its prompt is known."""

    values: Mapping[str, Any]
    """Arguments of `SamplingParams`."""
    max_tokens: int | None
    """None: as many as the context has room for."""
    max_tokens_name: str
    """The field that gave it."""

    def params(self, field: str, num_prompt: int, context: int) -> SamplingParams:
        """The engine's parameters for a prompt of so many tokens in `field`. Raises `RequestRefused` without room in the context."""
        room = context - num_prompt
        if room < 1:
            problem = f"{num_prompt} tokens leave no room for a response in the context of {context}"
            raise RequestRefused(problem, field, code="context_length_exceeded")
        if self.max_tokens is not None and self.max_tokens > room:
            problem = (
                f"{self.max_tokens} tokens after a prompt of {num_prompt} do not fit the context of {context};"
                f" at most {room} do, which is the default of a chat"
            )
            raise RequestRefused(problem, self.max_tokens_name, code="context_length_exceeded")
        return _checked(self.values, room if self.max_tokens is None else self.max_tokens)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for a chat completion."""

    messages: Sequence[Message]
    tools: Sequence[Tool]
    calls_tools: bool
    """Whether calls in the response become `tool_calls`."""
    template_values: Mapping[str, Any]
    """Arguments of the chat template."""
    sampling: Sampling
    form: AnswerForm


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request for a text completion; a prompt is text or token ids."""

    prompts: Sequence[str | list[int]]
    sampling: Sampling
    form: AnswerForm


@dataclass(frozen=True, slots=True)
class IdsRequest:
    """A request for a generation from token ids."""

    prompt: list[int]
    sampling: Sampling
    form: AnswerForm


def read_chat(body: Mapping[str, Any], model: str) -> ChatRequest:
    """The request of `/v1/chat/completions`. model: the name of the served one. Raises `RequestRefused`."""
    fields = Fields(body)
    _check_model(fields, model)
    messages = read_messages(fields.take("messages", list))
    tools = read_tools(fields.take("tools", list, []))
    choice = fields.any("tool_choice")
    if choice not in (None, "auto", "none"):
        raise fields.refusal(
            "tool_choice", 'only "auto" and "none": this server does not force the model to call a tool'
        )
    if choice == "auto" and not tools:
        raise fields.refusal("tool_choice", "needs tools")
    template_values = fields.take("chat_template_kwargs", dict, {})
    given = {name: fields.take(name, int) for name in ("max_completion_tokens", "max_tokens")}
    named = [name for name, value in given.items() if value is not None]
    if len({given[name] for name in named}) > 1:
        raise fields.refusal("max_tokens", "is not max_completion_tokens; give one of them")
    name = named[0] if named else "max_tokens"
    sampling = _read_sampling(fields, given[name], name)
    with_logprobs = fields.take("logprobs", bool, False)
    form = _read_form(fields, with_logprobs)
    _finish(fields, _NEUTRAL_IN_CHAT)
    return ChatRequest(messages, tools, bool(tools) and choice != "none", template_values, sampling, form)


def read_text(body: Mapping[str, Any], model: str) -> TextRequest:
    """The request of `/v1/completions`. Raises `RequestRefused`."""
    fields = Fields(body)
    _check_model(fields, model)
    prompts = _read_prompts(fields)
    sampling = _read_sampling(fields, fields.take("max_tokens", int, _COMPLETION_TOKENS), "max_tokens")
    if len(prompts) * sampling.values["n"] > MOST_SAMPLES:
        raise fields.refusal("prompt", f"asks for more than {MOST_SAMPLES} responses in one request")
    num_logprobs = fields.any("logprobs")
    if num_logprobs not in (None, 0) or isinstance(num_logprobs, bool):
        raise fields.refusal("logprobs", "only 0: the log-prob of each token that was drawn, without those of others")
    form = _read_form(fields, num_logprobs is not None)
    _finish(fields, _NEUTRAL_IN_TEXT)
    return TextRequest(prompts, sampling, form)


def read_ids(body: Mapping[str, Any], model: str) -> IdsRequest:
    """The request of `/inference/v1/generate`. Raises `RequestRefused`."""
    fields = Fields(body)
    _check_model(fields, model)
    prompt = fields.take("token_ids", list)
    if not _is_ids(prompt):
        raise fields.refusal("token_ids", "must be a list of token ids, which is not empty")
    inner = Fields(fields.take("sampling_params", dict, {}), "sampling_params.")
    sampling = _read_sampling(inner, inner.take("max_tokens", int, _COMPLETION_TOKENS), "sampling_params.max_tokens")
    num_logprobs = inner.any("logprobs")
    if num_logprobs not in (None, 0, 1) or isinstance(num_logprobs, bool):
        raise inner.refusal(
            "logprobs", "only 0 or 1: the log-prob of each token that was drawn, without those of others"
        )
    _finish(inner, _NEUTRAL_OF_IDS)
    fields.any("cache_salt")  # a version's cached pages are dropped with it, and only equal tokens find them
    fields.any("request_id")
    fields.neutral({"stream": (False,), "priority": (0,), "return_token_ids": (True, False), "features": ()})
    fields.finish()
    return IdsRequest(
        prompt, sampling, AnswerForm(with_ids=True, with_logprobs=num_logprobs is not None, names_ids=True)
    )


def _check_model(fields: Fields, model: str) -> None:
    name = fields.take("model", str, model)
    if name != model:
        problem = f"there is no model {name!r} here; this server has {model!r}"
        raise RequestRefused(problem, "model", status=404, code="model_not_found")


def _read_form(fields: Fields, with_logprobs: bool) -> AnswerForm:
    streams = fields.take("stream", bool, False)
    options = fields.take("stream_options", dict)
    if options is not None and not streams:
        raise fields.refusal("stream_options", "needs stream=true")
    inner = Fields(options or {}, "stream_options.")
    with_usage = inner.take("include_usage", bool, False)
    inner.neutral({"continuous_usage_stats": (False,), "include_obfuscation": (False,)})
    inner.finish()
    with_ids = fields.take("return_token_ids", bool, False)
    names_ids = fields.take("return_tokens_as_token_ids", bool, False)
    return AnswerForm(streams, with_usage, with_ids, with_logprobs, names_ids)


def _read_sampling(fields: Fields, max_tokens: int | None, name: str) -> Sampling:
    values: dict[str, Any] = {
        "temperature": fields.take("temperature", float, 1.0),
        "top_p": fields.take("top_p", float, 1.0),
        "top_k": max(0, fields.take("top_k", int, 0)),  # -1 is off, too
        "min_p": fields.take("min_p", float, 0.0),
        "repetition_penalty": fields.take("repetition_penalty", float, 1.0),
        "n": fields.take("n", int, 1),
        "stop": _read_stops(fields),
        "ignore_eos": fields.take("ignore_eos", bool, False),
        # Without a seed each answer is a new one, also after a new start of the server.
        "seed": fields.take("seed", int, secrets.randbits(63)),
    }
    if values["n"] > MOST_SAMPLES:
        raise fields.refusal("n", f"at most {MOST_SAMPLES} responses in one request")
    _checked(values, 1 if max_tokens is None else max_tokens, fields.where)
    return Sampling(values, max_tokens, name)


def _read_stops(fields: Fields) -> tuple[str | int, ...]:
    stop = fields.any("stop")
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, list) or not all(isinstance(each, str) and each for each in strings):
        raise fields.refusal("stop", "must be text or a list of texts, none of them empty")
    ids = fields.take("stop_token_ids", list, [])
    if ids and not _is_ids(ids):
        raise fields.refusal("stop_token_ids", "must be a list of token ids")
    return (*strings, *ids)


def _checked(values: Mapping[str, Any], max_new_tokens: int, where: str = "") -> SamplingParams:
    """The engine's parameters; its messages in the words of a request."""
    try:
        return SamplingParams(max_new_tokens=max_new_tokens, **values)
    except SettingError as error:
        name, _, problem = str(error).removeprefix("sampling.").partition(" ")
        raise RequestRefused(problem, where + _ENGINE_NAMES.get(name, name)) from error


def _read_prompts(fields: Fields) -> list[str | list[int]]:
    """One prompt or several, each of them text or token ids."""
    prompt = fields.any("prompt")
    prompts = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
    if not isinstance(prompts, list) or not prompts:
        raise fields.refusal("prompt", "must be text, a list of token ids, or a list of these, and not empty")
    for each in prompts:
        if not (each and isinstance(each, str)) and not _is_ids(each):
            raise fields.refusal("prompt", "has an empty prompt, or one that is neither text nor a list of token ids")
    return prompts


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _finish(fields: Fields, neutral: Mapping[str, Sequence[Any]]) -> None:
    for name in _LABELS:
        fields.any(name)
    fields.neutral(neutral)
    fields.finish()
