"""The trainer's ranks: their process group, FSDP2 shards, and collectives.

Only rank 0 talks to the hub. It broadcasts the metadata of each batch, and each rank fetches its own rows.
"""

import json
import os
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..comm.environment import GPU_PROCESSES
from ..comm.errors import PeerGone
from ..comm.fleet import Fleet, Member, StoreFleet, member_name
from ..comm.links.host import bind_process_groups
from ..comm.links.meeting import meet
from ..comm.links.process_group import meeting_store
from ..comm.messages import Message, decode, encode
from ..comm.recipe import Recipe, TrainerSettings
from ..comm.waits import waiting
from .memory import PolicySizes, wants_checkpointing, wants_one_sum
from .policy.adapter_files import AdapterBase, start_adapter, start_folder
from .policy.families import family_of
from .policy.lora import adapter_shapes, add_adapter, target_layers

if TYPE_CHECKING:
    from .policy.model import Policy

_WATCH_S = 0.2
_SLACK_S = 60.0  # a rank waits while rank 0 waits for the hub, so its bound is longer


class ActorGroup:
    """The ranks of the trainer; with `size` 1 the collectives do nothing, and nothing is sharded except for offload."""

    def __init__(
        self, rank: int, size: int, device: torch.device, deadline_s: float, settings: TrainerSettings | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.incarnation = 1
        """The trainer's incarnation, which is rank 0's."""
        self.sums_once = False
        """Whether gradients of the policy are summed over the ranks for each update alone, and not in each micro-batch."""
        self.deadline_s = deadline_s
        self._settings = settings or TrainerSettings()
        self._is_connected = False
        self._is_closed = threading.Event()

    @staticmethod
    def join(
        fleet: Fleet, size: int, device: torch.device, deadline_s: float, settings: TrainerSettings
    ) -> "ActorGroup":
        """Open the process group through the run's store. It is the default group of the trainer's processes."""
        group = ActorGroup(fleet.me.index, size, device, deadline_s, settings)
        group.incarnation = fleet.incarnation
        if size > 1:
            assert isinstance(fleet, StoreFleet), "several actor ranks need a fleet of processes"
            bind_process_groups(fleet.address)
            members, meeting = meet(fleet, [member_name("actor", rank) for rank in range(size)], deadline_s)
            group.incarnation = members[0].incarnation
            group.start_watch(fleet, members)
            found = meeting_store(fleet.store, fleet.address, meeting, deadline_s, is_host=group.is_lead)
            group.connect(found)  # pyright: ignore[reportArgumentType]
        return group

    def start_watch(self, fleet: Fleet, members: Sequence[Member]) -> None:
        """Start the thread that ends this process when another rank has started again, until `close`: they restart together.

        A rank that is silent is waited for; it may be frozen.
        """

        def watch() -> None:
            while not self._is_closed.wait(_WATCH_S):
                present = {member.name: member.incarnation for member in fleet.members("actor")}
                for member in members:
                    if present.get(member.name, 0) > member.incarnation and not self._is_closed.is_set():
                        raise PeerGone(f"{member.name} has restarted, so the other ranks restart too")

        threading.Thread(target=watch, name="actor watch", daemon=True).start()

    def connect(self, store: Store) -> None:
        """Open the process group on this store; a collective."""
        if self.device.type == "cuda":
            # A device mesh would choose a GPU by torchrun's LOCAL_RANK, though this process sees its own GPU alone.
            torch.cuda.set_device(self.device)
        with waiting("the other actor ranks", "their process group", self.deadline_s):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self.deadline_s + _SLACK_S),
            )
        self._is_connected = True

    def clone_for_thread(self) -> "ThreadGroup | None":
        """A second group of the same ranks, for the collectives of a thread of each; None for a single rank."""
        return ThreadGroup(self.rank, self.size, self.deadline_s + _SLACK_S) if self.size > 1 else None

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0, which talks to the hub and writes the run folder."""
        return self.rank == 0

    def load(self, recipe: Recipe, adapter_base: AdapterBase) -> "Policy":
        """The policy of `model.path` for training: with its adapter, sharded, its layers compiled and its activations checkpointed if need be."""
        from .policy.model import load_policy  # with transformers, which emulated devices do not need

        def prepare(policy: "Policy") -> None:
            """Give a policy without weights its adapter, if `lora` asks for one, and shard it."""
            lora = recipe.lora
            if lora.rank:
                # The weights below are rounded as those of the rollouts.
                base = torch.bfloat16 if recipe.model.compute_type == "bfloat16" else torch.float32
                start = None
                if lora.path:
                    shapes = adapter_shapes(target_layers(policy.model, lora.targets), lora.rank)
                    start = start_adapter(shapes, lora, start_folder(recipe.run.dir, lora), adapter_base)
                add_adapter(policy.model, lora, recipe.run.seed, base, start)
            self.shard(policy, layer_type(recipe, policy))

        device = self.device
        policy = load_policy(recipe.model.path, "float32", device, shard=prepare)
        if recipe.trainer.compile:
            policy.compile_layers()
        num_bytes, num_processes = self.smallest_gpu()
        sizes = PolicySizes.of(policy.config.to_dict())
        if wants_checkpointing(sizes, recipe, num_bytes):
            policy.checkpoint_activations()
        self.sums_once = wants_one_sum(sizes, recipe, num_bytes, num_processes)
        return policy

    def smallest_gpu(self) -> tuple[float | None, int]:
        """Bytes of the smallest GPU of a rank, and the most processes of the run on one; None and 1 without GPUs. A collective.

        All ranks get the same numbers. If they decided by different ones, they would wait for each other's collectives forever.
        """
        if self.device.type != "cuda":
            return None, 1
        size = float(torch.cuda.mem_get_info(self.device)[1])
        least, most = self.all_reduce_max([-size, float(os.environ.get(GPU_PROCESSES, "1"))])
        return -least, int(most)

    def shard(self, policy: "Policy", layer_type: torch.dtype | None = None) -> None:
        """Shard the policy by rows over the ranks, each layer and then the rest, and place it on the device.

        Whole layers are gathered in `layer_type`, which their products have; None is the type of the weights. The rest stays in the type
        of the weights: the embedding begins the residual stream, whose type is fp32.
        """
        layers: Sequence[nn.Module] = policy.model.base_model.layers  # pyright: ignore[reportAssignmentType]
        for layer in layers:
            self.shard_module(layer, layer_type)
        self.shard_module(policy)

    def shard_module(self, module: nn.Module, whole_type: torch.dtype | None = None) -> None:
        """Shard a module, but for modules inside that are sharded already, by rows over the ranks, and place it on the device.

        Parameters may be uninitialised: only a rank's own rows are touched. With `trainer.shard_ranks`, ranks of the same
        place in their group hold the same rows, and gradients are also summed over them (HSDP). With `trainer.offload` the
        shards are in host memory. Gradients are summed in the type of the weights, in whatever type whole weights are gathered.
        """
        if self.size == 1 and not self._settings.offload:
            module.to(self.device)
            return
        is_offloaded = self._settings.offload and self.device.type == "cuda"
        mixed = (
            MixedPrecisionPolicy()
            if whole_type is None
            else MixedPrecisionPolicy(whole_type, torch.float32, cast_forward_inputs=False)
        )
        offload = CPUOffloadPolicy() if is_offloaded else OffloadPolicy()
        fully_shard(module, mesh=self._mesh, mp_policy=mixed, offload_policy=offload)

    @cached_property
    def _mesh(self) -> DeviceMesh:
        if not self._is_connected:
            self.connect(HashStore())
        shards = self._settings.shard_ranks or self.size
        sizes = (self.size,)
        names = ("shard",)
        if shards < self.size:
            sizes = (self.size // shards, shards)
            names = ("replicate", "shard")
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=names)

    def sum_gradients(self, policy: nn.Module, *, is_wanted: bool) -> None:
        """Whether backward passes from now on sum the gradients over the ranks, those of earlier ones included, where they need not always."""
        if self.sums_once:
            assert isinstance(policy, FSDPModule)
            policy.set_requires_gradient_sync(is_wanted)

    def reshard(self, *modules: nn.Module) -> None:
        """Free the whole weights that a forward pass without a backward pass has gathered."""
        for module in modules:
            if isinstance(module, FSDPModule):
                module.reshard()

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def all_reduce_max(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def union(self, names: Iterable[str]) -> list[str]:
        """The names of all ranks, sorted; a collective."""
        text = json.dumps(sorted(names)).encode()
        length = int(self.all_reduce_max([len(text)])[0])
        texts = torch.zeros(self.size, length, dtype=torch.uint8)
        texts[self.rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if self.size > 1:
            dist.all_reduce(texts, dist.ReduceOp.SUM)
        return sorted({name for row in texts for name in json.loads(row.numpy().tobytes().rstrip(b"\0"))})

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks, in the order of the ranks, on rank 0, and nothing on the others; a collective.

        A rank without bytes sends nothing. So this costs what is sent, and not the longest part for each rank, as `dist.gather` does.
        """
        if self.size == 1:
            return [data]
        lengths = self.all_reduce_sum([float(len(data) * (rank == self.rank)) for rank in range(self.size)])
        if not self.is_lead:
            if data:
                dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)
            return []
        parts = [data]
        for rank, length in enumerate(lengths[1:], 1):
            part = torch.empty(int(length), dtype=torch.uint8)
            if length:
                dist.recv(part, rank)
            parts.append(part.numpy().tobytes())
        return parts

    def close(self) -> None:
        self._is_closed.set()
        if self._is_connected:
            dist.destroy_process_group()
            self._is_connected = False

    def _reduce(self, values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation)
        return tensor.tolist()


class ThreadGroup:
    """A Gloo group of the trainer's ranks for the threads of their streams (`ThreadTeam`)."""

    def __init__(self, rank: int, size: int, deadline_s: float) -> None:
        self.rank = rank
        self.size = size
        self._deadline_s = deadline_s
        ranks = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
        assert isinstance(ranks, dist.ProcessGroup)
        self.process_group = ranks

    def broadcast(self, message: Message | None) -> Message:
        """Rank 0's message on all ranks; the others pass None and wait for it."""
        with waiting("actor 0", "the next message", self._deadline_s):
            body = torch.frombuffer(bytearray(encode(message)), dtype=torch.uint8) if message else torch.empty(0)
            length = torch.tensor([len(body)])
            dist.broadcast(length, 0, group=self.process_group)
            if message is None:
                body = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(body, 0, group=self.process_group)
        return decode(body.numpy().tobytes())

    def true_anywhere(self, flags: Sequence[bool]) -> list[bool]:
        tensor = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.process_group)
        return tensor.bool().tolist()


def layer_type(recipe: Recipe, policy: "Policy") -> torch.dtype | None:
    """The type in which whole layers are gathered; None: that of the weights.

    Half precision for what autocast would round anyway, norms and biases besides, as rollouts have them. Experts and adapters compute in fp32.
    """
    is_half = recipe.model.compute_type == "bfloat16" and not recipe.lora.rank
    return torch.bfloat16 if is_half and family_of(policy.config).experts is None else None


def gather_full(tensor: Tensor) -> Tensor:
    """The whole tensor from the shards of all ranks; a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
