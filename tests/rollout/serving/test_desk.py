"""Requests and tokens between two threads: none is lost, and none outlives its client."""

import asyncio
import itertools
import time
from collections import deque

import pytest
from support.served import ScriptedGenerator

from headrace.rollout import SamplingParams
from headrace.rollout.serving.desk import GATHER_S, Desk, Piece, Ticket, once_quiet
from headrace.rollout.serving.fields import RequestRefused


def ticket(n: int = 1, *, streams: bool = False, tokens: int = 3) -> Ticket:
    return Ticket([[5, 6]], [SamplingParams(tokens, n=n, seed=1)], streams)


async def passed_on() -> None:
    """Let the desk pass on what has arrived."""
    for _ in range(10):
        await asyncio.sleep(0)


def run(work) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await work()

    asyncio.run(bounded())


def test_a_cancellation_is_not_lost_when_a_piece_arrives_with_it():
    async def work() -> None:
        asked = ticket()
        waiter = asyncio.ensure_future(asked.next(20))
        await asyncio.sleep(0)
        asked.put(Piece(0, [4], [0.0], [7]))
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter

    run(work)


def test_pieces_are_delivered_with_each_step_or_with_the_end():
    async def work() -> None:
        generator = ScriptedGenerator()
        desk = Desk(8)
        streamed = ticket(streams=True)
        whole = ticket(n=2)
        for each in (streamed, whole):
            desk.submit(each)
        await passed_on()
        for _ in range(3):
            desk.turn(generator, 0)
        pieces = [await streamed.next(9) for _ in range(3)]
        assert [(piece.token_ids, piece.end is not None) for piece in pieces] == [
            ([4], False),
            ([4], False),
            ([4], True),
        ]
        ends = [await whole.next(9) for _ in range(2)]
        assert [(piece.sample, piece.token_ids) for piece in ends] == [(0, [4] * 3), (1, [4] * 3)]
        assert desk.num_served == 0

    run(work)


@pytest.mark.parametrize("num_turns", range(5))
def test_a_released_request_leaves_the_generator_whenever_it_is_released(num_turns: int):
    """Before the generator has seen it, while it runs, and after its end."""

    async def work() -> None:
        generator = ScriptedGenerator()
        desk = Desk(8)
        asked = ticket(n=2)
        desk.submit(asked)
        for number in range(num_turns):
            if number:
                await passed_on()
            desk.turn(generator, 0)
        desk.release(asked)
        steps = generator.num_steps
        desk.turn(generator, 0)
        assert generator.idle and desk.num_served == desk.num_samples == 0
        assert generator.num_steps == steps

    run(work)


def test_requests_that_arrive_together_begin_together():
    """A generator that decodes the first alone, and the others behind it, takes more steps."""

    async def work() -> None:
        generator = ScriptedGenerator()
        desk = Desk(8)
        asked = [ticket() for _ in range(5)]

        async def arrive(num_turns: int, each: Ticket) -> None:
            for _ in range(num_turns):
                await asyncio.sleep(0)
            desk.submit(each)

        def generate() -> None:
            while any(each._pieces == deque() for each in asked):
                desk.turn(generator, 0.01)

        arrivals = [asyncio.ensure_future(arrive(3 * i, each)) for i, each in enumerate(asked)]
        await asyncio.gather(*arrivals, asyncio.get_running_loop().run_in_executor(None, generate))
        assert generator.num_steps == 3

    run(work)


def test_requests_without_an_end_hold_nobody_up():
    async def work() -> None:
        loop = asyncio.get_running_loop()
        is_called = asyncio.Event()
        started = time.thread_time()
        once_quiet(loop, itertools.count().__next__, is_called.set)
        await is_called.wait()
        assert GATHER_S <= time.thread_time() - started < 3 * GATHER_S

    run(work)


def test_more_than_the_desk_takes_is_refused():
    async def work() -> None:
        desk = Desk(3)
        desk.submit(ticket(n=2))
        with pytest.raises(RequestRefused) as told:
            desk.submit(ticket(n=2))
        assert told.value.status == 429
        with pytest.raises(RequestRefused) as told:
            desk.submit(ticket(n=4))
        assert (told.value.status, told.value.param) == (400, "n")

    run(work)
