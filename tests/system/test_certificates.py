"""Whole runs in memory whose rows and answers `headrace audit` compares with the journal: true ones, and forged ones."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.agent import AgentClient
from support.agent_run import TEXT, AgentRun, two_turns

pytest.importorskip("uvicorn")
from support.closing import at_end

from headrace.launch.audit import main
from headrace.launch.config.run_checkpoints import TrainedModel
from headrace.relay.journal.events import Published
from headrace.relay.queue.row_file import RowFile, write_rows
from headrace.relay.receipts import KEY_FILE, open_key
from headrace.rollout.serving import run_front
from headrace.rollout.serving.local_server import LocalServer, ServeOptions
from headrace.trainer.step_log import SavedStep

IDS = "/inference/v1/generate"
BODY = {"prompt": [5, 6, 7, 8], "max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}


class Audited:
    """A run that has ended, and answers that its clients have kept."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.answers: list[dict[str, Any]] = []
        self._lines = folder / "answers.jsonl"
        self.system = AgentRun(
            folder, **{"run.save_rows": "all", "sampling.max_new_tokens": 20, "optimizer.lr": 1e-3} | settings
        )
        self.dir = self.system.dir
        self.system.start_all(2)
        self.system.start("front", run_front.run)
        agents = self.system.agents(self.play)
        self.summary = self.system.wait()
        agents.stop()
        assert not agents.problems, agents.problems
        self.ends = agents.ended

    def play(self, client: AgentClient, claimed: Any) -> dict[str, Any]:
        """Two turns of a conversation, and beside it requests that are not trained."""
        outcome = two_turns(client, claimed)
        plain = client.ask(TEXT, {**BODY, "n": 2})
        ids = client.ask(IDS, {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}})
        short = client.ask(TEXT, {"prompt": "ab", "max_tokens": 3})
        self.answers += [reply.body for reply in (plain, ids, short) if reply.status == 200]
        return outcome

    def audit(self, *answers: Any) -> int:
        """The exit code for these answers, kept as lines."""
        self._lines.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
        return main([str(self.dir), "--answers", str(self._lines)])


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    return Audited(tmp_path_factory.mktemp("audited"))


def test_rows_and_answers_of_a_run_are_those_of_its_journal(audited: Audited, capsys: pytest.CaptureFixture[str]):
    digests = {event.version: event.digest for event in audited.system.events() if isinstance(event, Published)}
    assert len(digests) > 2 and len(audited.answers) > 10 and len(audited.ends) >= 16
    for answer in audited.answers:
        for choice in answer["choices"]:
            used = {*choice["weight_version"]}
            assert choice["weight_digests"] == {str(version): digests[version] for version in sorted(used)}
    assert audited.audit(*audited.answers, *audited.ends) == 0
    num = sum(len(answer["choices"]) for answer in audited.answers) + len(audited.ends)
    assert f"{num} of {num} answers are those of {audited.dir}" in capsys.readouterr().out
    assert main([str(audited.dir), "--rows"]) == 0
    assert "16 of 16 saved rows are those of the journal" in capsys.readouterr().out
    rows = RowFile(next((audited.dir / "rows").glob("step_*")), SavedStep).read()
    for columns in rows.values():
        found = json.loads(columns["weight_digests"].tobytes())
        assert found == {str(version): digests[version] for version in np.unique(columns["versions"]).tolist()}


def change_token(choice: dict[str, Any]) -> None:
    choice["token_ids"][1] += 1


def change_prompt(choice: dict[str, Any]) -> None:
    choice["prompt_token_ids"][0] += 1


def change_version(choice: dict[str, Any]) -> None:
    choice["weight_version"][0] = 777


def change_digest(choice: dict[str, Any]) -> None:
    for version in choice["weight_digests"]:
        choice["weight_digests"][version] = "0" * 32


def change_text(choice: dict[str, Any]) -> None:
    choice["text"] += "!"


def change_logprob(choice: dict[str, Any]) -> None:
    choice["logprobs"]["token_logprobs"][0] -= 0.01


def drop_receipt(choice: dict[str, Any]) -> None:
    del choice["receipt"]


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        (change_token, "its tokens are not those of its receipt"),
        (change_prompt, "the tokens of its prompt are not those of its receipt"),
        (change_version, "the run has published no version 777"),
        (change_digest, f"in the journal, not {'0' * 32}"),
        (change_text, "its seal is another one"),
        (change_logprob, "its seal is another one"),
        (drop_receipt, "it has no receipt"),
    ],
)
def test_a_forged_answer_is_told_with_what_is_wrong(
    audited: Audited, capsys: pytest.CaptureFixture[str], forge: Callable[[dict[str, Any]], None], said: str
):
    true, other = [json.dumps(answer) for answer in audited.answers if len(answer["choices"]) == 2][:2]
    forged = json.loads(true)
    forge(forged["choices"][1])
    assert audited.audit(forged, json.loads(other)) == 1
    found = capsys.readouterr()
    (line,) = found.err.splitlines()
    assert f"response 1 of {forged['id'].partition('-')[2]}: " in line and said in line
    assert "3 of 4 answers are those of" in found.out


def test_a_version_that_the_run_has_but_did_not_use_is_told(audited: Audited, capsys: pytest.CaptureFixture[str]):
    digests = {event.version: event.digest for event in audited.system.events() if isinstance(event, Published)}
    forged = json.loads(json.dumps(audited.answers[0]))
    choice = forged["choices"][0]
    version = next(version for version in digests if version not in choice["weight_version"])
    choice["weight_version"][-1] = version
    assert audited.audit(forged) == 1
    assert f"it has no digest of version {version}" in capsys.readouterr().err
    choice["weight_digests"][str(version)] = digests[version]
    assert audited.audit(forged) == 1
    assert "its seal is another one: versions" in capsys.readouterr().err


def test_a_changed_end_of_a_conversation_is_told(audited: Audited, capsys: pytest.CaptureFixture[str]):
    end = audited.ends[0]
    for change in (
        {"reward": end["reward"] + 0.5},
        {"drawn_tokens": 1},
        {"sample": 1 - end["sample"]},
        {"status": "failed"},
    ):
        assert audited.audit({**end, **change}, end) == 1
        found = capsys.readouterr()
        assert f"end of {end['id']}: its seal is another one: the reward" in found.err and "1 of 2 answers" in found.out


@pytest.mark.parametrize(
    "column", ["response_ids", "versions", "weight_digests", "reward", "rollout_logprobs", "loss_mask"]
)
def test_a_changed_row_is_told(audited: Audited, capsys: pytest.CaptureFixture[str], column: str):
    path = min((audited.dir / "rows").glob("step_*"))
    before = path.read_bytes()
    file = RowFile(path, SavedStep)
    rows = {key: {name: c.copy() for name, c in columns.items()} for key, columns in file.read().items()}
    key = next(iter(rows))
    changed = rows[key][column]
    if column == "weight_digests":
        changed[-3] = ord("f") if changed[-3] != ord("f") else ord("e")
    else:
        changed[-1] = 1 - changed[-1] if column == "loss_mask" else changed[-1] + 1
    said = {"reward": "its reward is", "versions": "digest of version", "weight_digests": "in the journal, not"}
    try:
        write_rows(path, rows, file.listed)
        assert main([str(audited.dir), "--rows"]) == 1
    finally:
        path.write_bytes(before)
    found = capsys.readouterr()
    (line,) = found.err.splitlines()
    assert line.startswith(f"{path.name}: row {key}: ") and said.get(column, "its columns are not those") in line
    assert "15 of 16 saved rows" in found.out


def test_the_last_checkpoint_answers_with_the_digest_of_the_journal(audited: Audited, tmp_path: Path):
    model = TrainedModel.find(str(audited.dir))
    recipe = audited.system.recipe
    recipe = replace(recipe, model=replace(recipe.model, path=model.path))
    server = LocalServer(recipe, model.step, ServeOptions("mine", receipt_key=open_key(audited.dir)))
    at_end(server.close)
    server.start()
    is_over = threading.Event()
    worker = threading.Thread(target=server.run, args=[is_over.is_set], daemon=True)
    worker.start()
    reply = AgentClient(server.http.port).ask(TEXT, BODY)
    is_over.set()
    worker.join()
    digests = {event.version: event.digest for event in audited.system.events() if isinstance(event, Published)}
    assert reply.body["choices"][0]["weight_digests"] == {str(model.step): digests[model.step]}
    assert audited.audit(reply.body) == 0


def test_files_that_have_no_answers_are_named(audited: Audited, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "other.json"
    for text, said in (("", "has no answer"), ("[1]", "something else"), ("{", "something else")):
        file.write_text(text)
        assert main([str(audited.dir), "--answers", str(file)]) == 2
        assert said in capsys.readouterr().err
    key = (audited.dir / KEY_FILE).rename(tmp_path / "key")
    try:
        assert audited.audit(*audited.answers) == 2
        assert "receipt_key cannot be read" in capsys.readouterr().err
    finally:
        key.rename(audited.dir / KEY_FILE)
