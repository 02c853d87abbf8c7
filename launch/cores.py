"""Cores: how many threads each process of a host gets.

`Cores.threads` depends on numbers only, so all supervisors of a host compute the same. Threads that wait sleep: one that spins takes
the core that another process needs, and a step then takes several times as long.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..comm.environment import CORES, NUM_THREADS, OVERLAP_CORES, environment_of_threads
from ..comm.errors import SettingError
from ..comm.recipe import Recipe
from ..relay.queue.schedules import schedule_of
from ..trainer.memory import PolicySizes
from .config.model_files import read_config

SMALL_POLICY = 10_000_000
"""Parameters below which a process has one thread: its matrices are too small to share."""
ROLLOUT_SHARE = 4
"""The rollouts get one core in this many, if trainer and rollouts work at the same time."""
GPU_THREADS = 4
"""Most threads of a process with a GPU."""
_THREADED = ("actor", "rollout", "shard", "reference")
_CGROUPS = Path("/sys/fs/cgroup")
_TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of one host, and the processes that share them."""

    number: int
    """Cores that the processes of this host may use."""
    ranks: Mapping[str, int]
    """The number of ranks of each role on this host; relays and tasks, which need almost no CPU time, do not count."""
    takes_turns: bool = False
    """Whether trainer and rollouts take turns."""
    is_small: bool = False
    """Whether no process has work for a second thread: the policy is small, or the devices are emulated."""
    has_gpus: bool = False
    updates_on_host: bool = False
    """Whether a trainer with GPUs updates the weights on the cores."""
    asked: Mapping[str, int | None] = field(default_factory=dict)
    """The number of threads that the recipe sets for each role; None leaves it to this host."""

    def threads(self, role: str) -> int:
        """The number of threads of each process of a role."""
        if not self.ranks.get(role):
            return 1
        return self.asked.get(role) or max(1, self._share(role))

    def environment(self, role: str, *, has_all: bool) -> dict[str, str]:
        """The variables of a role's process; `has_all`: all ranks of the run are on this host."""
        facts = (self.number, self.threads("actor"), self.threads("rollout"), int(self.is_small))
        told = {CORES: ",".join(map(str, facts))} if has_all and not self.has_gpus else {}
        return environment_of_threads(self.threads(role)) | told

    def _share(self, role: str) -> int:
        if self.is_small:
            return 1
        num_ranks = sum(self.ranks.values())
        num_trainers = self.ranks.get("actor", 0)
        if self.has_gpus:
            share = self.number // num_ranks
            return share if role == "actor" and self.updates_on_host else min(GPU_THREADS, share)
        if role == "actor":
            return self._of_trainers() // num_trainers
        works_alone = self.takes_turns or not num_trainers
        return (self.number if works_alone else self.number // ROLLOUT_SHARE) // (num_ranks - num_trainers)

    def _of_trainers(self) -> int:
        """The cores of all ranks of the trainer together."""
        if self.takes_turns or self.number <= OVERLAP_CORES:
            return self.number
        others = sum(count * self.threads(role) for role, count in self.ranks.items() if role != "actor")
        return max(self.number - others, self.number // 2)


def cores_of(recipe: Recipe, roles: Sequence[str], *, has_gpus: bool) -> Cores:
    """The cores of this host, whose ranks have these roles."""
    schedule = schedule_of(recipe.run, recipe.rollout)
    trainer = recipe.trainer.threads
    rollout = recipe.rollout.threads
    staleness = recipe.queue.max_staleness if schedule.staleness is None else schedule.staleness
    return Cores(
        usable_cores(),
        {role: roles.count(role) for role in _THREADED if role in roles},
        takes_turns=staleness == 0,
        is_small=recipe.is_emulated or is_small(recipe.model.path),
        has_gpus=has_gpus,
        updates_on_host=recipe.trainer.offload,
        asked={"actor": trainer, "reference": trainer, "rollout": rollout, "shard": rollout},
    )


def is_small(model_path: str) -> bool:
    """Whether a policy is too small for a second thread; one whose size is not known here counts as large. Downloads nothing."""
    folder = Path(model_path)
    if model_path and not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        with suppress(ValueError):  # not an id of the Hub
            folder = Path(str(try_to_load_from_cache(model_path, "config.json"))).parent
    try:
        return PolicySizes.of(read_config(folder)).num_parameters < SMALL_POLICY
    except SettingError:
        return False


def ignored_threads(cores: Cores) -> Iterator[str]:
    """A warning if the user's OMP_NUM_THREADS is not the number that the processes of this host get.

    torchrun sets it to 1 in its ranks, so a 1 there is not the user's choice.
    """
    wanted = os.environ.get(NUM_THREADS, "")
    if not wanted or (wanted == "1" and "LOCAL_WORLD_SIZE" in os.environ):
        return
    chosen = {role: cores.threads(role) for role in cores.ranks}
    if {str(threads) for threads in chosen.values()} != {wanted}:
        yield (
            f"{NUM_THREADS}={wanted} of the environment has no effect on the processes of a run; they have"
            f" {', '.join(f'{role} {threads}' for role, threads in chosen.items())}: set trainer.threads and rollout.threads to change that"
        )


def usable_cores() -> int:
    """Cores that this process may use: those of its affinity mask, and at most its cgroups' share of time; at least 1.

    Two hardware threads of one core count once.
    """
    quotas = cpu_quotas(Path("/proc/self/cgroup"), _CGROUPS)
    return max(1, int(min([float(num_cores(os.sched_getaffinity(0), _TOPOLOGY)), *quotas])))


def num_cores(cpus: Iterable[int], topology: Path) -> int:
    """The number of cores to which these CPUs belong, by the kernel's folder; each is one where that says nothing."""
    found = set[str]()
    for cpu in cpus:
        siblings = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        found.add(siblings.read_text().strip() if siblings.exists() else f"cpu {cpu}")
    return len(found)


def cpu_quotas(own: Path, root: Path) -> Iterator[float]:
    """The CPUs' worth of time that each cgroup of this process may use, of both versions; nothing without a bound."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            for top in [root] if not controllers else [root / controllers, root / "cpu"]:
                folder = top / path.lstrip("/")
                for group in [folder, *folder.parents]:
                    yield from _quota(group)
                    if group == top:
                        break


def _quota(group: Path) -> Iterator[float]:
    """The bound of one cgroup: `cpu.max` of version 2, two files of version 1."""
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        yield int(quota) / int(period)  # "max" means no limit
    with suppress(OSError, ValueError):
        quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        if quota > 0:
            yield quota / period
