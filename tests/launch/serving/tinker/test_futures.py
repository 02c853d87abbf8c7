"""Results that clients fetch later: finished once, found again by the same request, and forgotten only when many newer ones came."""

import asyncio
import json
import threading

import pytest

from headrace.launch.serving.tinker import futures as module
from headrace.launch.serving.tinker.futures import PROTOBUF, Future, Futures
from headrace.rollout.serving.fields import RequestRefused

PATIENCE_S = 60.0


async def finished(book: Futures, name: str, body: bytes = b"x") -> Future:
    future, is_new = book.open(name, b"digest")
    assert is_new
    future.succeed(body)
    assert await future.wait(PATIENCE_S)
    return future


def test_a_result_comes_from_another_thread_and_the_first_one_stays():
    async def main() -> None:
        future, _ = Futures().open("a", b"1", model_id="m")
        assert future.first_answer == {"request_id": "a", "model_id": "m"}
        assert not await future.wait(0.01)
        thread = threading.Thread(target=future.succeed, args=(b"bytes",))
        thread.start()
        assert await future.wait(PATIENCE_S)
        thread.join(PATIENCE_S)
        future.fail("too late", is_user=True)
        await asyncio.sleep(0)
        assert (future.media_type, future.body) == (PROTOBUF, b"bytes")

    asyncio.run(main())


@pytest.mark.parametrize(("is_user", "category"), [(True, "user"), (False, "server")])
def test_an_error_says_who_is_responsible(is_user: bool, category: str):
    async def main() -> None:
        future, _ = Futures().open("a", b"1")
        future.fail("no", is_user=is_user)
        assert await future.wait(PATIENCE_S)
        assert json.loads(future.body or b"") == {"error": "no", "category": category}

    asyncio.run(main())


def test_the_same_request_is_the_same_future_and_another_one_is_refused():
    async def main() -> None:
        book = Futures()
        first = await finished(book, "a")
        assert book.open("a", b"digest") == (first, False)
        with pytest.raises(RequestRefused, match="a was another request"):
            book.open("a", b"other")

    asyncio.run(main())


@pytest.mark.parametrize(("number", "size"), [(3, 1 << 20), (100, 30)])
def test_the_oldest_results_are_forgotten_and_open_requests_never(
    monkeypatch: pytest.MonkeyPatch, number: int, size: int
):
    monkeypatch.setattr(module, "KEPT_RESULTS", number)
    monkeypatch.setattr(module, "KEPT_BYTES", size)

    async def main() -> None:
        book = Futures()
        book.open("open", b"digest")
        for place in range(10):
            await finished(book, str(place), b"0123456789")
        assert [name for name in map(str, range(10)) if book.has(name)] == ["7", "8", "9"]
        assert book.find("open").body is None
        with pytest.raises(RequestRefused, match="has forgotten its result"):
            book.find("0")

    asyncio.run(main())


def test_one_result_is_kept_however_large_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 5)

    async def main() -> None:
        book = Futures()
        await finished(book, "a", b"0123456789")
        assert book.find("a").body == b"0123456789"

    asyncio.run(main())
