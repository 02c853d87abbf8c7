"""The desk of a run's front, between requests and rollouts that are played by the test."""

import asyncio
import threading
from collections.abc import Sequence

import pytest
from support.in_memory import MemoryFleet, MemoryNetwork

from headrace.comm.mailbox import Mailbox
from headrace.comm.messages import ServedPiece, ServedPrompt, ServedTokens, ServeSequences, Stop
from headrace.rollout.engine.sampling import SamplingParams
from headrace.rollout.engine.streams import stream_key
from headrace.rollout.serving.desk import Piece, Ticket
from headrace.rollout.serving.fields import RequestRefused
from headrace.rollout.serving.prefix_homes import BLOCK
from headrace.rollout.serving.run_desk import RunDesk
from headrace.rollout.serving.served_side import REFUSED, SERVES, params_of

FRONT = 1
"""The incarnation of the front."""


class Play:
    """A desk and rollouts. Each rollout has an inbox, and answers as the test says."""

    def __init__(self, num_rollouts: int = 2, most_samples: int = 8) -> None:
        self.network = MemoryNetwork()
        self.fleet = MemoryFleet.join_network(self.network, "front")
        self.desk = RunDesk(self.fleet, self.fleet.open_mailbox("front-0"), most_samples)
        self.rollouts: list[MemoryFleet] = []
        self.boxes: list[Mailbox] = []
        self.seen: list[list[ServeSequences]] = []
        for _ in range(num_rollouts):
            self.join()

    def join(self) -> None:
        index = len(self.rollouts)
        self.rollouts.append(MemoryFleet.join_network(self.network, "rollout", index, {SERVES: "yes"}))
        self.boxes.append(self.network.mailboxes.open(f"rollout-{index}"))
        self.seen.append([])
        self.look()

    def look(self) -> None:
        """Have the desk read its messages and look at the rollouts, and the rollouts read theirs."""
        self.desk._looked_at = 0.0
        self.desk.turn(0.0)
        for box, seen in zip(self.boxes, self.seen, strict=True):
            while (envelope := box.receive(0.0)) is not None:
                assert isinstance(envelope.message, ServeSequences)
                seen.append(envelope.message)

    def begun(self, index: int) -> list[ServedPrompt]:
        """All that a rollout was told to begin."""
        self.look()
        return [prompt for message in self.seen[index] for prompt in message.begin]

    def numbers(self, index: int) -> list[int]:
        return [sample.number for prompt in self.begun(index) for sample in prompt.samples]

    def answer(self, index: int, *pieces: ServedPiece, version: int = 0, front: int = FRONT, digest: str = "") -> None:
        self.boxes[index].send("front-0", ServedTokens(front, version, [*pieces], digest))
        self.look()


def ticket(prompt: Sequence[int] = (1, 2, 3), *, streams: bool = False, n: int = 1, seed: int = 5) -> Ticket:
    return Ticket([[*prompt]], [SamplingParams(max_new_tokens=4, seed=seed, n=n)], streams)


def piece(number: int, start: int, tokens: list[int], end: str = "", version: int = 3) -> ServedPiece:
    logprobs = [-token / 8 for token in tokens]
    return ServedPiece(number, start, tokens, logprobs, [version] * len(tokens), end, "text" if end else "")


async def arrived(asked: Ticket) -> list[Piece]:
    """The pieces that are there."""
    await asyncio.sleep(0)
    found: list[Piece] = []
    while asked._pieces:
        found.append(await asked.next(1.0))
    return found


def test_a_request_gets_tokens_with_their_versions_and_its_end():
    async def run() -> None:
        play = Play(1)
        asked = ticket(streams=True)
        play.desk.submit(asked)
        (prompt,) = play.begun(0)
        (sample,) = prompt.samples
        assert prompt.prompt_ids == [1, 2, 3] and sample.key == stream_key(5, 0) and sample.streams
        assert params_of(prompt) == SamplingParams(max_new_tokens=4, seed=5)
        play.answer(0, piece(sample.number, 0, [7, 8], version=3), version=4)
        play.answer(0, piece(sample.number, 2, [9], "stop", version=4), version=4)
        first, last = await arrived(asked)
        assert (first.token_ids, first.logprobs, first.versions, first.end) == ([7, 8], [-7 / 8, -1.0], [3, 3], None)
        assert (last.token_ids, last.versions) == ([9], [4])
        assert last.end is not None and last.end.token_ids == [7, 8, 9] and last.end.finish_reason == "stop"
        assert last.end.text == "text" and last.end.logprobs == [-7 / 8, -1.0, -9 / 8]
        assert play.desk.version == 4 and play.desk.num_samples == 1
        play.desk.release(asked)
        assert play.desk.num_samples == 0

    asyncio.run(run())


def test_requests_that_arrive_together_go_out_in_one_message():
    async def run() -> None:
        play = Play(1)
        for seed in range(6):
            play.desk.submit(ticket(seed=seed))
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert play.desk._is_gathering is False
        envelope = play.boxes[0].receive(0.0)
        assert envelope is not None and isinstance(envelope.message, ServeSequences)
        assert sum(len(prompt.samples) for prompt in envelope.message.begin) == 6
        assert play.boxes[0].receive(0.0) is None

    asyncio.run(run())


def test_a_digest_goes_with_each_version_and_two_weights_of_one_number_have_none():
    async def run() -> None:
        play = Play(2)
        asked = ticket()
        play.desk.submit(asked)
        (number,) = play.numbers(0)
        play.answer(0, version=3, digest="d3")
        play.answer(0, piece(number, 0, [7], version=3), version=3, digest="d3")
        play.answer(0, version=4, digest="d4")
        play.answer(0, piece(number, 1, [8], version=4), version=4, digest="d4")
        play.rollouts[0].crash()
        (number,) = play.numbers(1)
        play.answer(1, version=4, digest="e4")
        play.answer(1, piece(number, 2, [9], "stop", version=4), version=4, digest="e4")
        (whole,) = await arrived(asked)
        assert whole.versions == [3, 4, 4] and whole.digests == {3: "d3", 4: ""}

    asyncio.run(run())


def test_a_whole_answer_is_one_piece_though_its_tokens_came_in_several():
    async def run() -> None:
        play = Play(1)
        asked = ticket()
        play.desk.submit(asked)
        (number,) = play.numbers(0)
        play.answer(0, piece(number, 0, [7], version=1))
        assert not await arrived(asked)
        play.answer(0, piece(number, 1, [8], "length", version=2))
        (last,) = await arrived(asked)
        assert (last.token_ids, last.versions) == ([7, 8], [1, 2])

    asyncio.run(run())


def test_each_request_goes_to_the_rollout_with_the_fewest_sequences():
    async def run() -> None:
        play = Play(3)
        for _ in range(6):
            play.desk.submit(ticket())
        assert [len(play.numbers(index)) for index in range(3)] == [2, 2, 2]

    asyncio.run(run())


def test_many_responses_to_one_prompt_are_spread_a_few_together():
    async def run() -> None:
        play = Play(2, most_samples=16)
        play.desk.submit(ticket(n=20))
        assert [[len(p.samples) for p in play.begun(index)] for index in range(2)] == [[8, 4], [8]]
        keys = [sample.key for index in range(2) for prompt in play.begun(index) for sample in prompt.samples]
        assert sorted(keys) == sorted(stream_key(5, stream) for stream in range(20))

    asyncio.run(run())


def test_a_conversation_stays_with_its_rollout_unless_that_is_much_busier():
    async def run() -> None:
        play = Play(2)
        start = [*range(2 * BLOCK)]
        play.desk.submit(ticket([9]))  # the next request goes to the other rollout
        asked = ticket(start)
        play.desk.submit(asked)
        (number,) = play.numbers(1)
        play.answer(1, piece(number, 0, [*range(BLOCK)], "stop"))
        play.desk.release(asked)
        for _ in range(3):
            play.desk.submit(ticket([9]))
        load = [len(play.numbers(0)), len(play.numbers(1)) - 1]
        assert load == [2, 2]
        for _ in range(5):  # the tie would go to the first one
            play.desk.submit(ticket([*start, *range(BLOCK), 1, 2]))
        assert [len(play.numbers(0)), len(play.numbers(1)) - 1] == [2, 7]
        play.desk.submit(ticket([*start, *range(BLOCK), 3, 4]))
        assert [len(play.numbers(0)), len(play.numbers(1)) - 1] == [3, 7]

    asyncio.run(run())


def test_a_sequence_of_a_dead_rollout_goes_on_at_another_one_after_its_tokens():
    async def run() -> None:
        play = Play(2)
        asked = ticket(streams=True)
        play.desk.submit(asked)
        (number,) = play.numbers(0)
        play.answer(0, piece(number, 0, [7, 8]))
        play.rollouts[0].crash()
        (prompt,) = play.begun(1)
        (sample,) = prompt.samples
        assert sample.token_ids == [7, 8] and sample.key == stream_key(5, 0) and sample.number != number
        play.answer(0, piece(number, 2, [1, 1, 1]))  # it was silent, not dead
        play.answer(1, piece(sample.number, 2, [9], "stop"))
        found = await arrived(asked)
        assert [each.token_ids for each in found] == [[7, 8], [9]]
        assert found[-1].end is not None and found[-1].end.token_ids == [7, 8, 9]

    asyncio.run(run())


def test_the_next_process_of_a_rollout_drops_what_it_finds_and_gets_its_sequences_again():
    async def run() -> None:
        play = Play(1)
        play.desk.submit(ticket())
        (number,) = play.numbers(0)
        play.rollouts[0] = MemoryFleet.join_network(play.network, "rollout", 0, {SERVES: "yes"})
        again = play.numbers(0)
        assert again[0] == number and len(again) == 2
        first, begin = play.seen[0][-2:]
        assert first.is_first and not first.begin and not begin.is_first

    asyncio.run(run())


def test_without_a_rollout_a_request_waits_for_one():
    async def run() -> None:
        play = Play(0)
        asked = ticket()
        play.desk.submit(asked)
        play.look()
        error = play.desk.late(asked, 2.0)
        assert (error.status, error.code) == (503, "no_rollout") and "within 2 s" in str(error)
        play.join()
        assert len(play.numbers(0)) == 1
        error = play.desk.late(asked, 2.0)
        assert (error.status, error.code) == (504, "timeout")

    asyncio.run(run())


def test_a_rollout_that_does_not_serve_gets_nothing():
    async def run() -> None:
        play = Play(0)
        MemoryFleet.join_network(play.network, "rollout", 7)
        asked = ticket()
        play.desk.submit(asked)
        play.look()
        assert play.desk.late(asked, 1.0).code == "no_rollout"

    asyncio.run(run())


def test_a_client_that_leaves_frees_its_sequences():
    async def run() -> None:
        play = Play(1)
        asked = ticket(n=3)
        play.desk.submit(asked)
        numbers = play.numbers(0)
        play.answer(0, piece(numbers[1], 0, [7], "stop"))
        play.desk.release(asked)
        play.look()
        assert [message.drop for message in play.seen[0] if message.drop] == [[numbers[0], numbers[2]]]
        play.answer(0, piece(numbers[0], 0, [7], "stop"))
        assert len(await arrived(asked)) == 1

    asyncio.run(run())


def test_requests_beyond_the_room_of_all_rollouts_are_told_to_come_back():
    async def run() -> None:
        play = Play(2, most_samples=2)
        held = [ticket(n=2), ticket(n=2)]
        for each in held:
            play.desk.submit(each)
        with pytest.raises(RequestRefused) as refused:
            play.desk.submit(ticket())
        assert refused.value.status == 429
        play.desk.release(held[0])
        play.desk.submit(ticket(n=2))

    asyncio.run(run())


def test_the_end_of_the_run_ends_requests_with_a_reason():
    async def run() -> None:
        play = Play(1)
        asked = ticket(streams=True)
        play.desk.submit(asked)
        (number,) = play.numbers(0)
        play.answer(0, piece(number, 0, [7]))
        play.boxes[0].send("front-0", Stop("finished"))
        play.look()
        assert (await asked.next(1.0)).token_ids == [7]
        with pytest.raises(RequestRefused, match="the run has ended") as ended:
            await asked.next(1.0)
        assert (ended.value.status, ended.value.code) == (503, "run_ended")
        with pytest.raises(RequestRefused, match="the run has ended"):
            play.desk.submit(ticket())
        play.desk.release(asked)

    asyncio.run(run())


def test_a_sequence_that_the_rollout_refuses_ends_its_request_with_the_reason():
    async def run() -> None:
        play = Play(1)
        asked = ticket()
        play.desk.submit(asked)
        (number,) = play.numbers(0)
        play.answer(0, ServedPiece(number, 0, [], [], [], REFUSED, "the prompt is odd"))
        await asyncio.sleep(0)
        with pytest.raises(RequestRefused, match="the prompt is odd") as refused:
            await asked.next(1.0)
        assert refused.value.status == 400

    asyncio.run(run())


def test_what_an_earlier_front_had_asked_for_is_ignored():
    async def run() -> None:
        play = Play(1)
        asked = ticket(streams=True)
        play.desk.submit(asked)
        (number,) = play.numbers(0)
        play.answer(0, piece(number, 0, [1]), front=FRONT + 1, version=9)
        assert not await arrived(asked) and play.desk.version == 0

    asyncio.run(run())


def test_a_request_of_a_loop_that_has_ended_hurts_nobody():
    play = Play(1)

    async def leave() -> None:
        play.desk.submit(ticket())

    worker = threading.Thread(target=lambda: asyncio.run(leave()))
    worker.start()
    worker.join()
    (number,) = play.numbers(0)
    play.answer(0, piece(number, 0, [7], "stop"))
    play.desk.end("finished")
