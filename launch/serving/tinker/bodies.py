"""The protocol-buffer messages of the API (`tinker_public.proto` of SDK 0.38): data with a loss come in, log-probs and samples go out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ....comm.errors import SettingError
from ....trainer.tinker.datum import Datum
from .wire import WireMessage, data_field, double_field, integer_field

if TYPE_CHECKING:
    from ....rollout.serving.samplers import SampleResult
    from ....trainer.tinker.trained_model import LossResult

FLOAT32 = 1
_DTYPES = {FLOAT32: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
_STOP, _LENGTH = 0, 1
_TOKENS = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class LossRequest:
    """A request of `forward_backward`, or of `forward` without a gradient."""

    data: Sequence[Datum]
    loss: str
    settings: Mapping[str, float | str]
    needs_gradient: bool


def read_address(body: bytes) -> tuple[str, int]:
    """The model and the number of a request of `forward_backward`. Raises `SettingError`."""
    message = WireMessage(body, "forward_backward")
    return message.text(1), message.integer(2)


def read_loss_request(body: bytes) -> LossRequest:
    """The rest of a request of `forward_backward`. Raises `SettingError`, which names the field, for what is not supported."""
    message = WireMessage(body, "forward_backward")
    settings: dict[str, float | str] = {key: entry.double(2) for key, entry in message.pairs(5, "loss_fn_config")}
    for key, entry in message.pairs(7, "loss_fn_config_v2"):
        for value in entry.messages(2, f"loss_fn_config.{key}"):
            settings[key] = value.text(2) if value.has(2) else value.double(1)
    data = [_read_datum(datum, f"data[{index}]") for index, datum in enumerate(message.messages(3, "data"))]
    return LossRequest(data, message.text(4), settings, not message.integer(6))


def loss_answer(result: "LossResult") -> bytes:
    """A `ForwardBackwardOutput`: the log-probs of each datum, and the sum of the loss."""
    arrays = [np.ascontiguousarray(each, "<f4") for each in result.logprobs]
    offsets = np.cumsum([0, *(each.nbytes for each in arrays)]).astype("<i8")
    tensor = data_field(1, b"".join(each.tobytes() for each in arrays)) + data_field(2, offsets.tobytes())
    entry = data_field(1, b"logprobs") + data_field(2, tensor + integer_field(3, FLOAT32))
    record = data_field(1, b"ArrayRecord") + data_field(2, entry) + integer_field(3, len(arrays))
    metric = data_field(1, b"loss:sum") + double_field(2, result.loss)
    return data_field(1, b"ArrayRecord") + data_field(2, record) + data_field(3, metric)


def sample_answer(result: "SampleResult") -> bytes:
    """A `SampleResponse`."""
    parts: list[bytes] = []
    for response in result.responses:
        sequence = integer_field(1, _STOP if response.finish_reason == "stop" else _LENGTH)
        sequence += data_field(2, np.array(response.token_ids, _TOKENS).tobytes())
        sequence += data_field(3, np.array(response.logprobs, "<f4").tobytes())
        parts.append(data_field(1, sequence))
    if result.prompt_logprobs is not None:
        parts.append(data_field(2, result.prompt_logprobs.astype("<f4").tobytes()))
    return b"".join(parts)


def _read_datum(message: WireMessage, where: str) -> Datum:
    chunks: list[np.ndarray] = []
    for chunk in message.messages(1, f"{where}.model_input"):
        texts = chunk.messages(1, f"{where}.model_input")
        if not texts:
            raise SettingError(f"{where}.model_input: only tokens are supported, not images or audio")
        chunks.append(_array(texts[-1].data(1), _TOKENS, f"{where}.model_input"))
    inputs = {
        name: _read_tensor(tensor, f"{where}.loss_fn_inputs.{name}")
        for name, entry in message.pairs(2, f"{where}.loss_fn_inputs")
        for tensor in entry.messages(2, f"{where}.loss_fn_inputs.{name}")
    }
    return Datum(np.concatenate([np.zeros(0, np.int64), *chunks]).astype(np.int64), inputs)


def _read_tensor(message: WireMessage, where: str) -> np.ndarray:
    if message.has(2):
        raise SettingError(f"{where}: a sparse tensor is not supported, only one number for each token")
    dtype = _DTYPES.get(message.integer(3))
    if dtype is None:
        raise SettingError(f"{where}: the type {message.integer(3)} is not float32, int64 or int32")
    array = _array(message.data(1), dtype, where)
    shape = message.integers(4) or [len(array)]
    if int(np.prod(shape, dtype=object)) != len(array):
        raise SettingError(f"{where}: the shape {shape} is not that of {len(array)} numbers")
    return array.reshape(shape)


def _array(data: memoryview, dtype: np.dtype, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise SettingError(f"{where}: {len(data)} bytes are not whole numbers of {dtype.itemsize} bytes")
    return np.frombuffer(data, dtype)
