"""The start of a process that runs the user's code: rewards, environments and tools."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from ..comm.environment import environment_of_users_code


def start_users_process(module: str, settings: Mapping[str, object]) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE SETTINGS PARENT` in a session of its own, without the run's secrets in its environment.

    Questions go to its standard input, which does not block; answers come from its standard output. Raises OSError if the machine
    has no more processes, memory or files at this moment.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(settings), str(os.getpid())],
        env=environment_of_users_code(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return process
