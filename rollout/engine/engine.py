"""The generator: continuous batching over a paged KV cache. Requests enter and leave at every step.

`Engine.step` makes room, prefills chunks of waiting prompts, forks cached prompts into rows, and decodes one token for
every row. It depends on the policy and on no other part of the project.
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
from . import exact_check
from .attention.backends import page_size_for
from .batch import DecodeBatch
from .kv_cache import KVCache
from .memory import available_memory, plan_cache
from .page_pool import PagePool
from .recurrent.state_cache import StateCache
from .recurrent.state_pool import StatePool
from .runner import Runner
from .sampling import Sample, SamplingParams
from .scheduler import Scheduler
from .sequence import Completion, Sequence, SequenceGroup, SequenceProgress, SequenceState
from .streams import stream_key
from .text import Text, check_prompt
from .to_device import check_device

log = logging.getLogger(__name__)


class InFlightStep(NamedTuple):
    """A step that is launched and whose sample is not read yet."""

    sequences: list[Sequence]
    sample: Sample
    ready: torch.cuda.Event | None


class Engine:
    """Generates with one replica of a policy.

    policy: a checkpoint's path, or a `Policy` whose parameters the caller may overwrite in place between steps (and must
    then announce with `weights_changed`). `dtype` and `device` (None: a GPU if there is one) apply to a path only.
    max_running: sequences that decode together. seed: of all sampling without a seed of its own.
    kv_gb, gpu_share: memory of the KV cache, see `memory.plan_cache`. attention: the back-end of decoding, see
    `attention.backends`; it determines the default of page_size. prefill_tokens: most prompt tokens of one step.
    prefix_cache: full pages of keys and values are found again by later prompts that begin with the same tokens.
    exact: log-probabilities equal those of an exact `Policy` bit for bit. tp_group: for a path, the ranks of one
    tensor-parallel replica (a `Policy` arrives `split`); all ranks get the same calls and return the same results.
    `description` names the choices.
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
        prefix_cache: bool = True,
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
            policy = load_policy(policy, dtype, device or default_device(), tensor_parallel=TensorParallel(tp_group))
        else:
            self.text = Text(tokenizer)
        check_device(policy.device)
        self.policy = policy
        self.seed = seed
        page_size = page_size or page_size_for(attention)
        self.runner = Runner(policy, max_running, exact)
        plan = plan_cache(policy, page_size, max_running, kv_gb, available_memory(policy.device, gpu_share))
        shape = (plan.num_pages, policy.num_kv_heads // policy.tensor_parallel.size, page_size, policy.head_dim)
        self.cache = KVCache(len(policy.kv_layers), shape, policy.dtype, policy.device)
        self.states: StateCache | None = None
        if policy.recurrent:
            self.states = StateCache(policy.recurrent, plan.num_states, policy.dtype, policy.device)
        self.runner.use(self.cache, attention, self.states)
        kept = plan.max_kept if prefix_cache else 0
        in_ranges = self.runner.attention.name == "pool"
        self.pool = PagePool(plan.num_pages, page_size, kept, in_ranges)
        self.scheduler = Scheduler(self.pool, max_running, prefill_tokens, policy.rope, StatePool(plan.num_states))
        self.batch = DecodeBatch(self.pool, policy, max_running)
        self.description = f"{self.runner.description}, {plan}"
        log.info("generator: %s", self.description)
        self._is_checked = not exact
        self._is_async = policy.device.type == "cuda"
        self._in_flight: InFlightStep | None = None
        self._finished_early: list[Completion] = []
        self._next_id = 0
        self.num_sampled = 0
        """Tokens drawn so far."""

    # ----------------------------------------------------------------------------------------------- lists of prompts

    def generate(
        self, prompts: Many[list[int]] | Many[str], params: SamplingParams | Many[SamplingParams] | None = None
    ) -> list[Completion]:
        """Completions in the prompts' order, `n` of them per prompt; prompts are token ids or text."""
        order: list[int] = []
        found = {completion.trajectory_id: completion for completion in self.stream(prompts, params, order)}
        return [found[trajectory_id] for trajectory_id in order]

    def stream(
        self,
        prompts: Many[list[int]] | Many[str],
        params: SamplingParams | Many[SamplingParams] | None = None,
        order: list[int] | None = None,
    ) -> Generator[Completion, None, None]:
        """Completions as they finish; `order` receives the trajectory ids in the prompts' order.

        Do not mix it with `add_group`. When the caller stops early, the rest is cancelled.
        """
        if isinstance(prompts, str):
            raise SettingError("prompts must be a list; put a single prompt into one")
        each = list(params) if isinstance(params, Many) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise SettingError(f"params: {len(each)} sampling parameters for {len(prompts)} prompts")
        encoded = [self.text.encode(prompt) for prompt in prompts]
        for prompt in encoded:
            check_prompt(prompt, self.policy)
        pending: set[int] = set()
        for prompt, own in zip(encoded, each, strict=True):
            ids = range(self._next_id, self._next_id + own.n)
            self._next_id += own.n
            self._add(prompt, own, ids, range(own.n) if own.seed is not None else ids)
            pending.update(ids)
            if order is not None:
                order.extend(ids)
        try:
            while pending:
                for completion in self.step():
                    pending.remove(completion.trajectory_id)
                    yield completion
        finally:
            for trajectory_id in pending:
                self.cancel(trajectory_id)

    # ------------------------------------------------------------------------------------------------------ step by step

    def add_group(
        self, prompt_ids: list[int], params: SamplingParams | Many[SamplingParams], trajectory_ids: Many[int]
    ) -> None:
        """Queue one sample of a prompt per trajectory id (64-bit numbers that the caller chooses); `params.n` is not used.

        params: of all samples, or of each. Raises SettingError for a prompt that the policy cannot take. The first call
        of an engine in exact mode checks the machine: it generates 80 tokens before it returns.
        """
        self._add(prompt_ids, params, trajectory_ids, trajectory_ids)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Prefill waiting prompts, decode one token for every running sequence; returns the sequences that finished."""
        scheduler = self.scheduler
        finished = self._finished_early
        self._finished_early = []
        if self._must_drain():
            finished += self._drain()
        scheduler.requeue_outdated()
        has_changed = bool(scheduler.make_room())
        if self._in_flight is None or scheduler.may_admit():
            if chunks := scheduler.next_chunks():
                self._make_copies()
                self.runner.prefill(chunks)
            has_changed |= bool(scheduler.fork_ready())
        if has_changed or self.batch.sequences != scheduler.running:
            self.batch.update(scheduler.running, has_moved=scheduler.compact())
        elif len(self.batch):
            self.batch.extend()
        self._make_copies()
        return finished + self._decode() if len(self.batch) else finished

    def pause(self, trajectory_id: int) -> bool:
        """Hold a running trajectory; it keeps its pages until others need them. False if it is not running."""
        self._finished_early += self._drain()
        return self.scheduler.pause(trajectory_id)

    def resume(self, trajectory_id: int, token_ids: Many[int] = ()) -> bool:
        """Continue a paused trajectory after tokens of its environment, of log-probability 0. Returns False if they do not fit."""
        self._finished_early += self._drain()
        return self.scheduler.resume(trajectory_id, token_ids)

    def cancel(self, trajectory_id: int) -> bool:
        """Drop a trajectory, or its result that no step has returned yet; False if the engine does not hold it."""
        early = self._finished_early + self._drain()
        self._finished_early = [done for done in early if done.trajectory_id != trajectory_id]
        return self.scheduler.cancel(trajectory_id) is not None or len(self._finished_early) < len(early)

    def unfinished(self) -> list[SequenceProgress]:
        """Every trajectory that is queued, running or paused."""
        return [SequenceProgress(s.trajectory_id, s.num_tokens, len(s.token_ids)) for s in self.scheduler.unfinished()]

    def responses(self) -> list[SequenceState]:
        """Every unfinished trajectory, with its response so far and without its cache."""
        return [s.export_state() for s in self.scheduler.unfinished()]

    @property
    def num_running(self) -> int:
        """Sequences that decode."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row, for pages, or for the prefill of their prompt."""
        return sum(len(group.sequences) for group in self.scheduler.waiting)

    @property
    def num_recomputed(self) -> int:
        """Tokens so far whose keys and values were dropped and are computed again."""
        return self.scheduler.num_recomputed

    @property
    def recomputed(self) -> dict[str, int]:
        """These tokens by what dropped them: `full_cache`, `weights`, `moved` (the trajectory came without its cache), `rope`."""
        return dict(self.scheduler.recomputed)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or paused."""
        return not (self.scheduler.running or self.scheduler.waiting or self.scheduler.paused or self._finished_early)

    def bind(self, views: Mapping[str, Tensor]) -> None:
        """Make these tensors (by parameter name) the weights, without a copy. Overwrite them in place for a new version."""
        self.policy.bind(views)
        self.scheduler.prefixes.forget()
        self.runner.bind()

    def weights_changed(self) -> None:
        """Announce that the parameters were overwritten in place."""
        self.scheduler.prefixes.forget()
        self.runner.refresh()

    def recompute(self) -> None:
        """Drop all keys and values before the weights change; running sequences are prefilled again."""
        self._finished_early += self._drain()
        self.scheduler.forget()

    def export_sequences(self, trajectory_ids: Many[int], with_cache: bool = False) -> list[SequenceState]:
        """Remove unfinished trajectories, for another engine on the same weights (or for this one, later).

        with_cache: include their keys and values, if computed; without them `import_sequences` computes them again. A
        trajectory that has just finished, or whose turn has, stays: the next `step` returns it.
        """
        self._finished_early += self._drain()
        states = []
        for trajectory_id in trajectory_ids:
            if any(done.trajectory_id == trajectory_id for done in self._finished_early):
                continue
            sequence = self.scheduler.find(trajectory_id)
            assert sequence is not None, f"no trajectory {trajectory_id}"
            exported = self._export_cache(sequence) if with_cache and sequence.num_cached else (None, None)
            self.scheduler.cancel(trajectory_id)
            states.append(sequence.export_state(*exported))
        return states

    def import_sequences(self, states: Many[SequenceState]) -> None:
        """Continue trajectories that another engine exported: they queue like new ones, or are paused like there."""
        for state in states:
            check_prompt(state.prompt_ids, self.policy)
            sequence = self._sequence(state.prompt_ids, state.params, state.trajectory_id, 0)
            sequence.restore(state)
            group = SequenceGroup([sequence], sequence.prompt_ids + sequence.token_ids)
            if state.token_ids:
                group.num_dropped = group.prefix_length
                group.dropped_by = "moved"
            has_states = self.states is None or (
                state.states is not None and state.states.numel() == self.states.state_bytes
            )
            if state.cache is not None and has_states and self.scheduler.reserve(group, state.cache.shape[2]):
                self._make_copies()
                self.cache.load(group.pages, state.cache)
                if self.states is not None and state.states is not None:
                    self.states.load(group.state, state.states)
                group.num_cached = state.cache.shape[2]
            self.scheduler.add(group)

    def check(self) -> None:
        """Assert that the reference count of every page is right, and that every place of a state has one owner."""
        self.scheduler.check()

    # ------------------------------------------------------------------------------------------------------- internals

    def _add(
        self, prompt_ids: list[int], params: SamplingParams | Many[SamplingParams], ids: Many[int], streams: Many[int]
    ) -> None:
        """Queue a group; `streams` select the random numbers of its samples."""
        check_prompt(prompt_ids, self.policy)
        each = [params] * len(ids) if isinstance(params, SamplingParams) else params
        sequences = [self._sequence(prompt_ids, *sample) for sample in zip(each, ids, streams, strict=True)]
        self.scheduler.add(SequenceGroup(sequences, list(prompt_ids)))

    def _make_copies(self) -> None:
        """Copy pages and states where the scheduler asked for it."""
        self.cache.copy_pages(self.pool.take_copies())
        if self.states is not None:
            self.states.copy(self.scheduler.states.take_copies())

    def _export_cache(self, sequence: Sequence) -> tuple[Tensor, Tensor | None]:
        """Keys and values of a sequence with a cache, and its state where there is one."""
        # A step behind a stop has read the stop token too; a sequence that goes on without other tokens reads it again.
        num_tokens = min(sequence.num_cached, sequence.num_tokens - 1)
        place = sequence.states[num_tokens % 2]
        state = None if self.states is None else self.states.export(place)
        return self.cache.export(sequence.pages, num_tokens), state

    def _run_probes(self) -> list[Completion]:
        num_sampled = self.num_sampled
        params = SamplingParams(max_new_tokens=exact_check.NUM_NEW_TOKENS, ignore_eos=True)
        for index, prompt in enumerate(exact_check.probes(self.policy)):
            self.add_group(prompt, params, [~index])
        completions: list[Completion] = []
        while not self.idle:
            completions += self.step()
        self.num_sampled = num_sampled
        return completions

    def _sequence(self, prompt_ids: list[int], params: SamplingParams, trajectory_id: int, stream: int) -> Sequence:
        if not self._is_checked:  # while nothing is queued, since the probes run until the engine is idle
            self._is_checked = True
            exact_check.verify(self.policy, self._run_probes())
        key = stream_key(self.seed if params.seed is None else params.seed, stream)
        return self.text.sequence(self.policy, prompt_ids, params, trajectory_id, key)

    def _decode(self) -> list[Completion]:
        """Launch a step. On a GPU, read the step before it meanwhile, so that the device never waits for the host."""
        batch = self.batch
        drawn = self.runner.decode(batch)
        batch.advance(drawn.tokens)
        for sequence in batch.sequences:
            sequence.num_cached += 1
        before = self._in_flight
        self._in_flight = InFlightStep(batch.sequences, *drawn.to_host())
        if not self._is_async:
            return self._drain()
        return [] if before is None else self._read(before)

    def _must_drain(self) -> bool:
        """Whether a running sequence may lose its row in the next step, for which its newest token must be read.

        A sequence whose end is not read yet takes part in one step more, the result of which is dropped.
        """
        return self._in_flight is not None and self.scheduler.may_requeue()

    def _drain(self) -> list[Completion]:
        """Read the launched step, if there is one."""
        step = self._in_flight
        self._in_flight = None
        return [] if step is None else self._read(step)

    def _read(self, step: InFlightStep) -> list[Completion]:
        sample = step.sample
        if step.ready is not None:
            step.ready.synchronize()
        finished = []
        num_read = 0
        for sequence, token, logprob in zip(
            step.sequences, sample.tokens.tolist(), sample.logprobs.tolist(), strict=True
        ):
            if sequence.finish_reason:
                continue  # it ended one step earlier, which was not read when this one was launched
            has_ended = sequence.append(token, logprob)
            if sequence.stop_strings and self.text.has_ended(sequence):
                sequence.finish_reason = "stop"
                has_ended = True
            if has_ended:
                finished.append(sequence)
            num_read += 1
        num_errors = sum(sequence.finish_reason == "error" for sequence in finished)
        self.num_sampled += num_read - num_errors
        self.pool.wipes_pages |= num_errors > 0
        for sequence in finished:
            self.scheduler.finish(sequence)
        if not self.scheduler.running:
            self.batch.update([])
            self._in_flight = None
        return [sequence.completion(self.text.decode(sequence)) for sequence in finished]
