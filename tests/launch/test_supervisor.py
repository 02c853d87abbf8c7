"""A supervisor and its children: restarts, failures, signals, deadlines."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from bench.faults.memory_cgroup import memory_cgroup, own_cgroup
from support.polling import wait_for

from headrace.comm.environment import STORE, STREAMING_COPY_ENV
from headrace.comm.errors import STORE_GONE_EXIT, STORE_LOST_EXIT
from headrace.comm.mailbox import StoreMailboxes
from headrace.comm.messages import Failed, Message, Stop
from headrace.comm.recipe import RunSettings, TrainerSettings
from headrace.comm.store.client import StoreClient
from headrace.comm.store.server import StoreServer
from headrace.launch.config.load import known_settings, read_recipe
from headrace.launch.config.memory_advice import ADVISED, advice
from headrace.launch.placement import is_restartable
from headrace.launch.processes.copies_lock import _is_free
from headrace.launch.processes.exits import (
    MAX_RESTARTS,
    RESTART_WINDOW_S,
    ExitKind,
    classify_exit,
)
from headrace.relay.weights.copies_on_disk import CopiesOnDisk

T = TypeVar("T")
DRIVER = Path(__file__).parents[1] / "support" / "supervisor_driver.py"
DEADLINE_S = 240.0
SECRET = "a secret of the run"


class RunningSupervisor:
    """A supervisor with fake children, and the events that they recorded."""

    def __init__(
        self,
        name: str,
        script: dict[str, list[str]],
        run_dir: Path,
        *,
        store: bool,
        shutdown_s: float,
        settings: tuple[str, ...],
        conditions: dict[str, object],
    ):
        self.run_dir = run_dir
        self.events_file = run_dir / "events"
        run_dir.mkdir(parents=True)
        if "config" in conditions:
            (run_dir / "config.yaml").write_text(str(conditions["config"]))
        environment = {**os.environ, "HEADRACE_SCRIPT": json.dumps(script), "HEADRACE_EVENTS": str(run_dir)}
        self.store = StoreServer("127.0.0.1", SECRET.encode()).start()
        environment["HEADRACE_SECRET"] = SECRET
        environment["HEADRACE_CONDITIONS"] = json.dumps(conditions, default=str)
        words = [name, str(run_dir), "store" if store else self.store.address, str(shutdown_s), *settings]
        command = [sys.executable, str(DRIVER), *words]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def events(self, name: str = "") -> list[str]:
        lines = self.events_file.read_text().splitlines() if self.events_file.exists() else []
        return [line for line in lines if line.startswith(name)]

    def wait_for(self, event: str, count: int = 1) -> list[str]:
        def is_running() -> bool:
            return self.process.poll() is None

        def told() -> str:
            return f"{self.events()}\n{self.process.stderr.read() if self.process.stderr and not is_running() else ''}"

        wait_for(lambda: len(self.events(event)) >= count, is_running, told, patience_s=DEADLINE_S, interval_s=0.01)
        return self.events(event)

    def received(self, name: str) -> list[Message]:
        """The messages to an inbox of the run so far."""
        client = StoreClient.connect(self.store.address, SECRET.encode(), DEADLINE_S)
        mailboxes = StoreMailboxes(client)
        inbox = mailboxes.open(name)
        client.sync()
        found: list[Message] = []
        while (envelope := inbox.receive(0)) is not None:
            found.append(envelope.message)
        mailboxes.close()
        client.close()
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)
        self.store.close()

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors


def until(ready: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + DEADLINE_S
    while (result := ready()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


@pytest.fixture
def supervisor(run_dir: Path) -> Iterator[Callable[..., RunningSupervisor]]:
    started: list[RunningSupervisor] = []

    def start(
        name: str,
        script: dict[str, list[str]],
        *,
        store: bool = False,
        shutdown_s: float = 200.0,
        settings: tuple[str, ...] = (),
        **conditions: object,
    ) -> RunningSupervisor:
        """`conditions` are those of `support.supervisor_driver`."""
        times = {"shutdown_s": shutdown_s}
        more = {"settings": settings, "conditions": conditions}
        started.append(RunningSupervisor(name, script, run_dir, store=store, **times, **more))
        return started[-1]

    yield start
    for running in started:
        running.close()


def test_a_supervisor_ends_with_its_child(supervisor):
    running = supervisor("actor-0", {"actor-0": ["end"]})
    assert running.end() == (0, "")
    assert len(running.events("actor-0 start")) == 1


def test_a_dead_rollout_is_started_again_and_the_supervisor_ends_with_0(supervisor):
    running = supervisor("rollout-1", {"rollout-1": ["die", "crash", "end"]})
    code, errors = running.end()
    assert code == 0
    assert len(running.events("rollout-1 start")) == 3
    assert running.received("hub") == []
    assert "rollout-1 was ended by SIGKILL and is started again" in errors
    assert "rollout-1 ended with exit code 1 and is started again" in errors


def test_a_rollout_that_dies_again_and_again_ends_the_run_by_name(supervisor):
    running = supervisor("rollout-0", {"rollout-0": ["die"]})
    code, errors = running.end()
    assert code == 1
    assert len(running.events("rollout-0 start")) == MAX_RESTARTS + 1
    assert running.received("hub") == [Failed(f"rollout-0 was ended by SIGKILL, after {MAX_RESTARTS} restarts", 1)]
    assert "the run ends" in errors


def test_a_rollout_that_cannot_be_started_at_one_moment_is_started_a_moment_later(supervisor):
    running = supervisor("rollout-0", {"rollout-0": ["die", "end"]}, fail_starts=(2, 3))
    code, errors = running.end()
    assert code == 0, errors
    assert len(running.events("rollout-0 start")) == 2
    assert (
        errors.count("rollout-0 cannot be started now: [Errno 11] Resource temporarily unavailable; it is tried") == 2
    )
    assert "tried again in 0.5 s" in errors and "tried again in 1 s" in errors and "Traceback" not in errors


def test_a_process_that_can_never_be_started_ends_the_run_by_name(supervisor):
    running = supervisor("rollout-0", {"rollout-0": ["die"]}, fail_starts=tuple(range(2, 99)), restart_window_s=1.0)
    code, errors = running.end()
    assert code == 1
    (told,) = running.received("hub")
    assert isinstance(told, Failed)
    assert told.error.startswith("rollout-0 could not be started for") and "temporarily" in told.error
    assert f"{told.error}; the run ends" in errors


def test_a_supervisor_that_waits_to_start_a_process_ends_with_the_run(supervisor):
    running = supervisor("rollout-0", {"rollout-0": ["die"]}, fail_starts=tuple(range(2, 99)))
    running.wait_for("rollout-0 start")
    (running.run_dir / "summary.json").touch()
    assert running.end()[0] == 0


@pytest.mark.parametrize("what", ["renamed", "removed", "replaced"])
def test_a_run_whose_folder_is_not_in_its_place_any_more_ends_with_that(supervisor, what: str):
    running = supervisor("relay-0", {"relay-0": ["ignore"], "hub": ["ignore"]})
    for name in ("relay-0", "hub"):
        running.wait_for(f"{name} start")
    if what == "removed":
        shutil.rmtree(running.run_dir)
    else:
        running.run_dir.rename(running.run_dir.with_name("moved"))
    if what == "replaced":
        running.run_dir.mkdir()
    code, errors = running.end()
    assert code == 2
    assert f"error: run.dir: {running.run_dir} was renamed or removed while its run was under way" in errors
    assert not running.run_dir.exists() or not list(running.run_dir.iterdir())


def test_a_process_that_the_kernel_killed_for_memory_is_reported_as_that(supervisor, tmp_path: Path):
    """SIGKILL alone does not prove such a kill: the kernel's counter has to rise too."""
    counter = tmp_path / "counter"
    counter.write_text("low 0\noom 0\noom_kill 7\n")
    running = supervisor("actor-0", {"actor-0": ["wait", "wait", "end"]}, counter=counter)
    pids: list[int] = []
    for incarnation in (1, 2):
        pids.append(int(running.wait_for("actor-0 start", count=incarnation)[-1].split()[2]))
        if incarnation == 2:
            counter.write_text("low 0\noom 1\noom_kill 8\n")
        os.kill(pids[-1], signal.SIGKILL)
    code, errors = running.end()
    assert code == 0
    by_hand, by_kernel = errors.splitlines()
    assert by_hand.startswith("headrace: actor-0 was ended by SIGKILL and is started again")
    words = r"headrace: actor-0 was killed by the kernel for memory: it held \d+ MB of this host's [\d.]+ GB; set a smaller "
    assert re.match(words + r"optimizer\.micro_tokens.*; it is started again$", by_kernel), errors
    assert len(running.events("actor-0 lacks memory")) == 1, "the third process, which does without copies"


def test_what_takes_less_memory_is_named_by_settings_that_exist():
    names = re.findall(r"\b[a-z]+\.[a-z_]+\b", " ".join(advice(role, on_gpu=True) for role in ADVISED))
    assert len(names) > 5 and not set(names) - known_settings().keys()
    assert {"actor", "rollout", "relay"} <= set(ADVISED)


@pytest.mark.skipif(not own_cgroup(), reason="no cgroup of a bounded memory can be made here")
def test_a_true_kill_for_memory_is_found(supervisor, tmp_path: Path):
    with memory_cgroup(150) as group:
        running = supervisor("rollout-0", {"rollout-0": ["eat", "end"]}, cgroup=group)
        code, errors = running.end()
    assert code == 0
    assert "rollout-0 was killed by the kernel for memory: it held " in errors and "generator.kv_gb" in errors


def test_a_dead_hub_is_started_again_and_its_relay_is_not(supervisor):
    running = supervisor("relay-0", {"hub": ["die", "crash", "wait"], "relay-0": ["wait"]})
    running.wait_for("hub start", count=3)
    running.wait_for("relay-0 start")
    running.process.terminate()
    code, errors = running.end()
    assert code == 0, errors
    assert (len(running.events("hub start")), len(running.events("relay-0 start"))) == (3, 1)
    assert "hub was ended by SIGKILL and is started again" in errors


def test_a_process_that_was_stopped_beyond_its_deadline_has_received_no_signal():
    script = """
import time
from headrace.launch.processes.signals import block_signals, wait_for_signal
block_signals()
print(time.monotonic() + 1.0, flush=True)
for seconds in (1.0, 60.0):
    print(wait_for_signal(seconds), flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        deadline = float(process.stdout.readline())
        process.send_signal(signal.SIGSTOP)
        until(lambda: True if time.monotonic() > deadline else None)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "0\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == f"{int(signal.SIGTERM)}\n"


@pytest.mark.parametrize("wanted", ["1", "4"])
def test_a_process_and_the_next_one_have_the_chosen_threads_which_sleep(supervisor, monkeypatch, wanted):
    """Whatever the user's environment says; the hub, which computes nothing, has one."""
    for name, value in (("OMP_NUM_THREADS", wanted), ("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "infinite")):
        monkeypatch.setenv(name, value)
    script = {"relay-0": ["wait", "die", "wait"], "hub": ["wait"]}
    running = supervisor("relay-0", script, num_threads=2)
    os.kill(int(running.wait_for("relay-0 start")[0].split()[2]), signal.SIGKILL)
    running.wait_for("relay-0 start", count=3)
    running.wait_for("hub threads")
    running.process.terminate()
    assert running.end()[0] == 0
    assert set(running.events("relay-0 threads")) == {"relay-0 threads 2 PASSIVE 0"}
    assert running.events("hub threads") == ["hub threads 1 PASSIVE 0"]


def test_a_front_that_dies_again_and_again_ends_nothing(supervisor):
    script = {"hub": ["wait"], "relay-0": ["wait"], "front-0": ["die"]}
    running = supervisor("relay-0", script, settings=("rollout.serve=0",))
    running.wait_for("front-0 start", count=MAX_RESTARTS + 1)
    assert running.received("hub") == []
    running.process.terminate()
    code, errors = running.end()
    assert code == 0 and len(running.events("front-0 start")) == MAX_RESTARTS + 1
    assert "the run goes on and answers no more HTTP requests" in errors
    assert running.events("hub signal") == [f"hub signal {int(signal.SIGTERM)}"], "the run went on until then"


def test_a_mistake_in_the_address_of_the_front_ends_the_run(supervisor):
    script = {"hub": ["wait"], "relay-0": ["wait"], "front-0": ["mistake"]}
    code, errors = supervisor("relay-0", script, settings=("rollout.serve=0",), shutdown_s=4.0).end()
    assert code == 2 and "front ended the run" in errors and "some.setting is wrong" in errors


def test_a_run_without_a_served_address_has_no_front(supervisor):
    running = supervisor("relay-0", {"hub": ["end"], "relay-0": ["end"]})
    assert running.end()[0] == 0 and not running.events("front")


def test_a_hub_that_fails_again_and_again_ends_the_run_with_its_last_error(supervisor):
    script = {"hub": ["fail"], "relay-0": ["wait"], "front-0": ["wait"]}
    running = supervisor("relay-0", script, shutdown_s=4.0, settings=("rollout.serve=0",))
    code, _ = running.end()
    assert code == 1
    assert len(running.events("hub start")) == MAX_RESTARTS + 1
    summary = json.loads((running.run_dir / "summary.json").read_text())
    assert summary["error"] == f"hub ended with exit code 1, after {MAX_RESTARTS} restarts: ValueError: 7 is wrong"
    for name in ("relay-0", "rollout-0", "front-0"):
        assert running.received(name) == [Stop("failed")]


def test_a_child_that_reported_its_error_is_not_reported_again(supervisor):
    running = supervisor("relay-0", {"hub": ["mistake"], "relay-0": ["wait"]}, shutdown_s=2.0)
    assert running.end()[0] == 2
    assert not (running.run_dir / "summary.json").exists() and running.received("relay-0") == []


@pytest.mark.parametrize("setting", ["run.save_rows=none", "trainer.engine=mine.py:main"])
def test_a_trainer_that_cannot_train_its_steps_again_is_not_started_again(setting: str):
    recipe = read_recipe(None, [setting])
    assert is_restartable("actor", RunSettings(), TrainerSettings())
    assert not is_restartable("actor", recipe.run, recipe.trainer)
    assert is_restartable("rollout", recipe.run, recipe.trainer)


def test_a_users_mistake_is_one_line_and_exit_code_2(supervisor):
    code, errors = supervisor("rollout-0", {"rollout-0": ["mistake"]}).end()
    assert code == 2
    assert errors.startswith("headrace: rollout-0 ended the run. Its log is ")
    assert errors.endswith("rollout-0.log:\n    some.setting is wrong\n")


def test_a_mistake_on_a_host_that_has_joined_does_not_claim_to_end_the_run(supervisor):
    code, errors = supervisor("rollout-0", {"rollout-0": ["mistake"]}, joined=True).end()
    assert code == 2
    assert errors.startswith("headrace: rollout-0 cannot work here; this host leaves the run. Its log is ")


def test_the_lead_relays_supervisor_starts_the_hub_and_gives_the_relay_a_segment(supervisor):
    running = supervisor("relay-0", {})
    assert running.end() == (0, "")
    [hub], [relay] = running.events("hub start"), running.events("relay-0 start")
    assert hub.endswith(" -") and not relay.endswith(" -")


@pytest.mark.parametrize(("rows", "is_given"), [("recovery", True), ("none", False)])
def test_a_trainer_that_can_start_again_has_one_segment_in_all_its_processes(supervisor, rows: str, is_given: bool):
    settings = (f"run.save_rows={rows}",)
    running = supervisor("actor-0", {"actor-0": ["die", "end"] if is_given else ["end"]}, settings=settings)
    assert running.end()[0] == 0
    given = {line.split()[3] for line in running.events("actor-0 start")}
    assert len(given) == 1 and (given != {"-"}) is is_given


@pytest.mark.parametrize("name", ["actor-0", "relay-1"])
def test_the_copies_of_a_trainer_that_is_not_started_again_are_left_in_the_run_folder(supervisor, name: str):
    running = supervisor(name, {name: ["copy"]}, config="run.steps: 9")
    code, errors = running.end()
    head = CopiesOnDisk(running.run_dir).head(3, 0)
    assert code == 2 and (head is not None) is (name == "actor-0"), errors
    assert "after step 3 to" in errors or head is None


@pytest.mark.parametrize("keeps_others", [False, True])
def test_the_supervisor_of_an_actor_leaves_the_copies_of_another_hosts_rank_too(supervisor, keeps_others: bool):
    running = supervisor("actor-0", {"actor-0": ["copy"]}, config="run.steps: 9", keeps_others=keeps_others)
    running.end()
    saved = CopiesOnDisk(running.run_dir)
    assert [saved.head(3, rank) is not None for rank in (0, 1)] == [True, keeps_others]


def test_a_trainer_that_is_interrupted_since_another_failed_and_does_not_end_in_time_leaves_its_copies(supervisor):
    running = supervisor("actor-0", {"actor-0": ["copy and wait"]}, config="run.steps: 9", shutdown_s=0.3)
    running.wait_for("actor-0 copied")
    running.process.terminate()
    code, errors = running.end()
    assert code == 1 and CopiesOnDisk(running.run_dir).steps() == [3], errors


def test_a_run_folder_that_was_renamed_gets_the_copies(supervisor):
    running = supervisor("actor-0", {"actor-0": ["copy and wait"]}, config="run.steps: 9")
    running.wait_for("actor-0 copied")
    assert not _is_free(running.run_dir), "the next start waits for this supervisor"
    moved = running.run_dir.rename(running.run_dir.with_name("moved"))
    code, errors = running.end()
    assert (code, CopiesOnDisk(moved).steps()) == (2, [3]), errors
    assert _is_free(moved)
    assert not running.run_dir.exists()


@pytest.mark.parametrize("users", [None, "glibc.malloc.check=0"])
def test_a_roles_process_copies_large_pieces_past_the_caches_unless_the_user_says_otherwise(
    supervisor, monkeypatch, users
):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if users is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", users)
    running = supervisor("rollout-0", {"rollout-0": ["wait"]})
    pid = running.wait_for("rollout-0 start")[0].split()[2]
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    expected = users or STREAMING_COPY_ENV["GLIBC_TUNABLES"]
    assert [line for line in environment if line.startswith("GLIBC_TUNABLES")] == [f"GLIBC_TUNABLES={expected}"]
    assert f"{STORE}={running.store.address}" in environment
    running.process.terminate()
    assert running.end()[0] == 0


def test_a_signal_reaches_each_role_once_and_the_store_last(supervisor):
    running = supervisor("actor-0", {"actor-0": ["wait"], "store": ["wait"]}, store=True, shutdown_s=4.0)
    running.wait_for("store start")
    running.wait_for("actor-0 start")
    running.process.send_signal(signal.SIGINT)
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == (0, "")
    signals = [line for line in running.events() if "signal" in line]
    assert signals == [f"actor-0 signal {signal.SIGINT.value}", f"store signal {signal.SIGQUIT.value}"]


def test_a_signal_before_the_store_has_an_address_ends_it_at_once(supervisor):
    running = supervisor("actor-0", {"store": ["silent"]}, store=True)
    running.wait_for("store start")
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == (0, "")
    assert running.events("store signal") == [f"store signal {signal.SIGQUIT.value}"]


def test_a_store_that_refuses_to_start_is_a_mistake_of_the_user(supervisor):
    code, errors = supervisor("actor-0", {"store": ["mistake"]}, store=True).end()
    assert code == 1 and errors.endswith("headrace.comm.errors.SettingError: some.setting is wrong\n")


def test_a_store_that_its_supervisor_ends_after_the_summary_is_no_failure(supervisor):
    running = supervisor("actor-0", {"actor-0": ["wait"], "store": ["quit"]}, store=True, shutdown_s=0.3)
    running.wait_for("store start")
    running.wait_for("actor-0 start")
    (running.run_dir / "summary.json").touch()
    running.process.send_signal(signal.SIGINT)
    assert running.end() == (0, "")


def test_a_child_that_ignores_signals_is_killed_by_name_after_the_deadline(supervisor):
    running = supervisor("actor-0", {"actor-0": ["ignore"]}, shutdown_s=0.3)
    running.wait_for("actor-0 start")
    running.process.terminate()
    code, errors = running.end()
    assert code == 1
    assert "actor-0 did not end in time and is killed" in errors


def test_no_child_outlives_a_killed_supervisor(supervisor):
    running = supervisor("relay-0", {"relay-0": ["ignore"], "hub": ["ignore"]})
    pids = [int(running.wait_for(f"{name} start")[0].split()[2]) for name in ("relay-0", "hub")]
    running.process.kill()
    until(lambda: True if not any(Path(f"/proc/{pid}").exists() for pid in pids) else None)


def test_old_restarts_are_forgotten_and_recent_ones_are_counted():
    now = 1000.0
    recent = [now - 1.0] * MAX_RESTARTS
    state = {"is_restartable": True, "is_ending": False}
    assert classify_exit("rollout", -9, recent, now, **state) is ExitKind.FAILED_UNREPORTED
    assert classify_exit("rollout", -9, recent, now + RESTART_WINDOW_S, **state) is ExitKind.RESTART


def test_a_process_with_a_mistake_in_its_settings_is_not_started_again():
    state = {"is_restartable": True, "is_ending": False}
    assert classify_exit("rollout", 2, [], 0.0, **state) is ExitKind.FAILED_REPORTED


def test_the_death_of_a_process_that_is_not_started_again_ends_the_run():
    for role in ("actor", "store"):
        state = {"is_restartable": False, "is_ending": False}
        assert classify_exit(role, -9, [], 0.0, **state) is ExitKind.FAILED_UNREPORTED
    assert classify_exit("rollout", -9, [], 0.0, is_restartable=True, is_ending=True) is ExitKind.FAILED_REPORTED


def test_a_role_that_lost_a_store_which_has_not_ended_is_started_again_and_one_that_finds_none_is_not():
    state = {"is_restartable": True, "is_ending": False, "has_store_ended": False}
    assert classify_exit("rollout", STORE_LOST_EXIT, [], 0.0, **state) is ExitKind.RESTART
    assert classify_exit("rollout", STORE_GONE_EXIT, [], 0.0, **state) is ExitKind.FAILED_REPORTED
    ended = state | {"has_store_ended": True}
    assert classify_exit("rollout", STORE_LOST_EXIT, [], 0.0, **ended) is ExitKind.FAILED_REPORTED
    unable = state | {"is_restartable": False}
    assert classify_exit("hub", STORE_LOST_EXIT, [], 0.0, **unable) is not ExitKind.RESTART


def test_a_hub_whose_connection_alone_broke_is_started_again(supervisor):
    """The store ends a connection whose reader is frozen for long; that is not the end of the store."""
    running = supervisor("relay-0", {"hub": ["lose", "wait"], "relay-0": ["wait"]})
    running.wait_for("hub start", count=2)
    running.wait_for("relay-0 start")
    running.process.terminate()
    code, errors = running.end()
    assert code == 0, errors


def test_a_role_that_lost_a_store_which_has_ended_ends_the_run_on_its_host(supervisor):
    running = supervisor("rollout-0", {"rollout-0": ["lose at word"]})
    running.store.close()
    (running.run_dir / "go").touch()
    code, errors = running.end()
    assert code == 1 and len(running.events("rollout-0 start")) == 1
    assert errors == "headrace: rollout-0 has no connection to the run's store; the run ends on this host\n"
