"""Trajectories in sessions of a real OpenEnv server."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.environment_calls import answered
from support.foreign_servers import PRODUCTS, Served, serving
from support.http_server import serving as answering

from headrace.comm.errors import SettingError
from headrace.comm.recipe import EnvironmentSettings
from headrace.rollout.environments.base import Episode
from headrace.rollout.environments.openenv import OpenEnvServer
from headrace.rollout.environments.pool import EnvironmentCall, EnvironmentPool

pytest.importorskip("openenv")
pytest.importorskip("websockets")
pytest.importorskip("jsonschema")

pytestmark = pytest.mark.extra


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, PRODUCTS, "4") as served:
        yield served


@pytest.fixture
def pool(server: Served) -> Iterator[EnvironmentPool]:
    pool = EnvironmentPool(EnvironmentSettings(path=f"openenv:{server.url}", timeout_s=5)).start()
    yield pool
    pool.close()


def begun(pool: EnvironmentPool, *rows: dict[str, Any]) -> list[EnvironmentCall]:
    """The answers to the resets of trajectories of these rows."""
    calls = [EnvironmentCall(i, None, row, Episode(row["prompt"])) for i, row in enumerate(rows)]
    return answered(pool, calls)


def stepped(
    pool: EnvironmentPool, start: EnvironmentCall, turns: Sequence[str], seen: Sequence[Any]
) -> EnvironmentCall:
    """The answer to the last of `turns` of a trajectory, which has read `seen` between them."""
    episode = Episode(f"{start.row['prompt']}{start.step.observation}", [*turns], [*seen])
    return answered(pool, [EnvironmentCall(start.number, None, start.row, episode)])[0]


def test_a_trajectory_resets_with_its_row_and_steps_until_it_is_done(pool: EnvironmentPool):
    (start,) = begun(pool, {"prompt": "Answer:", "factors": [12, 11]})
    assert start.step.observation == "\n12*11\n" and not start.failure
    first = stepped(pool, start, ["12*11"], [])
    assert (first.step.observation, first.step.reward, first.step.done) == ("\n132\n", 0, False)
    last = stepped(pool, start, ["12*11", "132"], ["\n132\n"])
    assert (last.step.reward, last.step.done) == (1, True)


def test_in_a_chat_an_observation_is_a_message_of_its_own(pool: EnvironmentPool):
    (start,) = begun(pool, {"prompt": [{"role": "user", "content": "Answer: "}], "factors": [12, 11]})
    assert start.step.observation == "12*11"


def test_samples_of_a_row_have_the_same_task_and_the_columns_seed_it(pool: EnvironmentPool):
    same, again, other, seeded = begun(
        pool,
        {"prompt": "=", "row": 1},
        {"prompt": "=", "row": 1},
        {"prompt": "=", "row": 2},
        {"prompt": "=", "seed": 5},
    )
    assert same.step.observation == again.step.observation
    assert len({str(call.step.observation) for call in (same, other, seeded)}) == 3
    pool.drop(3)
    assert (
        begun(pool, *[{"prompt": "-"}] * 3, {"prompt": "+", "seed": 5})[3].step.observation == seeded.step.observation
    )


def test_sessions_are_apart_and_one_is_rebuilt_by_its_steps(pool: EnvironmentPool):
    first, second = begun(pool, {"prompt": "=", "factors": [10, 11]}, {"prompt": "=", "factors": [20, 21]})
    assert stepped(pool, second, ["420"], []).step.reward == 1
    elsewhere = EnvironmentCall(7, None, first.row, first.episode, first.step)
    assert stepped(pool, elsewhere, ["10*11", "110"], ["\n110\n"]).step.reward == 1


def test_an_error_of_the_environment_fails_the_trajectory_with_its_words(pool: EnvironmentPool, server: Served):
    (start,) = begun(pool, {"prompt": "="})
    failed = stepped(pool, start, ["fail"], [])
    assert f"the OpenEnv server {server.url} says: the environment is broken (EXECUTION_ERROR)" in failed.failure


def test_a_server_that_dies_fails_its_trajectories_and_serves_others_once_it_is_back(
    pool: EnvironmentPool, server: Served
):
    first, second = begun(pool, {"prompt": "="}, {"prompt": "="})
    died = stepped(pool, first, ["die"], [])
    assert "has ended the session" in died.failure
    server.start()
    lost = stepped(pool, second, ["2*3"], [])
    assert "has ended the session" in lost.failure, "a new session would be another environment"
    assert stepped(pool, begun(pool, {"prompt": "="})[0], ["2*3"], []).step.observation == "\n6\n"
    server.kill()
    assert "has no session for the trajectory" in begun(pool, {"prompt": "="})[0].failure


def test_a_trajectory_waits_for_a_session_of_a_full_server(pool: EnvironmentPool):
    rows = [{"prompt": "=", "factors": [10, i]} for i in range(6)]
    calls = [EnvironmentCall(i, None, row, Episode("=")) for i, row in enumerate(rows)]
    for call in calls:
        pool.submit(call)
    first = answered(pool, [], 4)
    for call in first:
        pool.drop(call.number)
    rest = answered(pool, [], 2)
    assert not any(call.failure for call in (*first, *rest)) and len({call.number for call in (*first, *rest)}) == 6


def test_a_server_that_stays_full_says_so(pool: EnvironmentPool):
    calls = begun(pool, *[{"prompt": "="}] * 5)
    assert sorted(bool(call.failure) for call in calls) == [False] * 4 + [True]
    assert "CAPACITY_REACHED" in next(call.failure for call in calls if call.failure)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "http://"])
def test_an_address_has_to_be_one(url: str):
    with pytest.raises(SettingError, match=f"^environment.path: openenv:{url} needs an address"):
        OpenEnvServer(url, 1)


def test_what_does_not_answer_as_an_openenv_server_is_told(server: Served):
    server.kill()
    with pytest.raises(SettingError, match="environment.path: .* does not answer as an OpenEnv server: .*refused"):
        OpenEnvServer(server.url, 1).read_form()
    with answering(lambda number, body: (200, {})) as other, pytest.raises(SettingError, match="does not answer as an"):
        OpenEnvServer(other.url, 1).read_form()


TOKEN = "sesame-of-the-server"


def test_a_server_that_demands_a_token_gets_the_one_that_the_address_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SERVER_TOKEN", TOKEN)
    with serving(tmp_path, PRODUCTS, "4") as server:
        monkeypatch.delenv("SERVER_TOKEN")
        path = f"openenv:{server.url}#key=ENV_KEY"
        with pytest.raises(SettingError, match=r"^environment.path: .*the environment variable ENV_KEY is not set"):
            OpenEnvServer(path.removeprefix("openenv:"), 5)
        for key, told in (("wrong", "Unauthorized"), ("ke\ny", "printable ASCII")):
            monkeypatch.setenv("ENV_KEY", key)
            with pytest.raises(SettingError, match=told) as caught:
                OpenEnvServer(path.removeprefix("openenv:"), 5).read_form()
            assert key not in str(caught.value)
        monkeypatch.setenv("ENV_KEY", TOKEN)
        pool = EnvironmentPool(EnvironmentSettings(path=path, timeout_s=5)).start()
        try:
            (start,) = begun(pool, {"prompt": "=", "factors": [12, 11]})
            assert stepped(pool, start, ["132"], []).step.reward == 1
            server.kill()
            lost = begun(pool, {"prompt": "="})[0]
            assert "has no session for the trajectory" in lost.failure and TOKEN not in lost.failure
        finally:
            pool.close()


def test_a_key_is_not_sent_where_a_server_redirects(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ENV_KEY", TOKEN)
    with (
        answering(lambda number, body: (200, {})) as other,
        answering(lambda number, body: (302, {}, {"Location": f"{other.url}/schema"})) as server,
        pytest.raises(SettingError, match="does not answer as an OpenEnv server"),
    ):
        OpenEnvServer(f"{server.url}#key=ENV_KEY", 5).read_form()
    assert server.headers[0]["Authorization"] == f"Bearer {TOKEN}"
    assert other.paths == ["/schema"] and "Authorization" not in other.headers[0]
