"""`rollout.serve` is checked before a start."""

import pytest

from headrace.comm.errors import SettingError
from headrace.comm.recipe import Recipe, RolloutSettings, TrainerSettings
from headrace.launch.config.checks.serving import check_serve
from headrace.rollout.serving.access import KEY_VARIABLE


def recipe(serve: str, engine: str = "builtin") -> Recipe:
    return Recipe(rollout=RolloutSettings(serve=serve, engine=engine), trainer=TrainerSettings(engine=engine))


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.launch.config.checks.serving.find_spec", lambda name: object())
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def test_usual_addresses_pass():
    for serve in ("", "0", "8000", "localhost:0", "[::1]:8000"):
        check_serve(recipe(serve))


def test_an_address_beyond_this_machine_needs_a_key_in_the_environment(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingError, match=f"rollout.serve: 0.0.0.0: .*: set {KEY_VARIABLE}$"):
        check_serve(recipe("0.0.0.0:8000"))
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(SettingError, match=f"{KEY_VARIABLE}: a key has at least"):
        check_serve(recipe("0.0.0.0:8000"))
    monkeypatch.setenv(KEY_VARIABLE, "a-key-of-12-characters")
    check_serve(recipe("0.0.0.0:8000"))


def test_what_is_no_address_names_the_setting():
    with pytest.raises(SettingError, match="rollout.serve=here is neither PORT nor HOST:PORT"):
        check_serve(recipe("here"))


def test_emulated_devices_have_nothing_to_serve():
    with pytest.raises(SettingError, match="rollout.serve: emulated devices"):
        check_serve(recipe("0", "emulated"))


def test_without_the_extra_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.launch.config.checks.serving.find_spec", lambda name: None)
    with pytest.raises(
        SettingError, match=r"rollout.serve needs starlette and uvicorn: pip install 'headrace\[serve\]'"
    ):
        check_serve(recipe("0"))
