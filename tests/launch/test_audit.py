"""The audit of a run replays its journal and prints the account, or the line that does not verify."""

from pathlib import Path

import pytest

from headrace.comm.messages import GroupId
from headrace.launch.audit import main
from headrace.relay.journal import events as ev
from headrace.relay.journal.journal import Journal


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with one group, of which one row failed and one is leased."""
    journal, group = Journal(tmp_path / "journal.jsonl"), GroupId(0, 3)
    journal.append(ev.Opened(epoch=1, samples_per_prompt=2))
    journal.append(ev.Leased(group=group, samples=[0, 1], attempt=1, version=0, holder="rollout-0"))
    journal.append(ev.RowFailed(row=group.row(0), reason="the verifier hung"))
    journal.close()
    return tmp_path


def test_the_account_of_a_run_is_printed(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "leased=2 trained=0 evicted=0 filtered=0 failed=1 in_flight=1 holds=True" in out
    assert "to {'rollout-0': 2}" in out and "1 x failed: the verifier hung" in out


def test_an_illegal_event_is_named_with_its_line(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    with (run_dir / "journal.jsonl").open("ab") as file:
        file.write(b'{"event":"Trained","step":4}\n')
    assert main([str(run_dir)]) == 1
    assert "journal.jsonl:4: step 4" in capsys.readouterr().err


def test_an_audit_without_a_run_prints_its_usage(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert "arguments are required: RUN; --help lists the options" in capsys.readouterr().err


def test_help_and_a_folder_without_a_run_are_no_errors_of_a_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: ")
    assert main([str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err == f"headrace: error: {tmp_path} is not the folder of a run: it has no journal.jsonl\n"
    )
