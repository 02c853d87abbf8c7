"""Placement: which role, host and GPU each of torchrun's ranks gets.

The functions depend on numbers only, so all supervisors compute the same placement.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from msgspec import structs
from msgspec.structs import astuple

from ..comm.errors import SettingError
from ..comm.recipe import Recipe, RoleSettings, RunSettings, TrainerSettings
from ..relay.weights.partners import Partners, partners
from .config.hosts import JOINED_HOST

RESTARTABLE = frozenset({"actor", "hub", "relay", "rollout", "shard", "reference", "task", "front"})
"""Roles whose processes are started again when they die; the death of any other ends the run.

The hub continues where its journal ends. A relay's weights survive in its supervisor's memory; its rows survive in another
relay, or are generated again.
"""


def is_restartable(role: str, run: RunSettings, trainer: TrainerSettings) -> bool:
    """Whether a process of a role is started again. The project's own trainer continues from its checkpoint and saved rows."""
    is_own = ":" not in trainer.engine
    return role in RESTARTABLE and (role != "actor" or (is_own and run.save_rows != "none"))


@dataclass(frozen=True, slots=True)
class Placement:
    """The role of one rank, and its host. `slot` counts the ranks of the host that use a GPU; relays and tasks have none."""

    role: str
    index: int
    host: int
    slot: int | None

    @property
    def name(self) -> str:
        """The name in logs and messages, such as `rollout-1`."""
        return f"{self.role}-{self.index}"


def actors_partners(rank: int, places: Iterable[Placement]) -> Partners | None:
    """The actor ranks on other hosts with which this one exchanges copies of the training state; None without."""
    hosts = {place.index: place.host for place in places if place.role == "actor"}
    return partners(rank, [hosts[index] for index in sorted(hosts)])


def count_relays(roles: RoleSettings, num_hosts: int = 1) -> int:
    """The number of relays: the recipe's, or one for each host."""
    return num_hosts if roles.relay is None else roles.relay


def count_ranks(roles: RoleSettings, num_hosts: int = 1) -> int:
    """The number of ranks of all roles."""
    return sum(astuple(structs.replace(roles, relay=count_relays(roles, num_hosts))))


def with_relays(recipe: Recipe, num_hosts: int) -> Recipe:
    """The recipe with its number of relays."""
    return structs.replace(recipe, roles=structs.replace(recipe.roles, relay=count_relays(recipe.roles, num_hosts)))


def place_joining(rollouts: int, relays: int, tp: int, first_replica: int, first_relay: int) -> list[Placement]:
    """The placement of the ranks of a host that joins a running job, which has so many replicas and relays already."""
    ranks = _replicas(rollouts, tp, first_replica)
    places = [Placement(role, index, JOINED_HOST, slot) for slot, (role, index) in enumerate(ranks)]
    return places + [Placement("relay", first_relay + number, JOINED_HOST, None) for number in range(relays)]


def place_ranks(roles: RoleSettings, hosts: Sequence[int] = (), tp: int = 1) -> list[Placement]:
    """The placement of each rank, `[sum(hosts)]`, on hosts with so many ranks, by default on one; raises `SettingError` if the counts do not fit.

    Relays take the last ranks of the hosts: one per host first, and first those with the fewest ranks, which may be hosts
    without a GPU. The other ranks are actors, then rollouts, references and tasks, in rank order, so rank 0 is an actor.
    The first of the `tp` ranks of a replica is its `rollout`, the others are its `shard`s; all are on one host.
    """
    check_replicas(roles, tp)
    hosts = hosts or [count_ranks(roles)]
    num_hosts = len(hosts)
    world_size = sum(hosts)
    wanted = count_ranks(roles, num_hosts)
    if wanted != world_size:
        raise SettingError(
            f"roles.actor + roles.relay + roles.reference + roles.task + roles.rollout = {wanted}, but torchrun started {world_size} ranks;"
            f" change roles or start torchrun with {_fitting_counts(wanted, num_hosts)}"
        )
    relay_of_rank = _place_relays(count_relays(roles, num_hosts), hosts)
    places: list[Placement] = []
    slots = [0] * num_hosts
    workers = iter(
        [("actor", i) for i in range(roles.actor)]
        + _replicas(roles.rollout, tp)
        + [(role, i) for role, count in (("reference", roles.reference), ("task", roles.task)) for i in range(count)]
    )
    for rank, host in enumerate(host for host, ranks in enumerate(hosts) for _ in range(ranks)):
        if rank in relay_of_rank:
            places.append(Placement("relay", relay_of_rank[rank], host, None))
        else:
            role, index = next(workers)
            on_cpu = role == "task"
            places.append(Placement(role, index, host, None if on_cpu else slots[host]))
            slots[host] += not on_cpu
    _check_replicas_on_one_host(places, tp)
    return places


def _fitting_counts(num_ranks: int, num_hosts: int) -> str:
    """The options that start so many ranks."""
    if num_ranks % num_hosts:
        return f"--nproc-per-node {num_ranks} on one host, or a count for each, such as --nproc-per-node 4,4,1"
    return f"--nproc-per-node {num_ranks // num_hosts}" + (f" on {num_hosts} hosts" if num_hosts > 1 else "")


def _replicas(num_ranks: int, tp: int, first: int = 0) -> list[tuple[str, int]]:
    """Role and index of the generator's ranks, replica by replica from number `first` on."""
    others = tp - 1
    return [
        ("rollout", i) if rank == 0 else ("shard", i * others + rank - 1)
        for i in range(first, first + num_ranks // tp)
        for rank in range(tp)
    ]


def _check_replicas_on_one_host(placements: list[Placement], tp: int) -> None:
    ranks = [place for place in placements if place.role in ("rollout", "shard")]
    for first in range(0, len(ranks), tp):
        if len({place.host for place in ranks[first : first + tp]}) > 1:
            raise SettingError(
                f"rollout.tp={tp}: the ranks of {ranks[first].name} would be on two hosts; change roles so that each host"
                " has room for whole replicas"
            )


def _place_relays(num_relays: int, hosts: Sequence[int]) -> dict[int, int]:
    """Rank -> relay index: the last free rank of each host in turn; rank 0 is never a relay."""
    by_size = sorted(zip(hosts, accumulate(hosts), strict=True), key=lambda host: host[0])
    free = [[rank for rank in range(end - ranks, end) if rank > 0] for ranks, end in by_size]
    relay_of_rank: dict[int, int] = {}
    while len(relay_of_rank) < num_relays:
        for ranks in free:
            if ranks and len(relay_of_rank) < num_relays:
                relay_of_rank[ranks.pop()] = len(relay_of_rank)
    return relay_of_rank


def visible_devices(placement: Placement, gpus: Sequence[str], staging: str = "") -> str:
    """`CUDA_VISIBLE_DEVICES` of a rank on a host with these GPUs: one each in order, shared when there are too few.

    A relay has only `staging`, the GPU that `staging_gpu` found for it.
    """
    if placement.slot is None:
        return staging if placement.role == "relay" else ""
    return gpus[placement.slot % len(gpus)] if gpus else ""


def processes_on(placements: Sequence[Placement], placement: Placement, gpus: Sequence[str]) -> int:
    """The number of ranks on the GPU of one of them; 1 for a rank without a GPU."""
    device = visible_devices(placement, gpus) if placement.slot is not None else ""
    on_host = [place for place in placements if place.host == placement.host and place.slot is not None]
    return max(1, sum(visible_devices(place, gpus) == device for place in on_host)) if device else 1


def check_replicas(roles: RoleSettings, tp: int) -> None:
    """Raise `SettingError` unless the generator's ranks make whole replicas."""
    if roles.rollout % tp:
        raise SettingError(
            f"roles.rollout={roles.rollout} is not a multiple of rollout.tp={tp}, the ranks of a replica"
        )


def staging_gpu(link: str, placements: Sequence[Placement], host: int, gpus: Sequence[str]) -> str:
    """The GPU of a host's relays with comm.link=nccl: the first that no actor or rollout uses, since NCCL refuses both ends of a link on one.

    Empty for another link or a host without relays. Raises `SettingError` if the actors and rollouts use every GPU.
    """
    here = [place for place in placements if place.host == host]
    if link != "nccl" or all(place.role != "relay" for place in here):
        return ""
    taken = {visible_devices(place, gpus) for place in here if place.slot is not None}
    free = [gpu for gpu in gpus if gpu not in taken]
    if not free:
        raise SettingError(
            f"comm.link: nccl needs a GPU of host {host} for the relays, but actors and rollouts use all {len(gpus)}; use tcp"
        )
    return free[0]
