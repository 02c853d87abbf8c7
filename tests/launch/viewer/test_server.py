"""The server of `headrace view` reads one run folder while it grows, and answers nobody else."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote

import pytest
from support.viewed_run import PATIENCE_S, fetch, sample, serve, with_call, write_metrics, write_samples

from headrace.launch.command import main
from headrace.launch.report.viewer import sample_index
from headrace.launch.report.viewer.sample_index import COLUMNS, Gone, SampleIndex


def rows_of(index: SampleIndex, first: int = 0, generation: int = 0) -> list[dict[str, object]]:
    found = index.rows(first, generation)
    return [dict(zip(COLUMNS, json.loads(row), strict=True)) for row in found.rows]


@pytest.fixture
def index(tmp_path: Path):
    index = SampleIndex(tmp_path / "samples.jsonl")
    yield index
    index.close()


def test_the_list_has_the_figures_of_each_sample_and_its_first_call(tmp_path: Path, index: SampleIndex):
    assert rows_of(index) == []
    write_samples(tmp_path, [sample(1, 3, prompt="x" * 200 + "12:"), with_call(1, 4, "37*4", "148", "148")])
    first, second = rows_of(index)
    assert (first["step"], first["sample"], first["reward"], first["length"], first["calls"]) == (1, 3, 0.75, 8, 0)
    assert str(first["prompt"]).endswith("xx12:") and len(str(first["prompt"])) == 120
    assert (second["call"], second["turns"], second["failed"]) == ("calc(37*4) → 148", 2, 0)


def test_a_file_that_grows_is_read_from_where_it_was_and_half_a_line_waits(tmp_path: Path, index: SampleIndex):
    write_samples(tmp_path, [sample(1, number) for number in range(3)])
    generation = index.rows(0, 0).generation
    with (tmp_path / "samples.jsonl").open("a") as file:
        text = json.dumps(sample(2, 0))
        file.write(text[:40])
        file.flush()
        assert index.rows(3, generation).total == 3
        file.write(text[40:] + "\n")
    found = index.rows(3, generation)
    assert (found.generation, found.first, found.total, len(found.rows)) == (generation, 3, 4, 1)
    assert json.loads(index.line(3, generation)) == sample(2, 0)


def test_a_long_list_comes_in_parts(tmp_path: Path, index: SampleIndex, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sample_index, "MOST_ROWS", 2)
    write_samples(tmp_path, [sample(1, number) for number in range(5)])
    generation = index.rows(0, 0).generation
    assert [len(index.rows(first, generation).rows) for first in (0, 2, 4)] == [2, 2, 1]


@pytest.mark.parametrize("change", ["replaced", "cut and written again", "cut"])
def test_a_file_that_has_become_another_one_is_read_anew(tmp_path: Path, index: SampleIndex, change: str):
    path = tmp_path / "samples.jsonl"
    write_samples(tmp_path, [sample(step, 0) for step in (1, 2, 3)])
    generation = index.rows(0, 0).generation
    if change == "replaced":
        (tmp_path / "new").write_bytes(path.read_bytes())
        (tmp_path / "new").replace(path)
        expected = 3
    else:
        os.truncate(path, len(path.read_bytes().splitlines(keepends=True)[0]))
        expected = 1
        if change != "cut":
            write_samples(tmp_path, [sample(2, 5), sample(3, 5), sample(4, 5)])
            expected = 4
    if change == "cut":
        with pytest.raises(Gone):
            index.line(2, generation)
    found = index.rows(3, generation)
    assert (found.generation, found.first, found.total) == (generation + 1, 0, expected)
    with pytest.raises(Gone):
        index.line(0, generation)
    assert json.loads(index.line(expected - 1, generation + 1))["step"] == {3: 3, 1: 1, 4: 4}[expected]


def test_the_search_finds_words_of_prompt_and_response_in_any_case(tmp_path: Path, index: SampleIndex):
    texts = [("Add 2 and 3", "ÄRGER"), ("sub", "five"), ("tokens", "x")]
    write_samples(
        tmp_path, [sample(1, n, prompt=prompt, response=response) for n, (prompt, response) in enumerate(texts)]
    )
    generation = index.rows(0, 0).generation
    assert [index.search(words, generation) for words in ("add 2", "ärger", "FIVE", "ids", "no")] == [
        [0],
        [0],
        [1],
        [],
        [],
    ]


def test_a_line_that_is_not_one_of_ours_is_left_out(tmp_path: Path, index: SampleIndex):
    write_samples(tmp_path, [sample(1, 0), {"step": 1}, sample(1, 1, turns=[{"calls": [{}]}]), sample(1, 2)])
    assert [row["sample"] for row in rows_of(index)] == [0, 2]


def test_metrics_come_from_where_the_last_answer_ended_and_what_is_not_finite_is_null(tmp_path: Path):
    write_samples(tmp_path, [])
    server = serve(tmp_path)
    assert json.loads(fetch(server, "metrics?first=0")) == {"first": 0, "next": 0, "lines": []}
    write_metrics(tmp_path, range(3))
    found = json.loads(fetch(server, "metrics?first=0"))
    assert [line["own/number"] for line in found["lines"]] == [0, None, 2]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3')
    assert json.loads(fetch(server, f"metrics?first={found['next']}"))["lines"] == []
    os.truncate(tmp_path / "metrics.jsonl", 0)
    write_metrics(tmp_path, range(1))
    assert [line["step"] for line in json.loads(fetch(server, f"metrics?first={found['next']}"))["lines"]] == [0]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", "", "[::1", "localhost.:1"]
)
def test_a_page_of_another_name_gets_no_answer(tmp_path: Path, host: str):
    write_samples(tmp_path, [])
    server = serve(tmp_path)
    with pytest.raises(HTTPError, match="403"):
        fetch(server, "rows", Host=host.format(port=server.server_port))


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:9999", "localhost", "127.0.0.1"])
def test_a_browser_of_this_machine_gets_the_page_also_through_a_forwarded_port(tmp_path: Path, host: str):
    write_samples(tmp_path, [])
    server = serve(tmp_path)
    assert b"<title>Headrace" in fetch(server, "", Host=host.format(port=server.server_port))


def test_nothing_is_answered_without_the_key_and_no_address_names_a_file(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").write_text("secret")
    write_samples(tmp_path / "run", [sample(1, 0)])
    server = serve(tmp_path / "run")
    root = f"http://127.0.0.1:{server.server_port}/"
    for path in ("", "rows", f"{server.key}x/rows", "a" * len(server.key) + "/rows"):
        with pytest.raises(HTTPError, match="403"):
            fetch(type("At", (), {"address": root})(), path)  # pyright: ignore[reportArgumentType]
    for path in (
        "config.yaml",
        "../secret",
        "..%2fsecret",
        "samples.jsonl",
        "rows/../../secret",
        quote("//etc/passwd"),
    ):
        with pytest.raises(HTTPError, match="404"):
            fetch(server, path)
    for path in ("sample?number=x&generation=1", "sample", "search?generation=1", "rows?first=a"):
        with pytest.raises(HTTPError, match="400"):
            fetch(server, path)
    with pytest.raises(HTTPError, match="409"):
        fetch(server, "sample?number=-1&generation=1")


def test_a_link_to_a_file_elsewhere_is_not_followed(tmp_path: Path):
    (tmp_path / "run").mkdir()
    for name in ("samples.jsonl", "metrics.jsonl"):
        (tmp_path / name).write_text(json.dumps(sample(1, 0)) + "\n")
        (tmp_path / "run" / name).symlink_to(tmp_path / name)
    server = serve(tmp_path / "run")
    assert json.loads(fetch(server, "rows"))["total"] == 0
    assert json.loads(fetch(server, "metrics"))["lines"] == []


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_samples(tmp_path, [])
    for name in ("samples.jsonl", "metrics.jsonl"):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
    server = serve(tmp_path)
    assert json.loads(fetch(server, "rows"))["total"] == 0
    assert json.loads(fetch(server, "metrics"))["lines"] == []
    assert main(["view", str(tmp_path)]) == 2
    (tmp_path / "samples.jsonl").unlink()
    (tmp_path / "samples.jsonl").symlink_to(tmp_path / "elsewhere")
    assert main(["view", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("samples.jsonl is not a regular file, and links are not followed") == 2


def test_an_address_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_samples(tmp_path, [])
    server = serve(tmp_path)
    with socket.create_connection(("127.0.0.1", server.server_port), PATIENCE_S) as raw:
        raw.sendall(f"GET http://[ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 400")
    assert "Traceback" not in capsys.readouterr().err


def test_only_this_machine_can_connect(tmp_path: Path):
    write_samples(tmp_path, [])
    server = serve(tmp_path)
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_the_command_prints_its_address_and_ends_at_ctrl_c(tmp_path: Path):
    write_samples(tmp_path, [])
    words = [sys.executable, "-m", "headrace", "view", str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        line = viewer.stdout.readline()
        assert line.startswith(f"{tmp_path}: http://127.0.0.1:")
        viewer.send_signal(signal.SIGINT)
        rest, errors = viewer.communicate(timeout=PATIENCE_S)
    assert (viewer.returncode, rest.strip(), errors) == (0, "", "")


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["view", str(tmp_path)]) == 2
    assert "is not the folder of a run: it has no config.yaml" in capsys.readouterr().err
    write_samples(tmp_path, [])
    assert main(["view", str(tmp_path), "--port=70000"]) == 2
    assert "--port=70000 is not a port" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", str(tmp_path), f"--port={port}"]) == 2
    assert f"--port={port}: Address already in use" in capsys.readouterr().err
