"""Runs one supervisor with the fake role program: ROLE-INDEX RUN_DIR STORE|- SHUTDOWN_SECONDS SPARE_AFTER_SECONDS [SETTING=VALUE ...]."""

import sys
from pathlib import Path

from headrace.launch.config.load import read_recipe
from headrace.launch.placement import Placement
from headrace.launch.processes.secret import create_secret
from headrace.launch.processes.supervisor import ChildCommands, Supervisor

name, run_dir, hosts_store, shutdown_s, spare_after_s, *settings = sys.argv[1:]
fake = (sys.executable, str(Path(__file__).with_name("fake_role.py")))
role, _, index = name.partition("-")
recipe = read_recipe(None, [f"run.dir={run_dir}", "checkpoint.grace_s=0", *settings])
create_secret(Path(run_dir))
placement = Placement(role, int(index), host=0, slot=None)
commands = ChildCommands(worker=fake, store=fake)
supervisor = Supervisor(
    recipe,
    placement,
    3,
    hosts_store=hosts_store == "store",
    commands=commands,
    shutdown_s=float(shutdown_s),
    spare_after_s=float(spare_after_s),
)
sys.exit(supervisor.run())
