"""The process of one role: it joins the fleet, runs the role, and reports an error to the hub. A supervisor starts it.

    python -m headrace.launch.processes.role_process --role rollout --index 1 --run runs/demo

SIGINT and SIGTERM do not interrupt the role: the first is reported to the hub, which ends the run in order, and
the supervisor has a deadline. SIGUSR1, in the hub alone, requests a checkpoint. SIGUSR2 writes the stacks of all threads into the
log. With `--failed TEXT` the process only
reports to the hub, for the supervisor, that the process of this role died. With `--spare` it waits until it is needed.
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ...comm.environment import JOINING, SUMMARY_KEY
from ...comm.errors import (
    MEMORY_FULL_EXIT,
    STORE_GONE_EXIT,
    STORE_LOST_EXIT,
    HeadraceError,
    MessageRefused,
    SettingError,
    StoreGone,
    WaitTimeout,
)
from ...comm.plugins import process_function
from ...comm.recipe import Recipe
from ...comm.waits import set_identity
from ..config.checks import check_files, model_facts
from ..config.load import parse_recipe
from ..config.run_folder import SUMMARY_FILE
from ..placement import count_ranks, is_restartable, place_ranks
from .agent import has_other_hosts
from .full_gpu import describe_full_gpu, is_full_gpu
from .secret import read_secret, verified_recipe
from .spare import SPARED, wait_until_needed

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
    "shard": "headrace.rollout.generators.builtin",
}
_STORE_DEADLINE_S = 120.0
_SUMMARY_S = 30.0
_QUIET = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

log = logging.getLogger(__name__)


class SignalReporter:
    """Reports the first SIGINT or SIGTERM to the hub, as soon as there is a mailbox for it; in the hub SIGUSR1 too.

    It ends the run; on a host that has joined a running job it drains this process.
    """

    def __init__(self, role: str) -> None:
        self.received = 0
        self.mailbox: Mailbox | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if role == "hub":
            signal.signal(signal.SIGUSR1, self._on_checkpoint_signal)

    def report_by(self, mailbox: "Mailbox") -> None:
        """Report through `mailbox` from now on; an earlier signal is reported at once."""
        self.mailbox = mailbox
        if self.received:
            self._report()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self.received:  # a scheduler sends SIGTERM to all processes of a job, and the supervisor sends it again
            self.received = number
            self._report()

    def _on_checkpoint_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.mailbox is not None:
            from ...comm.messages import CheckpointRequested

            self.mailbox.send("hub", CheckpointRequested())

    def _report(self) -> None:
        if self.mailbox is not None:
            from ...comm.messages import DrainRequested, Interrupted
            from ...comm.messages.base import process_of

            leaving = DrainRequested(process_of(self.mailbox.name))
            self.mailbox.send("hub", leaving if JOINING in os.environ else Interrupted(self.received))


def run_role(role: str, index: int, recipe: Recipe, address: str, signals: SignalReporter) -> int:
    """Join the fleet, run the role to its end, leave; returns the exit code."""
    from ...comm.fleet import Fleet

    try:
        fleet = Fleet.join(address, role, index, read_secret(Path(recipe.run.dir)), {}, recipe.comm)
    except SettingError as error:
        return _refuse(address, str(error))
    mailbox = fleet.open_mailbox(f"{fleet.name}/worker")
    signals.report_by(mailbox)

    def on_thread_death(death: threading.ExceptHookArgs) -> None:
        """End the process as if the main thread had failed: without this thread the role would wait for ever."""
        assert isinstance(death.exc_value, Exception)
        code = _fail(mailbox, recipe, role, death.exc_value)
        fleet.leave()
        os._exit(code)

    threading.excepthook = on_thread_death
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
        fleet.leave()
    return code


def _refuse(address: str, reason: str) -> int:
    """End the run because this process cannot join it; returns the exit code."""
    from ...comm.store import refuse_run

    reason = f"{reason} (on host {socket.gethostname()})"
    if JOINING not in os.environ:
        refuse_run(address, reason)
    sys.stderr.write(f"{reason}\n")
    return 2


def exchange_summary(fleet: "StoreFleet", run_dir: Path) -> None:
    """The hub gives its summary to all hosts; on another host than the hub's it is written where the run folder has none."""
    from torch.distributed import DistError

    from ...comm.signing import sign_entry, verify_entry
    from ...comm.store import publish_summary, wait_for_summary
    from ...relay.hub.shutdown import write_summary

    def is_coming() -> bool:
        hubs = fleet.alive_members("hub")
        return bool(hubs) and hubs[0].host != fleet.me.host

    path = run_dir / SUMMARY_FILE
    secret = read_secret(run_dir)
    # The run may have ended without one, or another process of this host is faster.
    with suppress(StoreGone, DistError, FileNotFoundError, MessageRefused):
        if fleet.name == "hub" and path.exists():
            publish_summary(fleet.store_address, sign_entry(secret, SUMMARY_KEY, path.read_bytes()))
        elif (signed := wait_for_summary(fleet.store_address, is_coming, _SUMMARY_S)) and not path.exists():
            write_summary(run_dir, json.loads(verify_entry(secret, SUMMARY_KEY, signed)))


def main_of(role: str, recipe: Recipe) -> Callable[["Fleet", Recipe], None]:
    """The function that a role's process runs: the role's loop, or the function that the recipe names as its engine.

    An engine that is a class is an adapter, which the role's own loop calls.
    """
    engines = {"actor": ("trainer.engine", recipe.trainer.engine), "rollout": ("rollout.engine", recipe.rollout.engine)}
    if role in engines and (function := process_function(*engines[role])) is not None:
        return function
    return importlib.import_module(_MAINS[role]).run


def _fail(mailbox: "Mailbox", recipe: Recipe, role: str, error: Exception) -> int:
    """Log an error of the role; report it to the hub unless the supervisor starts this role again."""
    from torch.distributed import DistError

    if isinstance(error, StoreGone | DistError):
        sys.stderr.write(f"{error}\n")
        return STORE_LOST_EXIT
    if isinstance(error, SettingError):
        where = f" (on host {socket.gethostname()})" if has_other_hosts() else ""
        if JOINING not in os.environ:
            report(mailbox, recipe, role, f"{error}{where}", exit_code=2)
        sys.stderr.write(f"{error}\n")
        return 2
    log.error("the %s failed", role, exc_info=error)
    text = f"{type(error).__name__}: {error}"
    if is_memory_full := is_full_gpu(error):
        text = describe_full_gpu(role, error)
        sys.stderr.write(f"{text}\n")  # the last line of the log, which the supervisor prints
    is_stuck = role == "actor" and isinstance(error, WaitTimeout)  # another process is at fault
    if is_stuck or not is_restartable(role, recipe):
        report(mailbox, recipe, role, text, exit_code=1)
    elif role == "actor":
        from ...comm.messages import ActorFailed

        mailbox.send("hub", ActorFailed(text, is_memory_full))
    return MEMORY_FULL_EXIT if is_memory_full else 1


def report(mailbox: "Mailbox", recipe: Recipe, role: str, error: str, exit_code: int) -> None:
    """Report to the hub that the run fails. If it is the hub itself that fails, write the summary and stop all roles."""
    from ...comm.messages import Failed, Stop

    if role != "hub":
        mailbox.send("hub", Failed(error, exit_code))
        return
    from ...relay.hub.shutdown import write_summary

    try:
        write_summary(Path(recipe.run.dir), {"status": "failed", "error": error, "exit_code": exit_code})
    except (OSError, HeadraceError) as lost:
        print(f"{error}; summary.json is not written: {lost}", flush=True)
    for place in place_ranks(recipe.roles, [count_ranks(recipe.roles)], recipe.rollout.tp):
        if place.role != "shard":  # a shard ends with its rollout
            mailbox.send(place.name, Stop("failed"))


def _report_death(name: str, role: str, recipe: Recipe, address: str, error: str) -> int:
    from ...comm.mailbox import StoreMailboxes
    from ...comm.store import connect_store

    store = connect_store(address, recipe.comm.deadline_s)
    mailboxes = StoreMailboxes(store, read_secret(Path(recipe.run.dir))).start()
    mailbox = mailboxes.open(name)
    report(mailbox, recipe, role, error, exit_code=1)
    mailbox.close()
    mailboxes.close()
    return 0


def main(argv: list[str]) -> int:
    """Entry of the process; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m headrace.launch.processes.role_process", description="One role's process."
    )
    parser.add_argument("--role", required=True, choices=_MAINS, help="the role")
    parser.add_argument("--index", type=int, required=True, help="its number among the processes of the role")
    parser.add_argument("--run", type=Path, required=True, help="the run folder, with config.yaml")
    parser.add_argument(
        "--failed", metavar="TEXT", help="only report to the hub that this process died, with this text"
    )
    parser.add_argument("--spare", action="store_true", help="first wait for a byte of standard input, or end with it")
    arguments = parser.parse_args(argv)
    for key, value in _QUIET.items():
        os.environ.setdefault(key, value)
    os.environ.pop("LOCAL_RANK", None)  # torchrun's number of the supervisor; libraries choose a GPU by it
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if arguments.spare and not wait_until_needed(SPARED[arguments.role]):
        return 0
    interruption = SignalReporter(arguments.role)
    set_identity(f"{arguments.role} {arguments.index}" if arguments.role != "hub" else "hub")

    from ...comm.store import fetch_recipe, find_address

    try:
        address = find_address(_STORE_DEADLINE_S)  # the run folder is complete before the address is published
        signed = fetch_recipe(address, _STORE_DEADLINE_S)
        try:
            recipe = parse_recipe(verified_recipe(signed, arguments.run))
        except SettingError as error:
            return _refuse(address, str(error))
        return _run(arguments, address, recipe, interruption)
    except StoreGone as error:
        sys.stderr.write(f"{error}\n")
        return STORE_GONE_EXIT


def _run(arguments: argparse.Namespace, address: str, recipe: Recipe, interruption: SignalReporter) -> int:
    if arguments.failed is not None:
        name = "hub" if arguments.role == "hub" else f"{arguments.role}-{arguments.index}"
        return _report_death(name, arguments.role, recipe, address, arguments.failed)
    return run_role(arguments.role, arguments.index, recipe, address, interruption)


def end_process(code: int) -> NoReturn:
    """End the process without the interpreter's own exit, which a thread inside torch or Gloo would abort."""
    logging.shutdown()
    for console in (sys.stdout, sys.stderr):
        with suppress(OSError):  # it may be a file on a full disk
            console.flush()
    os._exit(code)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
