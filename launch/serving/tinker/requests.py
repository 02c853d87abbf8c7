"""The JSON requests of the API, field by field: what has no effect here is refused by its name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....comm.errors import SettingError
from ....rollout.engine.sampling import SamplingParams
from ....rollout.serving.fields import Fields, RequestRefused
from ....trainer.tinker.trained_model import AdamParams

Json = Mapping[str, Any]
MOST_SAMPLES = 1024
"""Most responses to one request."""
_NOT_HERE: dict[str, tuple[Any, ...]] = {
    "topk_prompt_logprobs": (0,), "topk_sample_logprobs": (0,), "target_prompt_logprobs": (), "prompt_alt_tokens_k": (0,),
    "record_stability_info": (False,), "base_model": (), "model_path": (),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layers:
    """The adapter that a client wants; `seed` None draws one."""

    rank: int
    seed: int | None
    train_attn: bool
    train_mlp: bool


@dataclass(frozen=True, slots=True)
class NewModel:
    """A request of `create_model`."""

    session_id: str
    number: int
    base_model: str
    layers: Layers
    metadata: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request of `asample`."""

    sampling_session_id: str
    seq_id: int
    prompt: list[int]
    num_scored: int
    params: SamplingParams


def typed(body: Json, kind: str) -> Fields:
    """The fields of a request, whose `type` may be this one alone."""
    fields = Fields(body)
    fields.neutral({"type": (kind,)})
    return fields


def required(fields: Fields, name: str, kind: type) -> Any:
    """The value of a field. Raises `RequestRefused` without it."""
    value = fields.take(name, kind)
    if value is None:
        raise fields.refusal(name, "is missing")
    return value


def read_new_model(fields: Fields) -> NewModel:
    """A request of `create_model`."""
    new = NewModel(
        required(fields, "session_id", str),
        required(fields, "model_seq_id", int),
        required(fields, "base_model", str),
        _read_layers(fields),
        read_metadata(fields),
    )
    fields.finish()
    return new


def read_adam(fields: Fields) -> AdamParams:
    """The field `adam_params`."""
    if fields.any("optimizer_params") is not None:
        raise fields.refusal("optimizer_params", "is not supported: the optimizer is AdamW, with adam_params")
    given = fields.take("adam_params", dict)
    if given is None:
        raise fields.refusal("adam_params", "is missing")
    inner = Fields(given, "adam_params.")
    defaults = AdamParams()
    values = {name: inner.take(name, float, getattr(defaults, name)) for name in AdamParams._fields}
    inner.finish()
    return AdamParams(**values)


def read_metadata(fields: Fields, name: str = "user_metadata") -> dict[str, str] | None:
    """A client's own texts."""
    given = fields.take(name, dict)
    if given is not None and not all(isinstance(value, str) for value in given.values()):
        raise fields.refusal(name, "must have texts as values")
    return given or None


def read_ttl(fields: Fields) -> int | None:
    """The time for which saved weights are kept, in seconds; None keeps them for ever."""
    ttl_s = fields.take("ttl_seconds", int)
    if ttl_s is not None and ttl_s < 1:
        raise fields.refusal("ttl_seconds", f"must be at least 1, not {ttl_s}")
    return ttl_s


def refuse_token(fields: Fields) -> None:
    """Refuse tokens for weights of another account, which are not here."""
    fields.neutral({"weights_access_token": ()})


def read_sample(body: Json, context: int, vocab_size: int) -> SampleRequest:
    """A request of `asample`, for a model with this context. Raises `RequestRefused`."""
    fields = typed(body, "sample")
    session = required(fields, "sampling_session_id", str)
    seq_id = required(fields, "seq_id", int)
    prompt = _read_prompt(fields, vocab_size)
    num_samples = fields.take("num_samples", int, 1)
    if not 1 <= num_samples <= MOST_SAMPLES:
        raise fields.refusal("num_samples", f"must be from 1 to {MOST_SAMPLES}, not {num_samples}")
    num_scored = _read_scored(fields, len(prompt))
    params = _read_params(fields, len(prompt), num_samples, context)
    fields.neutral(_NOT_HERE)
    fields.finish()
    return SampleRequest(session, seq_id, prompt, num_scored, params)


def _read_layers(fields: Fields) -> Layers:
    """The field `lora_config`, and `optimizer_config`, which may be AdamW alone."""
    _read_optimizer(fields)
    given = fields.take("lora_config", dict)
    if given is None:
        raise fields.refusal("lora_config", "is missing")
    inner = Fields(given, "lora_config.")
    rank = required(inner, "rank", int)
    layers = Layers(
        rank, inner.take("seed", int), inner.take("train_attn", bool, True), inner.take("train_mlp", bool, True)
    )
    inner.take("train_unembed", bool)  # the answer to `create_session` says that it has no effect
    inner.finish()
    if not 1 <= rank <= 1024:
        raise inner.refusal("rank", f"must be from 1 to 1024, not {rank}")
    if not (layers.train_attn or layers.train_mlp):
        raise inner.refusal("train_unembed", "alone is not supported: the LM head takes no adapter here")
    return layers


def _read_optimizer(fields: Fields) -> None:
    given = fields.take("optimizer_config", dict, {})
    inner = Fields(given, "optimizer_config.")
    inner.neutral({"type": ("adamw",)})
    inner.finish()


def _read_prompt(fields: Fields, vocab_size: int) -> list[int]:
    inner = Fields(required(fields, "prompt", dict), "prompt.")
    prompt: list[int] = []
    for index, given in enumerate(required(inner, "chunks", list)):
        where = f"prompt.chunks[{index}]"
        if not isinstance(given, dict):
            raise RequestRefused("must be an object", where)
        chunk = Fields(given, f"{where}.")
        kind = chunk.take("type", str, "encoded_text")
        if kind != "encoded_text":
            raise chunk.refusal("type", f"{kind} is not supported: this server reads tokens alone")
        tokens = required(chunk, "tokens", list)
        if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
            raise chunk.refusal("tokens", f"must be token ids below {vocab_size}, the size of the vocabulary")
        chunk.finish()
        prompt += tokens
    inner.finish()
    if not prompt:
        raise fields.refusal("prompt", "has no tokens")
    return prompt


def _read_scored(fields: Fields, num_prompt: int) -> int:
    """How many tokens at the end of the prompt get log-probs."""
    is_wanted = fields.take("prompt_logprobs", bool, False)
    last_n = fields.take("prompt_logprobs_last_n", int)
    if last_n is None:
        return num_prompt if is_wanted else 0
    if not is_wanted:
        raise fields.refusal("prompt_logprobs_last_n", "needs prompt_logprobs=true")
    if not 1 <= last_n < num_prompt:
        raise fields.refusal("prompt_logprobs_last_n", f"must be from 1 to {num_prompt - 1}, not {last_n}")
    return last_n


def _read_params(fields: Fields, num_prompt: int, num_samples: int, context: int) -> SamplingParams:
    inner = Fields(required(fields, "sampling_params", dict), "sampling_params.")
    room = context - num_prompt
    max_tokens = inner.take("max_tokens", int, room)
    if room < 1 or max_tokens > room:
        problem = f"{max_tokens} tokens after a prompt of {num_prompt} do not fit the context of {context}"
        raise inner.refusal("max_tokens", problem)
    stop = inner.any("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(type(each) in (str, int) and each != "" for each in stops):
        raise inner.refusal("stop", "must be text, or a list of texts or of token ids")
    values = {
        "max_new_tokens": max_tokens,
        "temperature": inner.take("temperature", float, 1.0),
        "top_p": inner.take("top_p", float, 1.0),
        "top_k": max(0, inner.take("top_k", int, -1)),
        "seed": inner.take("seed", int),
        "stop": tuple(stops),
        "ignore_eos": stop == [],
        "n": num_samples,
    }
    inner.finish()
    try:
        return SamplingParams(**values)
    except SettingError as error:
        name, _, problem = str(error).removeprefix("sampling.").partition(" ")
        raise inner.refusal(name.replace("max_new_tokens", "max_tokens"), problem) from error
