"""Runs one seat with the fake role program: ROLE-INDEX RUN_DIR [store] [shutdown seconds]."""

import sys
from pathlib import Path

from headrace.launch.config.load import read_recipe
from headrace.launch.placement import Placement
from headrace.launch.processes import supervisor as seat

name, run_dir, hosts_store, shutdown_s = sys.argv[1:]
fake = (sys.executable, str(Path(__file__).with_name("fake_role.py")))
role, _, index = name.partition("-")
recipe = read_recipe(None, [f"run.dir={run_dir}"])
place = Placement(role, int(index), host=0, slot=None)
programs = seat.ChildCommands(worker=fake, store=fake)
running = seat.Supervisor(
    recipe, place, 3, hosts_store=hosts_store == "store", commands=programs, shutdown_s=float(shutdown_s)
)
sys.exit(running.run())
