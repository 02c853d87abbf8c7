"""`headrace serve`: answers OpenAI's HTTP API with a model, without a run."""

import argparse
import json
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from ...comm.disk import say
from ...comm.errors import SettingError
from ...relay.receipts import open_key
from ...rollout.serving.access import KEY_VARIABLE, SERVE_FILE, api_keys
from ..command_line import CommandParser, exit_code
from ..config.run_folder import JOURNAL_FILE
from .served_model import in_url, read_served, until_interrupted

_EFFECTIVE = ("generator.", "model.dtype=", "data.chat_template=", "data.chat_template_kwargs=")
"""Settings that have an effect on a server."""
_HEALTH_S = 5.0
"""Longest time in which the front of a running job says that it answers."""
_PAGE = f"""\
Answers OpenAI's HTTP API with a model, until Ctrl-C.

usage: headrace serve MODEL [KEY=VALUE ...] [OPTIONS]

MODEL is a run folder (its newest checkpoint), a checkpoint, a model in Hugging Face format, a name on the Hub, or a recipe (the
model that its run begins with). Of a running job with rollout.serve the address is told. KEY=VALUE are settings of generator, model.dtype, data.chat_template and data.chat_template_kwargs:

    headrace serve runs/mine
    headrace serve MODEL --port 8001 generator.max_running=16
    {KEY_VARIABLE}=... headrace serve MODEL --host 0.0.0.0

  --host ADDRESS   the address to listen on, by default 127.0.0.1; beyond this machine only with a key
  --port PORT      by default 8000; 0 takes a free one
  --api-key KEY    a key that requests must show, may be repeated; better set {KEY_VARIABLE}, which other users do not see
  --name NAME      the model's name in requests, by default MODEL
  --timeout S      longest time of one request in seconds, by default 600

Exit codes: 0 after Ctrl-C or SIGTERM, 2 for a mistake.
"""


def main(words: Sequence[str]) -> int:
    """Serve the model that the words name; returns the exit code."""
    parser = CommandParser("serve", page=lambda: _PAGE)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key", action="append", default=[])
    parser.add_argument("--name")
    parser.add_argument("--timeout", type=float, default=600.0)
    return exit_code(lambda: _serve(parser.parse_intermixed_args(words)))


def _serve(given: argparse.Namespace) -> None:
    from ..config.checks.serving import check_packages

    if url := _url_of_run(given.words):
        say(f"the rollouts of this running job answer at {url}/v1 (rollout.serve)")
        return
    check_packages("headrace serve")
    if not 0 < given.timeout < float("inf"):
        raise SettingError(f"--timeout must be above 0, not {given.timeout:g}")
    until_interrupted("rollout", lambda: _run(given))


def _run(given: argparse.Namespace) -> None:
    from ...rollout.serving.local_server import LocalServer, ServeOptions

    word, model, recipe = read_served(given.words, _EFFECTIVE)
    keys = [*given.api_key, *api_keys()]
    key = _receipt_key(model.run_dir)
    options = ServeOptions(given.name or word, given.host, given.port, keys, given.timeout, key)
    say(f"loading {model.path}")
    with closing(LocalServer(recipe, model.step, options)) as server:
        server.start()
        steps = f", after {model.step} steps" if model.step else ""
        say(f"serving {options.name!r}{steps}: {server.engine.description}")
        say(f"context {server.engine.policy.context} tokens; {server.engine.scheduler.max_running} sequences at a time")
        say(f"http://{in_url(given.host)}:{server.http.port}/v1  (Ctrl-C ends it)")
        server.run()


def _receipt_key(run_dir: Path | None) -> bytes:
    """The key of the run that has trained the model; empty without such a run, or where its folder is another user's."""
    with suppress(OSError):
        if run_dir is not None and (run_dir / JOURNAL_FILE).is_file():
            return open_key(run_dir)
    return b""


def _url_of_run(words: Sequence[str]) -> str:
    """The address of the front of the running job that is named alone; empty without one that answers."""
    file = Path(words[0]) / SERVE_FILE if len(words) == 1 else None
    if file is None or not file.is_file():
        return ""
    with suppress(OSError, ValueError, KeyError):
        url = json.loads(file.read_text())["url"]
        with urllib.request.urlopen(f"{url}/health", timeout=_HEALTH_S) as answer:
            return url if answer.status == 200 else ""
    return ""  # the file of a run that was killed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
