"""The generator: continuous batching over a paged cache. Requests enter and leave at every step.

`Engine.step` is the story: make room, prefill chunks of waiting prompts, let cached ones fork into rows, decode one token
for every row. It needs nothing of the rest of the project but the policy.
"""

import logging
from collections.abc import Generator, Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm.errors import SettingError
from ...trainer.policy.model import Policy, default_device, load_policy
from ...trainer.policy.tensor_parallel import TensorParallel
from .attention_backends import page_size_for
from .batch import DecodeBatch
from .exact_check import check_exact
from .kv_cache import KVCache, PagePool
from .memory import available_memory, plan_cache
from .runner import Runner
from .sampling import Sample, SamplingParams, stream_key
from .scheduler import Scheduler
from .sequence import Completion, Sequence, SequenceGroup, SequenceProgress, SequenceState
from .text import Text

log = logging.getLogger(__name__)


class InFlightStep(NamedTuple):
    """A step that is launched and not read yet."""

    sequences: list[Sequence]
    sample: Sample
    ready: torch.cuda.Event | None


class Engine:
    """Generates with one replica of a policy.

    policy: a checkpoint's path, or a `Policy` whose parameters the caller may overwrite in place between steps (and must
    then announce with `weights_changed`); `dtype` and `device` (None: a GPU if there is one) count for a path only.
    max_running: sequences that decode together. seed: of all sampling that has no seed of its own.
    kv_gb, gpu_share: memory of the KV cache, see `budget`. attention: back-end of decoding, see `backends`; page_size: by it.
    prefill_tokens: most prompt tokens of one step. exact: log-probabilities are those of an exact `Policy` bit for bit.
    tp_group: of a path, the ranks of one tensor-parallel replica (a `Policy` comes `split`); all of them get the same calls
    and give the same answers.
    `description` says what was chosen.
    """

    def __init__(
        self,
        policy: str | Path | Policy,
        dtype: str | torch.dtype = "float32",
        max_running: int = 32,
        seed: int = 0,
        *,
        kv_gb: float | None = None,
        page_size: int | None = None,
        exact: bool = False,
        prefill_tokens: int = 2048,
        attention: str = "auto",
        device: str | None = None,
        gpu_share: float = 0.85,
        tokenizer: Any = None,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        if max_running < 1:
            raise SettingError(f"generator.max_running must be at least 1, not {max_running}")
        if not isinstance(policy, Policy):
            self.text = Text(tokenizer) if tokenizer is not None else Text.of(policy)
            policy = load_policy(
                policy, dtype, device or default_device(exact=exact), tensor_parallel=TensorParallel(tp_group)
            )
        else:
            self.text = Text(tokenizer)
        self.policy = policy
        self.seed = seed
        page_size = page_size or page_size_for(attention)
        num_kv_heads = policy.num_kv_heads // policy.tensor_parallel.size
        budget = plan_cache(policy, page_size, max_running, kv_gb, available_memory(policy.device, gpu_share))
        self.pool = PagePool(budget.num_pages, page_size)
        shape = (budget.num_pages, num_kv_heads, page_size, policy.head_dim)
        self.cache = KVCache(policy.num_layers, shape, policy.dtype, policy.device)
        self.scheduler = Scheduler(self.pool, max_running, prefill_tokens)
        self.batch = DecodeBatch(self.pool, -(-policy.context // page_size), policy.vocab_size, policy.device)
        self.runner = Runner(policy, self.cache, max_running, exact, attention)
        self.description = f"{self.runner.description}, {budget}"
        log.info("generator: %s", self.description)
        self._is_checked = not exact
        self._is_async = policy.device.type == "cuda"
        self._in_flight: InFlightStep | None = None
        self._finished_early: list[Completion] = []
        self._next_id = 0

    # ------------------------------------------------------------------------------------------------ lists in, lists out

    def generate(
        self, prompts: Many[list[int]] | Many[str], params: SamplingParams | Many[SamplingParams] | None = None
    ) -> list[Completion]:
        """Completions in the prompts' order, `n` of them per prompt; prompts are token ids or text."""
        order: list[int] = []
        found: dict[int, Completion] = {}
        for completion in self.stream(prompts, params, order):
            found[completion.trajectory_id] = completion
        return [found[trajectory_id] for trajectory_id in order]

    def stream(
        self,
        prompts: Many[list[int]] | Many[str],
        params: SamplingParams | Many[SamplingParams] | None = None,
        order: list[int] | None = None,
    ) -> Generator[Completion, None, None]:
        """Completions as they finish; `order` receives the trajectory ids in the prompts' order.

        Not to be mixed with `add_group`. A caller that stops early leaves nothing behind.
        """
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Many) else list(params)
        if len(each) != len(prompts):
            raise SettingError(f"params: {len(each)} sampling parameters for {len(prompts)} prompts")
        encoded = [self.text.encode(prompt) for prompt in prompts]
        for prompt in encoded:
            self._check_prompt(prompt)
        mine: set[int] = set()
        for prompt, wanted in zip(encoded, each, strict=True):
            ids = list(range(self._next_id, self._next_id + wanted.n))
            self._next_id += wanted.n
            streams = list(range(wanted.n)) if wanted.seed is not None else ids
            self._add(prompt, wanted, ids, streams)
            mine.update(ids)
            if order is not None:
                order.extend(ids)
        try:
            while mine:
                for completion in self.step():
                    mine.remove(completion.trajectory_id)
                    yield completion
        finally:
            for trajectory_id in mine:
                self.cancel(trajectory_id)

    # ------------------------------------------------------------------------------------------------------ step by step

    def add_group(
        self, prompt_ids: list[int], params: SamplingParams | Many[SamplingParams], trajectory_ids: Many[int]
    ) -> None:
        """Queue one sample per trajectory id (64-bit numbers of the caller's) of a prompt; `params.n` is not used.

        params: of all samples, or of each. Raises SettingError for a prompt that the policy cannot take.
        """
        self._add(prompt_ids, params, trajectory_ids, trajectory_ids)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Prefill what may enter, decode one token for every running sequence; returns those that finished."""
        scheduler = self.scheduler
        finished, self._finished_early = self._finished_early, []
        if self._must_drain():
            finished += self._drain()
        has_changed = bool(scheduler.make_room())
        chunks = scheduler.next_chunks()
        if chunks:
            self.runner.prefill(chunks)
        for fork in scheduler.fork_ready():
            has_changed = True
            if fork.source >= 0:
                self.cache.copy_page(fork.source, fork.target)
        if has_changed or self.batch.sequences != scheduler.running:
            for source, target in (*scheduler.compact(is_shared=False), *scheduler.compact(is_shared=True)):
                self.cache.copy_page(source, target)
            self.batch.refill(scheduler.running)
        elif len(self.batch):
            self.batch.extend()
        return finished + self._decode() if len(self.batch) else finished

    def pause(self, trajectory_id: int) -> bool:
        """Hold a running trajectory; it keeps its pages until others need them. False if it does not run."""
        self._finished_early += self._drain()
        return self.scheduler.pause(trajectory_id)

    def resume(self, trajectory_id: int, token_ids: Many[int] = ()) -> None:
        """Let a paused trajectory go on, after tokens that its environment says (their log-probability counts as 0)."""
        self.scheduler.resume(trajectory_id, token_ids)

    def cancel(self, trajectory_id: int) -> bool:
        """Forget a trajectory; False if it is not here."""
        self._finished_early += self._drain()
        return self.scheduler.cancel(trajectory_id) is not None

    def unfinished(self) -> list[SequenceProgress]:
        """Every trajectory that is queued, running or paused."""
        waiting = [s for group in self.scheduler.waiting for s in group.sequences]
        held = (*self.scheduler.running, *self.scheduler.paused, *waiting)
        return [SequenceProgress(s.trajectory_id, s.num_tokens) for s in held]

    @property
    def num_running(self) -> int:
        """Sequences that decode."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row, for pages or for their prompt's prefill."""
        return sum(len(group.sequences) for group in self.scheduler.waiting)

    @property
    def num_recomputed(self) -> int:
        """Tokens so far whose keys and values were given up, to be computed again."""
        return self.scheduler.num_recomputed

    @property
    def idle(self) -> bool:
        """Nothing is queued, running or paused."""
        return not (self.scheduler.running or self.scheduler.waiting or self.scheduler.paused or self._finished_early)

    def bind(self, views: Mapping[str, Tensor]) -> None:
        """Make these tensors (by parameter name) the weights, without a copy; overwriting them later is a new version."""
        self.policy.bind(views)
        self.runner.bind()

    def weights_changed(self) -> None:
        """Announce that the parameters were overwritten in place."""
        self.runner.refresh()

    def recompute(self) -> None:
        """Forget all keys and values, for weights that are about to change; what was running is prefilled again."""
        self._finished_early += self._drain()
        self.scheduler.forget()

    def export_sequences(self, trajectory_ids: Many[int], with_cache: bool = False) -> list[SequenceState]:
        """Remove trajectories, wherever they are, for another engine on the same weights (or this one, later).

        with_cache: also their keys and values, where they have any; else `import_sequences` computes them again. One that has finished
        meanwhile stays and comes out of the next `step`.
        """
        self._finished_early += self._drain()
        parcels = []
        for trajectory_id in trajectory_ids:
            sequence = self.scheduler.find(trajectory_id)
            if sequence is None:
                assert any(done.trajectory_id == trajectory_id for done in self._finished_early), (
                    f"no trajectory {trajectory_id}"
                )
                continue
            cache = (
                self.cache.export(sequence.pages, sequence.num_cached) if with_cache and sequence.num_cached else None
            )
            self.scheduler.cancel(trajectory_id)
            parcels.append(sequence.export_state(cache))
        return parcels

    def import_sequences(self, states: Many[SequenceState]) -> None:
        """Go on with trajectories that another engine took out; they queue like new ones."""
        for parcel in states:
            self._check_prompt(parcel.prompt_ids)
            sequence = self._sequence(parcel.prompt_ids, parcel.params, parcel.trajectory_id, 0)
            sequence.restore(parcel)
            group = SequenceGroup([sequence], sequence.prompt_ids + sequence.token_ids)
            if parcel.cache is not None and self.scheduler.reserve(group, parcel.cache.shape[2]):
                self.cache.load(group.pages, parcel.cache)
                group.num_cached = parcel.cache.shape[2]
            self.scheduler.add(group)

    def check(self) -> None:
        """Assert that no page is lost or owned twice; free when idle."""
        self.scheduler.check()

    # ----------------------------------------------------------------------------------------------------------- inside

    def _add(
        self, prompt_ids: list[int], params: SamplingParams | Many[SamplingParams], ids: Many[int], streams: Many[int]
    ) -> None:
        each = [params] * len(ids) if isinstance(params, SamplingParams) else params
        if not self._is_checked:
            self._is_checked = True
            check_exact(self)
        self._check_prompt(prompt_ids)
        samples = zip(ids, each, streams, strict=True)
        sequences = [self._sequence(prompt_ids, wanted, sample, stream) for sample, wanted, stream in samples]
        self.scheduler.add(SequenceGroup(sequences, list(prompt_ids)))

    def _check_prompt(self, prompt_ids: list[int]) -> None:
        policy = self.policy
        if not prompt_ids:
            raise SettingError("a prompt has no tokens: remove it from data.path")
        if len(prompt_ids) >= policy.context:
            raise SettingError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room in the policy's context of {policy.context}: "
                "shorten the prompts of data.path or take a model.path with a longer context"
            )
        if max(prompt_ids) >= policy.vocab_size or min(prompt_ids) < 0:
            raise SettingError(f"a prompt has token ids outside the policy's vocabulary of {policy.vocab_size}")

    def _sequence(self, prompt_ids: list[int], params: SamplingParams, trajectory_id: int, stream: int) -> Sequence:
        strings = tuple(s for s in params.stops if isinstance(s, str))
        self.text.check_stops(strings)
        stop_ids = frozenset(s for s in params.stops if isinstance(s, int))
        if not params.ignore_eos:
            stop_ids |= self.policy.stop_ids
        limit = min(params.max_new_tokens, self.policy.context - len(prompt_ids))
        key = stream_key(self.seed if params.seed is None else params.seed, stream)
        return Sequence(trajectory_id, key, prompt_ids, params, limit, stop_ids, strings)

    def _decode(self) -> list[Completion]:
        """Launch a step. On a GPU read the one before meanwhile, so that the device never waits for the host."""
        batch = self.batch
        draw = self.runner.decode(batch)
        batch.advance(draw.tokens)
        for sequence in batch.sequences:
            sequence.num_cached += 1
        before, self._in_flight = self._in_flight, InFlightStep(batch.sequences, *draw.to_host())
        if not self._is_async:
            return self._drain()
        return [] if before is None else self._read(before)

    def _must_drain(self) -> bool:
        """Whether the next step's rows cannot be known before the launched one is read."""
        scheduler = self.scheduler
        if self._in_flight is None:
            return False
        may_enter = bool(scheduler.waiting) and len(scheduler.running) < scheduler.max_running
        is_short = self.pool.num_free < len(scheduler.running)
        is_last = any(len(s.token_ids) + 1 >= s.limit for s in scheduler.running)
        return may_enter or is_short or is_last or self.batch.sequences != scheduler.running

    def _drain(self) -> list[Completion]:
        """Read the step that is launched, if any."""
        pending, self._in_flight = self._in_flight, None
        return [] if pending is None else self._read(pending)

    def _read(self, step: InFlightStep) -> list[Completion]:
        draw = step.sample
        if step.ready is not None:
            step.ready.synchronize()
        logprobs = draw.logprobs.tolist()
        raw = logprobs if draw.raw is None else draw.raw.tolist()
        finished = []
        for sequence, *drawn in zip(step.sequences, draw.tokens.tolist(), logprobs, raw, strict=True):
            if sequence.finish_reason:
                continue  # it ended one step earlier, which was not read when this one was launched
            sequence.append(*drawn)
            if self.text.has_ended(sequence):
                sequence.finish_reason = "stop"
            if sequence.finish_reason:
                finished.append(sequence)
        for sequence in finished:
            self.scheduler.finish(sequence)
        if not self.scheduler.running:
            self.batch.sequences, self._in_flight = [], None
        return [sequence.completion(self.text.decode(sequence)) for sequence in finished]
