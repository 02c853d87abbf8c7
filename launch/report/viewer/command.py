"""`headrace view RUN`: serves the page of a run until Ctrl-C."""

import sys
from collections.abc import Sequence
from pathlib import Path

from ....comm.errors import SettingError
from ....trainer.record.samples_file import SAMPLES_FILE
from ...command_line import CommandParser, exit_code
from ...config.run_folder import CONFIG_FILE, METRICS_FILE


def main(words: Sequence[str]) -> int:
    """Returns the exit code: 0 after Ctrl-C, 2 for a mistake."""
    parser = CommandParser(
        "view", "Shows the samples and metrics of a run on a page of this machine, also while it trains."
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument("--port", type=int, default=0, metavar="PORT", help="of 127.0.0.1; by default a free one")
    return exit_code(lambda: _view(parser, words))


def _view(parser: CommandParser, words: Sequence[str]) -> None:
    given = parser.parse_args(words)
    folder = Path(given.run).absolute()
    if not (folder / CONFIG_FILE).is_file():
        raise SettingError(f"{given.run} is not the folder of a run: it has no {CONFIG_FILE}")
    if not 0 <= given.port < 1 << 16:
        raise SettingError(f"--port={given.port} is not a port")
    for path in (folder / SAMPLES_FILE, folder / METRICS_FILE):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise SettingError(f"{path} is not a regular file, and links are not followed")
    from .server import open_server

    with open_server(folder, given.port) as server:
        try:
            print(f"{folder}: {server.address}  (Ctrl-C ends it)", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print(flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
