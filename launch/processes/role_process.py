"""The process of one role: it joins the fleet, runs the role, and reports an error to the hub. A supervisor starts it.

    python -m headrace.launch.processes.role_process --role rollout --index 1 --run runs/demo

SIGINT and SIGTERM do not interrupt the role: the first is reported to the hub, which ends the run in order, and
the supervisor has a deadline. SIGUSR1, in the hub alone, requests a checkpoint. SIGUSR2 writes the stacks of all threads into the
log. The address of the run's store is in the environment.
"""

import argparse
import faulthandler
import importlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ...comm.environment import JOINING, REFUSAL_KEY, STORE, SUMMARY_KEY
from ...comm.errors import (
    MEMORY_FULL_EXIT,
    STORE_GONE_EXIT,
    STORE_LOST_EXIT,
    SettingError,
    StoreGone,
    WaitTimeout,
)
from ...comm.plugins import process_function
from ...comm.recipe import Recipe
from ...comm.store.client import StoreClient
from ...comm.waits import set_identity, waiting
from ..config.checks.recipe import check_files, model_facts
from ..config.run_folder import SUMMARY_FILE
from ..placement import is_restartable
from .agent import has_other_hosts
from .failure_report import report_failure
from .fetched_recipe import fetch_recipe
from .full_gpu import describe_full_gpu, is_full_gpu
from .secret import read_secret
from .signals import SignalReporter

if TYPE_CHECKING:
    from ...comm.fleet import Fleet, StoreFleet
    from ...comm.mailbox import Mailbox

_MAINS = {
    "hub": "headrace.relay.hub.loop",
    "relay": "headrace.relay.loop",
    "actor": "headrace.trainer.loop",
    "rollout": "headrace.rollout.loop",
    "reference": "headrace.trainer.reference_loop",
    "task": "headrace.relay.queue.task_loop",
    "front": "headrace.rollout.serving.run_front",
}
_SHARDS = {
    "builtin": "headrace.rollout.generators.builtin",
    "vllm": "headrace.rollout.generators.vllm_engine.generator",
}
"""The further ranks of a replica, by its engine."""
_REFUSE_S = 30.0
_SUMMARY_S = 30.0
_SUMMARY_POLL_S = 0.1
_QUIET = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

log = logging.getLogger(__name__)


def run_role(role: str, index: int, recipe: Recipe, address: str, signals: SignalReporter) -> int:
    """Join the fleet, run the role to its end, leave; returns the exit code."""
    from ...comm.fleet import StoreFleet

    try:
        fleet = StoreFleet.join(address, role, index, read_secret(Path(recipe.run.dir)), {}, recipe.comm)
    except SettingError as error:
        return _refuse(address, Path(recipe.run.dir), str(error))
    mailbox = fleet.open_mailbox(f"{fleet.name}/worker")
    signals.report_by(mailbox)

    def on_thread_death(death: threading.ExceptHookArgs) -> None:
        """End the process as if the main thread had failed: without this thread the role would wait for ever."""
        assert isinstance(death.exc_value, Exception)
        code = _fail(mailbox, recipe, role, death.exc_value)
        fleet.leave()
        os._exit(code)

    threading.excepthook = on_thread_death
    log.info(
        "%s joined as incarnation %d, process %d on %s",
        fleet.name,
        fleet.incarnation,
        os.getpid(),
        socket.gethostname(),
    )
    code = 0
    try:
        check_files(role, recipe)
        fleet.announce(**model_facts(role, recipe))
        main_of(role, recipe)(fleet, recipe)
    except Exception as error:  # noqa: BLE001 - the last frame of the process: it reports every error
        code = _fail(mailbox, recipe, role, error)
    finally:
        threading.excepthook = threading.__excepthook__
        if role == "hub" and code != 1:  # else its next process reads the messages that it has not handled
            fleet.mailboxes.close_inbox("hub", is_last=True)
        if (code in (0, 2) and JOINING not in os.environ) or role == "hub":
            exchange_summary(fleet, Path(recipe.run.dir))
        log.info("%s leaves with exit code %d", fleet.name, code)
        fleet.leave()
    return code


def _refuse(address: str, run_dir: Path, reason: str) -> int:
    """End the run because this process cannot join it; returns the exit code."""
    reason = f"{reason} (on host {socket.gethostname()})"
    if JOINING not in os.environ:
        store = StoreClient.connect(address, read_secret(run_dir), _REFUSE_S)
        store.set(REFUSAL_KEY, reason.encode())
        store.close()
    sys.stderr.write(f"{reason}\n")
    return 2


def exchange_summary(fleet: "StoreFleet", run_dir: Path) -> None:
    """The hub gives its summary to all hosts; a host other than the hub's writes it if its run folder has none."""
    from ...relay.hub.shutdown import write_summary

    def is_coming() -> bool:
        hubs = fleet.alive_members("hub")
        return bool(hubs) and hubs[0].host != fleet.me.host

    path = run_dir / SUMMARY_FILE
    # The run may have ended without one, or another process of this host is faster.
    with suppress(StoreGone, FileNotFoundError), waiting("hub", "the run's summary", _SUMMARY_S) as wait:
        if fleet.name == "hub" and path.exists():
            fleet.store.set(SUMMARY_KEY, path.read_bytes())
            return
        while (summary := fleet.store.get(SUMMARY_KEY)) is None and is_coming() and wait.remaining_s:
            time.sleep(_SUMMARY_POLL_S)
        if summary is not None and not path.exists():
            write_summary(run_dir, json.loads(summary))


def main_of(role: str, recipe: Recipe) -> Callable[["Fleet", Recipe], None]:
    """The function that a role's process runs: the role's loop, or the function that the recipe names as its engine.

    An engine that is a class is an adapter, which the role's own loop calls. Raises `SettingError` for another one that is to serve.
    """
    engines = {"actor": ("trainer.engine", recipe.trainer.engine), "rollout": ("rollout.engine", recipe.rollout.engine)}
    if role in engines and (function := process_function(*engines[role])) is not None:
        if role == "rollout" and recipe.rollout.serve:
            raise SettingError(
                f"rollout.serve: rollout.engine={recipe.rollout.engine} has a loop of its own, which takes no requests"
            )
        return function
    return importlib.import_module(_SHARDS[recipe.rollout.engine] if role == "shard" else _MAINS[role]).run


def _fail(mailbox: "Mailbox", recipe: Recipe, role: str, error: Exception) -> int:
    """Log an error of the role; report it to the hub unless the supervisor starts this role again."""
    if isinstance(error, StoreGone):
        sys.stderr.write(f"{error}\n")
        return STORE_LOST_EXIT
    if isinstance(error, SettingError):
        where = f" (on host {socket.gethostname()})" if has_other_hosts() else ""
        if JOINING not in os.environ:
            report_failure(mailbox, recipe, role, f"{error}{where}", exit_code=2)
        sys.stderr.write(f"{error}\n")
        return 2
    log.error("the %s failed", role, exc_info=error)
    text = f"{type(error).__name__}: {error}"
    if is_memory_full := is_full_gpu(error):
        text = describe_full_gpu(role, error)
        sys.stderr.write(f"{text}\n")  # the last line of the log, which the supervisor prints
    is_stuck = role == "actor" and isinstance(error, WaitTimeout)  # another process is at fault
    if is_stuck or not is_restartable(role, recipe.run, recipe.trainer):
        report_failure(mailbox, recipe, role, text, exit_code=1)
    elif role == "actor":
        from ...comm.messages import ActorFailed

        mailbox.send("hub", ActorFailed(text, is_memory_full))
    return MEMORY_FULL_EXIT if is_memory_full else 1


def main(argv: list[str]) -> int:
    """Entry of the process; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m headrace.launch.processes.role_process", description="One role's process."
    )
    parser.add_argument("--role", required=True, choices=[*_MAINS, "shard"], help="the role")
    parser.add_argument("--index", type=int, required=True, help="its number among the processes of the role")
    parser.add_argument("--run", type=Path, required=True, help="the run folder, with config.yaml")
    arguments = parser.parse_args(argv)
    for key, value in _QUIET.items():
        os.environ.setdefault(key, value)
    os.environ.pop("LOCAL_RANK", None)  # torchrun's number of the supervisor; libraries choose a GPU by it
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    interruption = SignalReporter(arguments.role)
    set_identity(f"{arguments.role} {arguments.index}" if arguments.role != "hub" else "hub")

    try:
        address = os.environ[STORE]
        recipe = fetch_recipe(address, read_secret(arguments.run))
        return run_role(arguments.role, arguments.index, recipe, address, interruption)
    except StoreGone as error:
        sys.stderr.write(f"{error}\n")
        return STORE_GONE_EXIT
    except SettingError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def end_process(code: int) -> NoReturn:
    """End the process without the interpreter's own exit, which a thread inside torch or Gloo would abort."""
    logging.shutdown()
    for console in (sys.stdout, sys.stderr):
        with suppress(OSError):  # it may be a file on a full disk
            console.flush()
    os._exit(code)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
