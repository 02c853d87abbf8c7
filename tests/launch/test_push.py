"""`headrace push`: the calls to the Hub, and one line for each thing that can go wrong. A stand-in takes the place of the Hub."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from headrace.launch.push import main
from headrace.launch.report.upload import real_hub
from headrace.relay.checkpoints import CheckpointFolder


class Repository(str):
    """The address of a repository, as huggingface_hub's `RepoUrl`."""

    repo_id = "user/model"


class StandIn:
    """Has the repositories of a user, and keeps what is uploaded."""

    def __init__(self, existing: bool | None = None, error: Exception | None = None) -> None:
        """existing: whether the repository that exists is private; None without one. error: of every upload."""
        self.existing = existing
        self.error = error
        self.made: list[tuple[str, bool | None]] = []
        self.uploads: list[tuple[str, dict[str, str]]] = []
        self.message = ""

    def create_repo(self, repo_id: str, *, private: bool | None = None, exist_ok: bool = False) -> Any:
        if self.existing is not None and not exist_ok:
            raise refusal(409)
        self.made.append((repo_id, private))
        return Repository("https://hub/user/model")

    def repo_info(self, repo_id: str) -> Any:
        return SimpleNamespace(private=self.existing)

    def upload_folder(self, *, repo_id: str, folder_path: str | Path, commit_message: str | None = None) -> Any:
        if self.error is not None:
            raise self.error
        files = {path.name: path.read_text() for path in Path(folder_path).iterdir()}
        self.uploads.append((repo_id, files))
        self.message = commit_message or ""


def refusal(status: int, reason: str | None = None) -> HfHubHTTPError:
    """The error of a Hub that answers with this status, and perhaps a reason."""
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError(f"status {status}\nmore", response=response, server_message=reason)


@pytest.fixture
def run(run_dir: Path) -> Path:
    """A run with a checkpoint after 3 steps, with an adapter, and nothing of its recipe."""
    for name, config in (("hf", "config.json"), ("adapter", "adapter_config.json")):
        folder = run_dir / "checkpoints" / "step_3" / name
        folder.mkdir(parents=True)
        (folder / config).write_text("{}")
    CheckpointFolder(run_dir).seal(3)
    return run_dir


def test_the_model_of_a_run_is_uploaded_with_a_card_under_its_name(run: Path, capfd: Any):
    hub = StandIn()
    assert main([str(run), "model"], hub) == 0
    ((repo_id, files),) = hub.uploads
    assert repo_id == "user/model", "the Hub's answer has the user's name"
    assert files.keys() == {"config.json", "README.md"}
    assert "# user/model" in files["README.md"]
    assert hub.made == [("model", None)] and "for 3 steps" in hub.message
    assert "https://hub/user/model has" in capfd.readouterr().out


def test_an_adapter_is_uploaded_alone_and_privately_where_asked(run: Path, capfd: Any):
    base = run / "base"
    base.mkdir()
    config = run / "checkpoints" / "step_3" / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": str(base)}))
    hub = StandIn()
    assert main([str(run), "user/model", "--adapter", "--private"], hub) == 0
    assert hub.uploads[0][1].keys() == {"adapter_config.json", "README.md"}
    assert hub.made == [("user/model", True)]
    assert (
        f"warning: adapter_config.json names the base model by a folder of this machine, {base}"
        in capfd.readouterr().err
    )


def test_an_existing_repository_gets_a_commit_only_where_asked(run: Path, capfd: Any):
    hub = StandIn(existing=True)
    assert main([str(run), "user/model"], hub) == 2
    assert "user/model exists already on the Hub" in capfd.readouterr().err and not hub.uploads
    assert main([str(run), "user/model", "--update"], hub) == 0
    assert len(hub.uploads) == 1
    public = StandIn(existing=False)
    assert main([str(run), "user/model", "--update", "--private"], public) == 2
    assert "--private: user/model exists and is public" in capfd.readouterr().err and not public.uploads


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (refusal(401), 2, "the Hub does not accept the token"),
        (refusal(403), 2, "the token may not write to user/model"),
        (refusal(404), 2, "no user or organization for user/model"),
        (refusal(413), 2, "the Hub refuses user/model: status 413"),
        (refusal(400, "Invalid name\nmore"), 2, "the Hub refuses user/model: Invalid name\n"),
        (refusal(503), 1, "cannot be reached: status 503; --update continues the upload"),
        (OfflineModeIsEnabled("offline mode is enabled."), 1, "cannot be reached: offline mode is enabled"),
        (ConnectionResetError("reset"), 1, "cannot be reached: reset"),
        (FileNotFoundError(2, "No such file", "model.safetensors"), 2, "hf cannot be uploaded: [Errno 2] No such file"),
    ],
    ids=lambda value: str(value).splitlines()[0],
)
def test_an_error_of_the_hub_is_one_line(run: Path, error: Exception, code: int, message: str, capfd: Any):
    assert main([str(run), "user/model"], StandIn(error=error)) == code
    text = capfd.readouterr().err
    assert message in text and text.count("\n") == 1 and text.startswith("headrace: error: ")


def test_before_the_repository_is_made_there_is_no_upload_to_continue(run: Path, capfd: Any):
    hub = StandIn()
    hub.create_repo = lambda *_, **__: (_ for _ in ()).throw(OfflineModeIsEnabled("offline"))
    assert main([str(run), "user/model"], hub) == 1
    error = capfd.readouterr().err
    assert error.startswith("headrace: error: the Hub at ") and error.endswith(" cannot be reached: offline\n")


def test_a_recipe_of_another_version_leaves_the_card_as_it_is(run: Path, capfd: Any):
    (run / "config.yaml").write_text("foo: {bar: 1}\n")
    hub = StandIn()
    assert main([str(run), "user/model"], hub) == 0
    assert hub.uploads[0][1].keys() == {"config.json"}
    warning = f"headrace: warning: the model card is not written: {run / 'config.yaml'}: unknown setting 'foo"
    assert capfd.readouterr().err.startswith(warning)


def test_damaged_weights_are_refused_before_the_hub_is_asked(run: Path, capfd: Any):
    hf = run / "checkpoints" / "step_3" / "hf"
    weights = hf / "model.safetensors"
    weights.write_text("weights")
    CheckpointFolder(run).seal(3)
    (hf / "config.json").write_text('{"mine": 1}')
    hub = StandIn()
    assert main([str(run), "user/model"], hub) == 0, "the user may change other files"
    weights.write_text("weighty")
    assert main([str(run), "user/model"], hub) == 2
    assert "step_3 has a damaged hf/model.safetensors: its digest is wrong; take another" in capfd.readouterr().err
    assert len(hub.made) == 1


def test_within_its_folder_a_model_is_that_of_its_run(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(run / "checkpoints" / "step_3" / "hf")
    hub = StandIn()
    assert main([".", "user/model", "--adapter"], hub) == 0
    assert "for 3 steps" in hub.message and "adapter_config.json" in hub.uploads[0][1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN"], "required: NAME; --help lists the options"),
        (["RUN", "user/model", "more"], "one word too many: more"),
        (["RUN", "a/b/c"], "'a/b/c' is not a name of the Hub"),
        (["RUN", "user/model", "--pirvate"], "unknown option --pirvate, the nearest is --private"),
        (["RUN/none", "user/model"], "run/none does not exist"),
        (["RUN/checkpoints/step_3/adapter", "user/model", "--adapter"], ""),
    ],
)
def test_a_mistake_in_the_words_is_one_line(run: Path, words: list[str], message: str, capfd: Any):
    hub = StandIn()
    assert main([word.replace("RUN", str(run)) for word in words], hub) == (2 if message else 0)
    assert message in capfd.readouterr().err
    assert bool(hub.uploads) == (not message)


def test_a_run_without_an_adapter_has_none_to_upload(run: Path, capfd: Any):
    adapter = run / "checkpoints" / "step_3" / "adapter"
    (adapter / "adapter_config.json").unlink()
    adapter.rmdir()
    assert main([str(run), "user/model", "--adapter"], StandIn()) == 2
    assert "--adapter: " in capfd.readouterr().err


def test_without_a_token_the_hub_is_not_asked(run: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert main([str(run), "user/model"]) == 2
    assert "the Hub wants a token: `hf auth login` stores one, or set HF_TOKEN" in capfd.readouterr().err
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_secreté")
    assert main([str(run), "user/model"]) == 2
    error = capfd.readouterr().err
    assert "the token of the Hub has a character that none has" in error and "secret" not in error
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_token")
    assert isinstance(real_hub(), HfApi)


def test_ctrl_c_ends_an_upload_with_130(run: Path):
    hub = StandIn()
    hub.upload_folder = lambda **_: (_ for _ in ()).throw(KeyboardInterrupt)
    assert main([str(run), "user/model"], hub) == 130
