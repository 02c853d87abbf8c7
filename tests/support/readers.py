"""Readers of bytes that another process, a user or an earlier run wrote: valid input for each, and its one type of error."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.comm import messages
from headrace.comm.errors import LinkBroken, MessageRefused, SettingError
from headrace.comm.frames import FrameReader, encode_message
from headrace.comm.links.frames import receive_frame, send_frame
from headrace.comm.messages.queue import GroupRef
from headrace.comm.messages.weights import Offer
from headrace.comm.recipe import Recipe, RunSettings
from headrace.comm.storage import protocol as storage
from headrace.comm.store import protocol
from headrace.comm.store.members import Member
from headrace.launch.config.load import read_recipe, recipe_yaml
from headrace.launch.resume import choose_point
from headrace.relay.checkpoints import MANIFEST, CheckpointFolder
from headrace.relay.dataset.opening import checked_prompts
from headrace.relay.dataset.rows import JsonLines
from headrace.relay.journal import events as ev
from headrace.relay.journal.files import JournalError
from headrace.relay.journal.replay import replay
from headrace.relay.queue.batch import Batch
from headrace.relay.weights import transfer as weights
from headrace.rollout.engine.sampling import SamplingParams
from headrace.rollout.engine.sequence import SequenceState
from headrace.rollout.leased_row import LeasedRow
from headrace.rollout.migration.codec import MovedRow, decode_rows, encode_rows
from headrace.trainer.step_log import StepLog, StepReplay

_GROUP = messages.GroupId(0, 3)
_REF = GroupRef(_GROUP, [0, 1], [1, 1], [["relay-0#1"], ["relay-0#1"]], [4, 4], [7, 8], [0.5, 0.25])
_BATCH = messages.TrainBatch(step=2, first=0, total=1, groups=[_REF], metrics={"queue/size": 1.0})
_MESSAGES = (
    messages.Stop("done"),
    messages.LeaseGrant(7, 4, [messages.Lease(_GROUP, 1, [0, 1], msgspec.Raw(b'{"prompt":"sort 12","answer":null}'))]),
    messages.RowDone(_GROUP.row(0), 1, 4, ["relay-0#1"], 7, 0.5),
    messages.WeightsPulled(4, "ab"),
    _BATCH,
)
_COLUMNS = (storage.Column("reward", "<f4", (1,), 0, 4, 17),)
_REQUESTS = (
    storage.Reserve([64, 8]),
    storage.Commit(["0.3.0@1"], [storage.Block(1, 0, _COLUMNS)], with_bytes=True),
    storage.Locate(["0.3.0@1"], ["reward"], with_bytes=False),
    storage.Drop(["0.3.0@1"]),
    storage.ListRows(),
)
_ANSWERS = (
    storage.Reserved([0], [1]),
    storage.Located([[storage.Block(1, 0, _COLUMNS)]]),
    storage.Listing(["0.3.0@1"]),
    storage.NotFound("0.3.0@1"),
    storage.Refused("full", is_full=True),
)
_MEMBER = Member("relay-0", "relay", 0, 1, "host", 7, {"segment": "mine"})
_TO_STORE = (
    protocol.Join(1, _MEMBER, 30.0),
    protocol.Watch(2, "relay"),
    protocol.Post("hub", "relay-0", 1, messages.encode(messages.Stop("done"))),
    protocol.OpenInbox(3, "hub", confirms=True),
    protocol.SetValue(4, "summary", b"{}"),
)
_FROM_STORE = (
    protocol.Answer(1, 2),
    protocol.Delivery("hub", "relay-0", 1, b"{}", 1),
    protocol.Changed([_MEMBER], ["rollout-0"]),
    protocol.Beat(),
)
_OFFER = Offer(7, 256, 99, 1, 2, ((0, 64), (128, 256)))


class BytesLink:
    """The receiving end of a link on which these bytes arrive, and the sending end of one that keeps what is sent."""

    backend = "memory"

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)

    def send(self, buffer: np.ndarray, deadline_s: float) -> None:
        self.data += buffer.tobytes()

    def receive(self, buffer: np.ndarray, deadline_s: float) -> None:
        if buffer.nbytes > len(self.data):
            raise LinkBroken("the other end has closed")
        buffer[:] = np.frombuffer(self.data[: buffer.nbytes], np.uint8)
        self.data = self.data[buffer.nbytes :]

    def close(self) -> None:
        """Nothing to end."""


@dataclass(frozen=True, slots=True)
class Reader:
    """One reader: `read` takes bytes, and raises one of `errors` for those that it refuses."""

    name: str
    seeds: list[bytes]
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]


def all_readers(folder: Path) -> list[Reader]:
    """Every reader; those of files use `folder`."""
    return [*_of_messages(), *_of_links(), *_of_files(folder)]


def _of_messages() -> list[Reader]:
    refused = (MessageRefused,)
    return [
        Reader("messages", [messages.encode(message) for message in _MESSAGES], messages.decode, refused),
        Reader("store-requests", [b"".join(map(encode_message, _TO_STORE))], _of_store(protocol.REQUESTS), refused),
        Reader("store-pushes", [b"".join(map(encode_message, _FROM_STORE))], _of_store(protocol.PUSHES), refused),
        Reader("moved-rows", [_moved_rows()], lambda data: decode_rows(np.frombuffer(data, np.uint8)), refused),
    ]


def _of_store(decoder: msgspec.msgpack.Decoder[Any]) -> Callable[[bytes], object]:
    return lambda data: list(FrameReader(decoder, protocol.MAX_REQUEST_BYTES).feed(data))


def _moved_rows() -> bytes:
    params = SamplingParams(max_new_tokens=8)
    state = SequenceState(_GROUP.row(0).number, 5, params, [1, 2, 3], [4, 5], [-0.5, -0.25])
    rows = [MovedRow(LeasedRow(messages.RowId(0, 3, 0), 1, 4, {"prompt": "sort 12"}), state)]
    return b"".join(piece.tobytes() for piece in encode_rows(rows))


def _of_links() -> list[Reader]:
    def frames(name: str, sent: Sequence[object], decoder: Any) -> Reader:
        errors = (MessageRefused, LinkBroken)
        return Reader(name, [*map(_sent, sent)], lambda data: receive_frame(BytesLink(data), decoder, 1.0), errors)

    return [
        frames("unit-requests", _REQUESTS, storage.REQUESTS),
        frames("unit-answers", _ANSWERS, storage.ANSWERS),
        frames("unit-hellos", [storage.Hello("host", "/proc/1/fd/3#ab")], storage.HELLOS),
        frames("version-offers", [_OFFER, weights.Trailer("ab")], weights.OFFERS_OR_NONE),
        frames("version-trailers", [weights.Trailer("ab")], weights.TRAILERS),
    ]


def _sent(message: object) -> bytes:
    link = BytesLink()
    send_frame(link, message, 1.0)
    return bytes(link.data)


def _of_files(folder: Path) -> list[Reader]:
    def reader(name: str, path: Path, read: Callable[[], object], error: type[Exception] = SettingError) -> Reader:
        """A reader of a file, which is valid now."""

        def read_written(content: bytes) -> object:
            path.write_bytes(content)
            return read()

        return Reader(name, [path.read_bytes()], read_written, (error,))

    journal, data, recipe = (folder / name for name in ("journal.jsonl", "data.jsonl", "recipe.yaml"))
    journal.write_bytes(_journal())
    data.write_text('{"prompt":"sort 12:","answer":"#12"}\n{"prompt":[{"role":"user","content":"hi"}]}\n')
    recipe.write_text(recipe_yaml(Recipe()))
    rows, manifest = _saved_rows(folder), _manifest(folder / "resumed")
    resumed = Recipe(run=RunSettings(dir=str(folder / "resumed")))
    return [
        reader("saved-rows", rows, lambda: list(StepReplay(folder, 0).batches())),
        reader("manifest", manifest, lambda: choose_point(resumed)),
        reader("journal", journal, lambda: replay(journal), JournalError),
        reader("data", data, lambda: list(checked_prompts(JsonLines(data), "data.jsonl"))),
        reader("recipe", recipe, lambda: read_recipe(recipe)),
    ]


def _journal() -> bytes:
    rows = [_GROUP.row(0), _GROUP.row(1)]
    events = [
        ev.Opened(epoch=1, samples_per_prompt=2),
        ev.Published(version=0, digest="ab", relay="relay-0"),
        ev.Received(version=0, digest="ab", holder="rollout-0"),
        ev.Leased(group=_GROUP, samples=[0, 1], attempt=1, version=0, holder="rollout-0"),
        *(ev.RowReady(row=row, units=["relay-0#1"], version=0, num_tokens=7, reward=0.5) for row in rows),
        ev.Handed(step=0, groups=[_GROUP]),
        ev.Trained(step=0),
        ev.Checkpointed(step=1, path="run/checkpoints/step_1"),
        ev.Ended(reason="finished"),
    ]
    return b"".join(msgspec.json.encode(event) + b"\n" for event in events)


def _saved_rows(run_dir: Path) -> Path:
    """A step of `rows/`, for a replay."""
    log, refs = StepLog(run_dir), _BATCH.rows()
    log.add(Batch(_BATCH, [refs], {ref.key: {"reward": np.ones(1, np.float32)} for ref in refs}))
    log.write(0)
    return run_dir / "rows" / "step_0.safetensors"


def _manifest(run_dir: Path) -> Path:
    """The manifest of the only checkpoint of a run that is resumed."""
    run_dir.mkdir()
    (run_dir / "journal.jsonl").write_bytes(_journal())
    checkpoints = CheckpointFolder(run_dir)
    state = checkpoints.begin(1) / "dcp"
    state.mkdir()
    (state / "state").write_bytes(b"abc")
    checkpoints.seal(1, 0.5)
    return checkpoints.path(1) / MANIFEST
