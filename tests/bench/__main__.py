"""One command for all benchmarks.

    python tests/bench [WORKLOAD ...] [--list] [--runs N] [--json FILE]
    python tests/bench curves --help
    python tests/bench compare --help
    python tests/bench sensitivity --help
    python tests/bench time-to-reward --help

WORKLOAD is a name that `--list` shows: a workload, a group of workloads, or a row, which runs its workload. Without a name
all workloads run. `curves` runs and draws the learning curves of docs/use/results.md, `compare` the schedules on emulated
devices, `sensitivity` what follows from each of their constants (docs/develop/lab.md), `time-to-reward` the hours of each
schedule to a reward (docs/develop/reproduction.md).
"""

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import ENVIRONMENT, HEADING, Measurement, Options, Work, line, medians, write_measurements


@dataclass(frozen=True, slots=True)
class Workload:
    """An entry of the list. Its module, which may be slow to import, is imported when it runs."""

    name: str
    group: str
    function: str
    """Module of this folder, and function."""
    measures: str
    rows: tuple[str, ...] = ()
    """Names of its rows if they differ from its own."""

    @property
    def names(self) -> set[str]:
        return {self.name, self.group, *self.rows}

    def load(self) -> Work:
        module, _, function = self.function.rpartition(".")
        return getattr(import_module(f"bench.{module}"), function)


_CHUNK_ROWS = tuple(f"chunks-{size}" for size in ("64-KiB", "256-KiB", "512-KiB", "1024-KiB", "4096-KiB", "chosen"))
_PEERS = "tokens/s over transformers"
_GENERATOR = ("generator", "generator.measure")
CATALOGUE = (
    Workload("5m-fp32", *_GENERATOR, f"5M policy, 128 short requests: {_PEERS}, and a step over its kernels"),
    Workload("5m-bf16", *_GENERATOR, "the same in bfloat16"),
    Workload("5m-fp32-groups", *_GENERATOR, f"5M policy, 8 groups of 8 with long prompts: {_PEERS}"),
    Workload("5m-fp32-list", *_GENERATOR, "the same as 64 prompts of one list: tokens/s over groups and over transformers"),
    Workload("second-turn", "generator", "generator.second_turn", "8 second turns with the prefix cache: time without it over theirs"),
    *(Workload(f"rows-{length}", "generator", "row_changes.measure",
               f"256 rows of {length} tokens: CPU time of a step in which one ends and one begins, over one without a change")
      for length in ("500", "8k")),
    Workload("100m-bf16", *_GENERATOR, f"100M policy, 48 requests: {_PEERS}, and a step over its kernels"),
    Workload("natural-bf16", "instruct", "instruct.natural", f"a chat model (--policy), responses of natural length: {_PEERS}"),
    Workload("natural-fp32", "instruct", "instruct.natural", "the same in float32"),
    Workload("serving", "generator", "serving.serving",
             "64 clients of `headrace serve` (--policy): CPU time of a token over Engine.generate's", ("serving", "serving-stream")),
    Workload("0.5b-bf16-gpu", *_GENERATOR, f"0.5B policy, 1024 requests on a GPU: {_PEERS}"),
    Workload("1.5b-bf16-gpu", *_GENERATOR, f"1.5B policy, 1024 requests on a GPU: {_PEERS}"),
    Workload("trainer-step", "trainer", "trainer.beside_trl",
             "a GRPO step over TRL's on the same rollouts (--trl-python): tokens/s, peak memory", ("trainer-tokens", "trainer-memory")),
    *(Workload(f"shared-{prompt}-{response}-{dtype}", "shared-tokens", "shared_tokens.measure",
               "a step with shared tokens once over rows alone, groups of 8 (--policy): time, peak memory",
               (f"shared-{prompt}-{response}-{dtype}", f"shared-{prompt}-{response}-{dtype}-memory"))
      for prompt in (0, 46, 256, 1024) for response in (24, 128, 512) for dtype in ("fp32", "bf16")),
    Workload("operators", "trainer", "operators.measure",
             "what a micro-batch in bfloat16 asks of the host: operators and type copies of a layer, reads of the device",
             tuple(f"{family}-{what}" for family in ("llama", "qwen2", "qwen3", "qwen3-sharded")
                   for what in ("operators", "copies", "reads", "update"))),
    Workload("end-to-end", "trainer", "end_to_end.beside_trl", "a run on two cores over one of TRL's GRPOTrainer (--trl-python)"),
    Workload("slow-environments", "environments", "end_to_end.slow_environments",
             "share of its time that a rollout decodes while 256 environments take 1 s for each answer"),
    Workload("tcp-link", "weights", "links.tcp_link", "GB/s of a tcp link over a raw loopback socket"),
    Workload("tls-link", "weights", "links.tcp_link", "GB/s of a link with comm.tls over a raw loopback socket"),
    Workload("shm-copies", "weights", "weights.shm_copies",
             "GB/s of push, pull and digest on one host over numpy.copyto", ("shm-push", "shm-pull", "digest")),
    Workload("actor-stall-6-relays", "weights", "weights.actor_stall", "the actor's stall with 6 relays over that with 1"),
    Workload("step-p99-relay-stopped", "weights", "weights.stopped_relay",
             "the slowest step over the median while a relay is stopped"),
    Workload("chain-12-hosts", "weights", "weights.chain", "a push to 12 hosts over one to 2, and over the model's time"),
    Workload("chunk-sizes", "weights", "weights.chunk_sizes",
             "a push in chunks of several sizes over the model's time", _CHUNK_ROWS),
    Workload("push-with-relay-killed", "weights", "weights.relay_killed",
             "a push during which a relay is killed over an undisturbed one"),
    Workload("gloo-broadcast-12-hosts", "weights", "weights.gloo_broadcast",
             "Gloo's broadcast over our chain, in shaped network namespaces", ("chain-12-namespaces",)),
    Workload("shaped-hosts", "weights", "weights.shaped_hosts",
             "the actor's stall and a push to 4 hosts with links of 100 Mbit/s", ("shaped-stall", "shaped-push")),
    Workload("units", "queue", "storage.beside_peer",
             "put, get, list, clear of a storage unit over TransferQueue (--peer-python)", ("put", "get", "list", "clear")),
    Workload("load", "queue", "storage_load.load",
             "64 writers and 8 readers of one storage unit: rows/s, MB/s, memory",
             ("load-rows", "load-bytes", "load-memory")),
    Workload("rows-through-program", "queue", "rows.through_program",
             "rows/s of 8,192 tokens from two rollouts over two units, two copies each, to the trainer, by the program's own path",
             ("rows-through-program", "rows-cpu")),
    Workload("hub-events", "hub", "hub.hub_events", "events/s through the hub's mailbox and journal"),
    Workload("hub-events-4096-groups", "hub", "hub.starving_trainer",
             "the same with 4,096 groups in the queue and a trainer that waits for the first"),
    Workload("members", "members", "members.members",
             "members of many hosts on one store: its CPU and memory; seconds until the hub acts on deaths (--hosts, --members, --kill)",
             tuple(f"members-{row}" for row in ("join", "cpu", "memory", "hub-cpu", "close", "kill", "freeze", "crash"))),
    Workload("learning-rates", "learning", "learning.rates",
             "steps and seconds to a reward, headrace over sync at several learning rates (--seeds, --policy)"),
    Workload("learning-corrections", "learning", "learning.corrections",
             "the same of headrace with each correction over the default one (--seeds, --policy)"),
    Workload("chaos", "faults", "faults.workloads.chaos",
             "a run whose processes are killed and frozen at random (--minutes, --seed): what breaks, times of recovery"),
    Workload("kill-matrix", "faults", "faults.workloads.kill_matrix",
             "the same with a kill of each target at each moment of a run"),
    Workload("freeze-matrix", "faults", "faults.workloads.freeze_matrix", "the same with a freeze of each target for 5 to 60 s"),
    Workload("restarts", "faults", "restarts.restarts",
             "seconds from the kill of a process until the next one of its role works (--policy)",
             ("restart-hub", "restart-relay", "restart-rollout", "restart-actor")),
    Workload("crowd", "faults", "faults.crowd.crowd",
             "2,000 connections of strangers at a relay's port: steps meanwhile, the relay's memory, files, threads"),
    Workload("journal-replay", "hub", "hub.journal_replay",
             "a journal of many events (--events): events/s of its fold and of its audit, seconds until the next hub has the state, stop for a snapshot",
             ("journal-replay", "journal-audit", "journal-recovery", "journal-snapshot")),
)  # fmt: skip
"""All workloads, in the order in which they run."""


def choose(words: Sequence[str]) -> list[Workload]:
    """The workloads that the words name, all of them without words; raises KeyError with a message for an unknown word."""
    known = {name for workload in CATALOGUE for name in workload.names}
    for word in words:
        if word not in known:
            near = sorted({name for name in known if word in name} | {*difflib.get_close_matches(word, known, 5)})
            raise KeyError(f"no workload {word!r}; " + (f"near it: {', '.join(near)}" if near else "see --list"))
    return [workload for workload in CATALOGUE if not words or workload.names & {*words}]


def main(words: Sequence[str]) -> int:
    """Run the chosen workloads, print the table; returns the exit code, 1 if a promise of the program did not hold."""
    parser = _parser()
    given = vars(parser.parse_intermixed_args(words))
    names, is_list, num_runs, path = (given.pop(name) for name in ("names", "list", "runs", "json"))
    try:
        chosen = choose(names)
    except KeyError as error:
        parser.error(error.args[0])
    if num_runs < 1:
        parser.error("--runs: at least 1")
    if is_list:
        for workload in chosen:
            rows = f" [{' '.join(workload.rows)}]" if workload.rows else ""
            print(f"{workload.group:<10} {workload.name:<24} {workload.measures}{rows}")
        return 0
    return 0 if run(chosen, Options(**given), num_runs, path) else 1


def _parser() -> argparse.ArgumentParser:
    """The options; the names of all but the first four are fields of `Options`."""
    parser = argparse.ArgumentParser(prog="python tests/bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="WORKLOAD", help="a workload, a group, or a row; default: all")
    parser.add_argument("--list", action="store_true", help="print the workloads and what they measure")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="run each N times; the table shows medians")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    defaults = Options()
    parser.add_argument("--megabytes", type=int, default=defaults.megabytes, help="of a version (tcp-link, shm-copies)")
    parser.add_argument(
        "--seconds", type=float, default=defaults.seconds, help="duration of `load` and of the steady part of `members`"
    )
    parser.add_argument("--events", type=int, default=defaults.events, help="events of the journal (journal-replay)")
    parser.add_argument("--peer-python", metavar="PATH", help="interpreter that has TransferQueue (units)")
    parser.add_argument("--trl-python", metavar="PATH", help="interpreter that has TRL (trainer-step, end-to-end)")
    parser.add_argument("--seeds", type=int, default=defaults.seeds, help="seeds of each variant (learning)")
    parser.add_argument(
        "--policy",
        metavar="PATH",
        help="policy of instruct; of learning, trainer-step and end-to-end, instead of their own",
    )
    parser.add_argument("--minutes", type=float, default=defaults.minutes, help="duration of `chaos`")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of the random choices of `chaos`")
    parser.add_argument("--hosts", type=int, default=defaults.hosts, help="host processes (members)")
    parser.add_argument(
        "--members", type=int, default=defaults.members, help="of each host, one of them a relay (members)"
    )
    parser.add_argument(
        "--kill", type=int, default=defaults.kill, help="members whose hosts are killed at once (members)"
    )
    parser.add_argument("--expiry-s", type=float, default=defaults.expiry_s, help="comm.expiry_s (members)")
    return parser


def run(workloads: Sequence[Workload], options: Options, num_runs: int, path: Path | None) -> bool:
    """Run the workloads; print their rows and write them to `path` after each workload; returns whether all promises held."""
    rows: list[Measurement] = []
    print(HEADING, flush=True)
    for workload in workloads:
        work = workload.load()
        found = medians([work(workload.name, options) for _ in range(num_runs)])
        print("".join(f"{line(row)}\n" for row in found), end="", flush=True)
        rows += found
        if path is not None:
            write_measurements(rows, path)
    return all(row.holds for row in rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["curves"]:  # in the environment of a user's run
        sys.exit(import_module("bench.curves").main(sys.argv[2:]))
    if sys.argv[1:2] == ["time-to-reward"]:
        sys.exit(import_module("bench.time_to_reward").main(sys.argv[2:]))
    if sys.argv[1:2] in (["compare"], ["sensitivity"]):
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the present run like Ctrl-C
        sys.exit(import_module(f"bench.schedules.{sys.argv[1]}").main(sys.argv[2:]))
    wanted = {"OMP_NUM_THREADS": "1", **os.environ, **ENVIRONMENT}
    if wanted != dict(os.environ):  # the C library reads its tunables when a process starts
        os.execve(sys.executable, [sys.executable, "-m", "bench", *sys.argv[1:]], wanted)
    sys.exit(main(sys.argv[1:]))
