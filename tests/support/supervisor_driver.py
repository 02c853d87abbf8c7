"""Runs one supervisor with the fake role program: ROLE-INDEX RUN_DIR ADDRESS|store SHUTDOWN_SECONDS [SETTING=VALUE ...].

With `store` the supervisor starts the fake store itself; else there is one at the address.

HEADRACE_CONDITIONS is JSON: `fail_starts`, the numbers of the processes whose start fails, from 1 on; `restart_window_s`;
`num_threads`; `config`, the recipe in the run folder; `keeps_others`, as of the supervisor; `joined`, whether its host has joined a running job; `counter`, the file in place of the kernel's counters; `cgroup`, the folder of the cgroup in which all of it runs.
"""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from headrace.comm.environment import environment_of_threads
from headrace.launch.config.hosts import JOINED_HOST
from headrace.launch.config.load import read_recipe
from headrace.launch.placement import Placement
from headrace.launch.processes import exits as exits_module
from headrace.launch.processes import supervisor as supervisor_module
from headrace.launch.processes.memory_kill import MemoryKills
from headrace.launch.processes.supervisor import ChildCommands, Supervisor

conditions = json.loads(os.environ["HEADRACE_CONDITIONS"])
if "cgroup" in conditions:
    (Path(conditions["cgroup"]) / "cgroup.procs").write_text(str(os.getpid()))
if "restart_window_s" in conditions:
    supervisor_module.RESTART_WINDOW_S = exits_module.RESTART_WINDOW_S = conditions["restart_window_s"]
real_start, num_starts = subprocess.Popen, 0


def start(*words: Any, **named: Any) -> subprocess.Popen[bytes]:
    global num_starts
    num_starts += 1
    if num_starts in conditions.get("fail_starts", ()):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return real_start(*words, **named)


subprocess.Popen = start
name, run_dir, store, shutdown_s, *settings = sys.argv[1:]
fake = (sys.executable, str(Path(__file__).with_name("fake_role.py")))
role, _, index = name.partition("-")
recipe = read_recipe(None, [f"run.dir={run_dir}", "checkpoint.grace_s=0", *settings])
placement = Placement(role, int(index), host=JOINED_HOST if conditions.get("joined") else 0, slot=None)
commands = ChildCommands(worker=fake, store=fake)
supervisor = Supervisor(
    recipe,
    placement,
    3,
    hosts_store=store == "store",
    store_address="" if store == "store" else store,
    commands=commands,
    shutdown_s=float(shutdown_s),
)
if "counter" in conditions:
    supervisor.kills = MemoryKills({Path(conditions["counter"]): "oom_kill"})
supervisor.keeps_others = conditions.get("keeps_others", False)
supervisor.computing = environment_of_threads(conditions.get("num_threads", 1))
sys.exit(supervisor.run())
