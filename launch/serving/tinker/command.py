"""`headrace tinker`: answers the Tinker API with a model that clients train and sample, without a run."""

import argparse
import socket
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from ....comm.errors import SettingError
from ....rollout.serving.access import KEY_VARIABLE, api_keys
from ...command_line import CommandParser, exit_code
from ..restarted import inherited_socket, serve_restarted, tell_ready
from ..served_model import in_url, read_served, until_interrupted
from .store import make_folder

KEY_PREFIX = "tml-"
"""How the SDK wants keys to begin."""
_EFFECTIVE = (
    "generator.",
    "model.dtype=",
    "optimizer.micro_tokens=",
    "checkpoint.every=",
    "trainer.activation_checkpointing=",
)
"""Settings that have an effect on a server."""
_PAGE = f"""\
Answers the Tinker API (SDK 0.38) with a model that clients train and sample, until Ctrl-C.

usage: headrace tinker MODEL [KEY=VALUE ...] [OPTIONS]

MODEL is a run folder (its newest checkpoint), a checkpoint, a model in Hugging Face format, a name on the Hub, or a recipe (the
model that its run begins with). KEY=VALUE are settings of generator, model.dtype, optimizer.micro_tokens and checkpoint.every:

    headrace tinker Qwen/Qwen3-0.6B
    TINKER_BASE_URL=http://127.0.0.1:8010 TINKER_API_KEY={KEY_PREFIX}none python my_script.py

  --host ADDRESS   the address to listen on, by default 127.0.0.1; beyond this machine only with a key
  --port PORT      by default 8010; 0 takes a free one
  --api-key KEY    a key that requests must show, may be repeated; it begins with {KEY_PREFIX}; better set {KEY_VARIABLE}
  --name NAME      the model's name for clients (base_model), by default MODEL
  --dir FOLDER     where clients' saved weights are, and what a server that is started again goes on with; by default runs/tinker
  --full           train all weights; without it the adapter (LoRA) that a client asks for
  --models N       models in training at a time, by default 1; each takes the memory of a trainer

Exit codes: 0 after Ctrl-C or SIGTERM, 2 for a mistake.
"""


def main(words: Sequence[str]) -> int:
    """Serve the model that the words name; returns the exit code."""
    parser = CommandParser("tinker", page=lambda: _PAGE)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8010)
    parser.add_argument("--api-key", action="append", default=[])
    parser.add_argument("--name")
    parser.add_argument("--dir", default="runs/tinker")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--models", type=int, default=1)
    return exit_code(lambda: _serve(parser.parse_intermixed_args(words), words))


def _serve(given: argparse.Namespace, words: Sequence[str]) -> int | None:
    """Serve, in a child of this process that is started again when it has crashed."""
    from ...config.checks.serving import check_packages

    if (opened := inherited_socket()) is not None:
        until_interrupted("actor", lambda: _run(given, opened))
        return 0
    check_packages("headrace tinker")
    if given.models < 1:
        raise SettingError(f"--models must be at least 1, not {given.models}")
    from ....rollout.serving.access import Access
    from ....rollout.serving.server import listen

    read_served(given.words, _EFFECTIVE)
    Access(given.host, _keys(given.api_key))
    make_folder(Path(given.dir))
    with closing(listen(given.host, given.port)) as listening:
        return serve_restarted("tinker", words, listening)


def _run(given: argparse.Namespace, opened: socket.socket) -> None:
    from ....comm.disk import say
    from .server import TinkerOptions, TinkerServer

    word, model, recipe = read_served(given.words, _EFFECTIVE)
    keys = _keys(given.api_key)
    options = TinkerOptions(
        given.name or word, Path(given.dir), given.host, given.port, keys, given.full, given.models, opened
    )
    say(f"loading {model.path}")
    with closing(TinkerServer(recipe, options)) as server:
        server.start()
        say(f"base_model {options.name!r}: {server.engine.description}")
        trains = "all weights" if options.is_full else "the adapters that clients ask for"
        say(f"context {server.engine.policy.context} tokens; trains {trains}; saved weights in {options.folder}")
        say(f"TINKER_BASE_URL=http://{in_url(given.host)}:{server.http.port}  (Ctrl-C ends it)")
        tell_ready()
        server.run()


def _keys(given: Sequence[str]) -> list[str]:
    keys = [*given, *api_keys()]
    if any(not key.startswith(KEY_PREFIX) for key in keys):
        raise SettingError(f"--api-key: a key of the Tinker SDK begins with {KEY_PREFIX}")
    return keys


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
