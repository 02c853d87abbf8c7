"""Sequences of HTTP requests in a rollout, beside leased trajectories that drain, move, pause and change their weights."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

import pytest
from support.rollout_play import SAMPLES, ManualRollout, Play

from headrace.comm.mailbox import Envelope
from headrace.comm.messages import LoadReport, ServedPrompt, ServedSample, ServedTokens, ServeSequences
from headrace.comm.messages.weights import SwitchWeights
from headrace.relay.journal import events as ev
from headrace.relay.journal.files import read_events
from headrace.rollout import Engine, SamplingParams
from headrace.rollout.engine.sequence import Completion
from headrace.rollout.engine.streams import stream_key
from headrace.rollout.serving import served_side

PROMPT = [7] * 30
TOKENS = 24


@dataclass
class Got:
    """What the front has of a sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    end: str = ""
    num_pieces: int = 0


class Front:
    """Sends a rollout sequences, and keeps what comes back."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.box = play.network.mailboxes.open("front-0")
        self.got: dict[int, Got] = {}
        self.version = -1
        self.numbers = count()

    def hello(self, rollout: ManualRollout, front: int = 1) -> None:
        self.tell(rollout, ServeSequences(front, is_first=True))

    def tell(self, rollout: ManualRollout, message: ServeSequences) -> None:
        rollout.handle(Envelope("front-0", message))

    def ask(
        self, rollout: ManualRollout, seed: int = 3, *, streams: bool = True, tokens: int = TOKENS, known: int = 0,
        stop: tuple[int, ...] = (),
    ) -> int:  # fmt: skip
        """Begin a sequence, behind its first `known` tokens; returns its number."""
        number = next(self.numbers)
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=seed, stop=stop)
        before = expected(self.play, seed, tokens)[:known] if known else []
        sample = ServedSample(number, stream_key(seed, 0), streams, before)
        self.got[number] = Got(before)
        self.tell(rollout, ServeSequences(1, [ServedPrompt(PROMPT, asdict(params), [sample])]))
        return number

    def read(self) -> None:
        while (envelope := self.box.receive(0)) is not None:
            message = envelope.message
            assert isinstance(message, ServedTokens)
            self.version = message.version
            for piece in message.pieces:
                got = self.got[piece.number]
                assert piece.start == len(got.token_ids) and not got.end
                got.token_ids += piece.token_ids
                got.logprobs += piece.logprobs
                got.versions += piece.versions
                got.end = piece.end
                got.num_pieces += 1

    def until_ended(self, *numbers: int) -> None:
        def have_ended() -> bool:
            self.read()
            return all(self.got[number].end for number in numbers)

        self.play.until(have_ended)


ENGINES: dict[str, Path] = {}


def expected(play: Play, seed: int = 3, tokens: int = TOKENS) -> list[int]:
    return alone(seed, tokens).token_ids


def alone(seed: int, tokens: int) -> Completion:
    engine = Engine(ENGINES["policy"], exact=True)
    return engine.generate([PROMPT], SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=seed))[0]


@pytest.fixture
def stage(tmp_path: Path, llama: Path) -> Callable[..., Play]:
    ENGINES["policy"] = llama
    return lambda *settings: Play(tmp_path / "play", llama, settings=settings)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> list[float]:
    """The rewards of a rollout that serves nobody: a fingerprint of its tokens."""
    play = Play(tmp_path_factory.mktemp("unbroken") / "play", llama, ("here",))
    play.lease(play.rollouts[0])
    return list(play.finish().values())


def report(rollout: ManualRollout) -> LoadReport:
    return rollout._totals.report(rollout.generator, rollout.migration, 0, 0, 0, rollout.served)  # pyright: ignore[reportPrivateUsage]


def drawn(rollout: ManualRollout) -> tuple[int, int, int, int]:
    """Tokens drawn for leases, those of ended and of unfinished ones, and those that were served."""
    tokens = rollout._tokens.report((), is_whole=True)  # pyright: ignore[reportPrivateUsage]
    return tokens.drawn, tokens.ended, tokens.unfinished, tokens.served


def test_requests_and_leases_share_a_rollout_and_neither_changes_the_others_tokens(
    stage: Callable[..., Play], unbroken: list[float], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(served_side, "STREAM_S", 0.0)
    monkeypatch.setattr(served_side, "LAZY_S", 1e9)
    play = stage()
    rollout = play.rollouts[0]
    front = Front(play)
    front.hello(rollout)
    play.lease(rollout)
    streamed, whole = front.ask(rollout, 3), front.ask(rollout, 4, streams=False)
    front.until_ended(streamed, whole)
    for number, seed in ((streamed, 3), (whole, 4)):
        done = alone(seed, TOKENS)
        got = front.got[number]
        assert (got.token_ids, got.logprobs, got.end) == (done.token_ids, done.logprobs, "length")
        assert got.versions == [0] * TOKENS
    assert (front.got[streamed].num_pieces, front.got[whole].num_pieces) == (TOKENS, 1)
    assert list(play.finish().values()) == unbroken
    num_leased = SAMPLES * 40
    assert drawn(rollout) == (num_leased, num_leased, 0, 2 * TOKENS)


def test_a_report_to_the_hub_has_the_leases_alone(stage: Callable[..., Play]):
    play = stage()
    rollout = play.rollouts[0]
    front = Front(play)
    front.hello(rollout)
    play.lease(rollout)
    for seed in range(4):
        front.ask(rollout, seed)
    play.step(3)
    load = report(rollout)
    assert (load.num_running, load.num_waiting, load.num_at_tools, load.num_unfinished) == (3, 0, 0, SAMPLES)
    assert rollout.generator.num_running == SAMPLES + 4
    assert load.kv_used == sum(part.num_tokens for part in rollout.generator.unfinished() if part.trajectory_id >= 0)
    assert load.batch_bound == rollout.migration.batch_bound - 4
    assert load.peak_running == SAMPLES
    num_drawn, ended, unfinished, served = drawn(rollout)
    assert (num_drawn, ended) == (unfinished, 0) and served > 0
    assert num_drawn + served == rollout.generator.num_sampled


def test_new_weights_wait_for_no_request_and_its_tokens_have_their_versions(stage: Callable[..., Play]):
    play = stage()
    rollout = play.rollouts[0]
    front = Front(play)
    front.hello(rollout)
    number = front.ask(rollout, streams=False, tokens=60)
    play.step(10)
    rollout.generator.loaded.latest = 2
    play.step()
    assert rollout.generator.weights.version == 2 and rollout.served.num_served == 1
    front.read()
    assert front.version == 2, "the front is told at once"
    front.until_ended(number)
    got = front.got[number]
    switch = got.versions.index(2)
    assert got.versions == [0] * switch + [2] * (60 - switch) and 0 < switch < 20
    assert got.token_ids == alone(3, 60).token_ids, "the weights are the same"


def test_leases_drain_beside_a_request_and_a_switch_counts_them_alone(stage: Callable[..., Play]):
    play = stage()
    rollout = play.rollouts[0]
    front = Front(play)
    front.hello(rollout)
    play.lease(rollout)
    number = front.ask(rollout, tokens=100)
    play.step(5)
    rollout.generator.loaded.latest = 1
    play.step()
    assert rollout.generator.weights.version == 0, "the leased ones drain"
    rollout.handle(Envelope("hub", SwitchWeights(0)))
    assert rollout.generator.weights.version == 1
    play.until(lambda: not rollout.leases.held)
    assert rollout.served.num_served == 1
    rollout.generator.loaded.latest = 2
    play.step()
    assert rollout.generator.weights.version == 2, "no lease is left to drain"
    play.step()
    received = [e for _, e in read_events(play.path) if isinstance(e, ev.Received) and e.holder == rollout.name]
    assert [event.num_unfinished for event in received] == [SAMPLES, 0]
    front.until_ended(number)
    assert sorted({*front.got[number].versions}) == [0, 1, 2]


def test_leases_move_to_another_rollout_and_requests_stay(stage: Callable[..., Play], unbroken: list[float]):
    play = stage()
    source, target, _ = play.rollouts
    front = Front(play)
    front.hello(source)
    play.lease(source)
    number = front.ask(source, tokens=80)
    play.step(5)
    play.order(source, target)
    play.until(lambda: len(target.leases.held) == SAMPLES and not source.leases.held)
    assert source.served.num_served == 1 and target.served.num_served == 0
    front.until_ended(number)
    assert front.got[number].token_ids == alone(3, 80).token_ids
    assert list(play.finish().values()) == unbroken


def test_an_order_to_move_where_requests_alone_are_left_moves_nothing(stage: Callable[..., Play]):
    play = stage()
    source, target, _ = play.rollouts
    front = Front(play)
    front.hello(source)
    number = front.ask(source)
    play.step(3)
    play.order(source, target)
    play.step()
    assert [result.refusal for result in play.ended] == ["nothing left"] and source.served.num_served == 1
    front.until_ended(number)


def test_a_sequence_goes_on_behind_the_tokens_that_another_rollout_drew(stage: Callable[..., Play]):
    play = stage()
    rollout = play.rollouts[0]
    front = Front(play)
    front.hello(rollout)
    number = front.ask(rollout, known=10)
    front.until_ended(number)
    assert front.got[number].token_ids == alone(3, TOKENS).token_ids
    assert len(front.got[number].versions) == TOKENS - 10
    assert drawn(rollout) == (0, 0, 0, TOKENS - 10)


def test_what_is_dropped_leaves_the_generator_and_stays_counted(stage: Callable[..., Play]):
    play = stage()
    rollout = play.rollouts[0]
    front = Front(play)
    front.hello(rollout)
    numbers = [front.ask(rollout, seed) for seed in range(3)]
    play.step(6)
    before = rollout.generator.num_sampled
    front.tell(rollout, ServeSequences(1, drop=numbers[:2]))
    assert rollout.served.num_served == 1 and len(rollout.generator.unfinished()) == 1
    assert drawn(rollout) == (0, 0, 0, before)
    front.until_ended(numbers[2])
    assert drawn(rollout) == (0, 0, 0, rollout.generator.num_sampled)
    assert rollout.generator.idle


def test_one_that_has_just_ended_can_be_dropped(stage: Callable[..., Play]):
    play = stage()
    rollout = play.rollouts[0]
    front = Front(play)
    front.hello(rollout)
    number = front.ask(rollout, tokens=5)
    play.step(2)
    generator = rollout.generator
    done: list[Completion] = []
    while not done:
        done = generator.step()
    generator._finished_early = done  # pyright: ignore[reportPrivateUsage] - as on a GPU, where a step is read late
    front.tell(rollout, ServeSequences(1, drop=[number]))
    assert rollout.served.num_served == 0 and not generator.idle
    play.step()
    front.read()
    assert not front.got[number].end and generator.idle
    assert drawn(rollout) == (0, 0, 0, 5)


def test_requests_take_half_of_the_batch_while_there_are_leases_and_all_of_it_after(stage: Callable[..., Play]):
    play = stage("generator.max_running=6")
    rollout = play.rollouts[0]
    front = Front(play)
    front.hello(rollout)
    play.lease(rollout)
    numbers = [front.ask(rollout, seed, tokens=60) for seed in range(7)]
    play.step()
    assert rollout.served.num_served == 3
    play.until(lambda: not rollout.leases.held)
    play.step()
    assert rollout.served.num_served == 6
    front.until_ended(*numbers)


def test_the_next_front_begins_anew_and_the_one_before_is_not_heard(stage: Callable[..., Play]):
    play = stage()
    rollout = play.rollouts[0]
    front = Front(play)
    front.hello(rollout)
    front.ask(rollout)
    play.step(3)
    front.hello(rollout, front=2)
    assert rollout.served.num_served == 0 and rollout.generator.idle
    front.ask(rollout)
    play.step(3)
    assert rollout.generator.idle, "a message of the front before"


def test_a_request_that_stops_is_no_turn_of_an_environment(stage: Callable[..., Play], tmp_path: Path):
    file = tmp_path / "environment.py"
    file.write_text(
        "class Echo:\n"
        "    async def reset(self, prompt, **row):\n        pass\n"
        "    async def step(self, completion):\n        return '!', 1.0, False\n"
    )
    play = stage(f"environment.path={file}:Echo", "environment.max_turns=3", "sampling.stop=[a,b,c,d,e,f,g,h,i,j]")
    rollout = play.rollouts[0]
    front = Front(play)
    front.hello(rollout)
    play.lease(rollout)
    stop = expected(play)[4]
    number = front.ask(rollout, stop=(stop,))
    front.until_ended(number)
    got = front.got[number]
    assert got.end == "stop" and got.token_ids[-1] == stop
    play.finish()


def test_a_prompt_that_the_generator_refuses_costs_its_request_alone(stage: Callable[..., Play]):
    play = stage()
    rollout = play.rollouts[0]
    front = Front(play)
    front.hello(rollout)
    params = SamplingParams(max_new_tokens=4, seed=1)
    front.got[99] = Got()
    front.tell(rollout, ServeSequences(1, [ServedPrompt([10**6], asdict(params), [ServedSample(99, 0)])]))
    number = front.ask(rollout)
    front.until_ended(99, number)
    assert front.got[99].end == "refused" and front.got[number].end == "length"
