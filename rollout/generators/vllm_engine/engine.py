"""vLLM's engine with the calls of the built-in one, of which it has the meanings.

A trajectory is a `Sequence` here and a request in vLLM. A request generates one turn; a turn that ends, a move and a pause abort
it. The next turn is a new request of all tokens so far, most of whose keys and values vLLM finds in its prefix cache.
"""

import os
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....comm.environment import GPU_PROCESSES
from ....comm.errors import SettingError
from ...engine.memory import available_memory, plan_cache, token_bytes
from ...engine.sequence import Completion, Sequence, SequenceProgress, SequenceState
from ...engine.streams import stream_key
from ...engine.text import Text, check_prompt
from .package import check_package

if TYPE_CHECKING:
    from ....trainer.policy.model import Policy
    from ...engine.sampling import SamplingParams

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights and tokens stay in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other runner takes other logits processors
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}
_LOG_LEVEL = "VLLM_LOGGING_LEVEL"
_SAMPLER = f"{__package__}.sampler:RuleSampler"
_WHOLE_LOGITS = {"head_dtype": "float32"}
"""Logits are not rounded to half precision, as in the trainer. On a CPU vLLM would convert the whole head in each step: with SmolLM2-135M
that took 43 % of the speed for 13 % less mismatch."""
_EXECUTOR = f"{__package__}.executor.RankExecutor"
_PYDANTIC = "Value error, "
_LONGEST = 200
"""Characters of a reason: vLLM also lists every architecture that it knows."""
_CPU_PAGE_TOKENS = 32
"""vLLM's own 128 would share only longer prompts within a group."""
_CPU_BYTES = 2 << 30
"""The most that the cache takes on a CPU by default: vLLM writes to all of it at its start."""


class VllmEngine:
    """Generates with vLLM.

    policy: its parameters are the weights from the next `weights_changed` on. path: the checkpoint, whose configuration vLLM reads. tp:
    ranks of one replica, which are those of the process's default group; all get the same calls, and each splits the whole weights.
    The other arguments are those of `Engine`. Raises `SettingError` for what vLLM refuses.
    """

    def __init__(
        self,
        policy: "Policy",
        path: str,
        text: Text,
        *,
        max_running: int,
        seed: int = 0,
        kv_gb: float | None = None,
        prefill_tokens: int = 2048,
        gpu_share: float = 0.85,
        device: torch.device | str = "cpu",
        tp: int = 1,
    ) -> None:
        check_package()
        self.policy = policy
        self.text = text
        self.seed = seed
        self.context = policy.context
        settings = {
            "model": path,
            "dtype": str(policy.dtype).removeprefix("torch."),
            "max_num_seqs": max_running,
            "max_num_batched_tokens": max(prefill_tokens, max_running),
            "seed": seed,
            **_cache_settings(policy, max_running, kv_gb, gpu_share, torch.device(device)),
        }
        if tp > 1:
            settings |= {"tensor_parallel_size": tp, "distributed_executor_backend": _EXECUTOR}
        self._llm: Any = _open_llm(settings, policy)
        cache = self._llm.vllm_config.cache_config
        self.kv_capacity: int = cache.num_gpu_blocks * cache.block_size
        self.kv_token_bytes = token_bytes(policy) // tp
        self.description = f"vLLM, {cache.num_gpu_blocks} pages of {cache.block_size} tokens"
        self._scheduler = self._llm.engine_core.engine_core.scheduler
        self._sequences: dict[int, Sequence] = {}
        """Every unfinished trajectory, by its id."""
        self._requests: dict[str, Sequence] = {}
        """Those that vLLM holds, by the name of their request."""
        self._names: dict[int, str] = {}
        """The names of their requests, by trajectory."""
        self._num_requests = 0
        self._new: set[str] = set()
        """Requests without a token so far."""
        self.num_sampled = 0
        self.recomputed = {"weights": 0, "moved": 0}
        """vLLM does not tell what a full cache drops."""
        self.num_prefilled = 0
        self.num_found = 0

    def add_group(
        self, prompt_ids: list[int], params: "SamplingParams | Many[SamplingParams]", trajectory_ids: Many[int]
    ) -> None:
        """As `Engine.add_group`."""
        check_prompt(prompt_ids, self.policy)
        each = list(params) if isinstance(params, Many) else [params] * len(trajectory_ids)
        for own, trajectory_id in zip(each, trajectory_ids, strict=True):
            key = stream_key(self.seed if own.seed is None else own.seed, trajectory_id)
            self._submit(self.text.sequence(self.policy, prompt_ids, own, trajectory_id, key))

    def step(self) -> list[Completion]:
        """One step of vLLM: prefill, and at most one token for every running trajectory; returns those that ended."""
        ended: list[Completion] = []
        for output in self._llm.step():
            sequence = self._requests.get(output.request_id)
            if sequence is None:
                continue
            self._count_prefill(output)
            (result,) = output.outputs
            for token, logprobs in zip(result.token_ids, result.logprobs, strict=True):
                logprob = logprobs[token].logprob
                sequence.append(token, logprob if logprob <= 0 else float("nan"))
                self.num_sampled += sequence.finish_reason != "error"
            if self.text.has_ended(sequence):
                sequence.finish_reason = "stop"
            assert sequence.finish_reason or not output.finished, f"vLLM ended a response: {result.finish_reason}"
            if sequence.finish_reason:
                ended.append(self._end(sequence))
        return ended

    def resume(self, trajectory_id: int, token_ids: Many[int] = ()) -> bool:
        """As `Engine.resume`."""
        sequence = self._sequences[trajectory_id]
        if len(sequence.token_ids) + len(token_ids) >= sequence.limit:
            return False
        sequence.insert(token_ids)
        self._submit(sequence)
        return True

    def unfinished(self) -> list[SequenceProgress]:
        return [SequenceProgress(s.trajectory_id, s.num_tokens, len(s.token_ids)) for s in self._sequences.values()]

    def responses(self) -> list[SequenceState]:
        return [sequence.export_state() for sequence in self._sequences.values()]

    def export_sequences(self, trajectory_ids: Many[int], with_cache: bool = False) -> list[SequenceState]:
        """As `Engine.export_sequences`, but always without the cache, which vLLM does not give away."""
        self._abort(trajectory_ids)
        return [self._sequences.pop(trajectory_id).export_state() for trajectory_id in trajectory_ids]

    def import_sequences(self, states: Many[SequenceState]) -> None:
        """Continue trajectories of another engine; their keys and values are computed here."""
        for state in states:
            check_prompt(state.prompt_ids, self.policy)
            sequence = self.text.sequence(self.policy, state.prompt_ids, state.params, state.trajectory_id, state.key)
            sequence.restore(state)
            if sequence.is_turn_over:
                self._sequences[sequence.trajectory_id] = sequence
                continue
            self.recomputed["moved"] += sequence.num_tokens - 1 if state.token_ids else 0
            self._submit(sequence)

    def cancel(self, trajectory_id: int) -> bool:
        """Drop a trajectory; False if the engine does not hold it."""
        self._abort([trajectory_id])
        return self._sequences.pop(trajectory_id, None) is not None

    def recompute(self) -> None:
        """Drop all keys and values before the weights change; running trajectories are prefilled again."""
        self.recomputed["weights"] += sum(request.num_computed_tokens for request in self._scheduler.running)
        self._llm.reset_prefix_cache(reset_running_requests=True)

    def weights_changed(self) -> None:
        """Take the parameters of the policy, which have changed since `recompute`."""
        weights = self.policy.weights()
        config = self._llm.model_config
        self._llm.apply_model(lambda model: _load(model, weights, config))

    @property
    def num_running(self) -> int:
        """Trajectories in vLLM's batch, those whose prompt is being prefilled included."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self._scheduler.running)

    @property
    def num_recomputed(self) -> int:
        return sum(self.recomputed.values())

    @property
    def idle(self) -> bool:
        return not self._sequences

    @property
    def kv_load(self) -> int:
        return round(self._scheduler.kv_cache_manager.usage * self.kv_capacity)

    def _submit(self, sequence: Sequence) -> None:
        """Give vLLM a request for the next turn of a trajectory."""
        from vllm import SamplingParams as Request  # pyright: ignore[reportMissingImports] - an extra
        from vllm.inputs import tokens_input  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        from .sampler import DRAW, Draw

        self._num_requests += 1
        name = str(self._num_requests)
        num_drawn = len(sequence.token_ids)
        request = Request(
            temperature=0,
            max_tokens=sequence.limit - num_drawn,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={DRAW: Draw(sequence.params, sequence.key, num_drawn)},
        )
        self._llm.add_request(name, tokens_input(sequence.prompt_ids + sequence.token_ids), request)
        self._sequences[sequence.trajectory_id] = sequence
        self._requests[name] = sequence
        self._names[sequence.trajectory_id] = name
        self._new.add(name)

    def _end(self, sequence: Sequence) -> Completion:
        """Take what has ended out of vLLM; a turn that is over stays here."""
        self._abort([sequence.trajectory_id])
        if not sequence.is_turn_over:
            del self._sequences[sequence.trajectory_id]
        return sequence.completion(self.text.decode(sequence))

    def _abort(self, trajectory_ids: Many[int]) -> None:
        names = [self._names.pop(number) for number in trajectory_ids if number in self._names]
        for name in names:
            del self._requests[name]
            self._new.discard(name)
        if names:
            self._llm.abort_request(names)

    def _count_prefill(self, output: Any) -> None:
        if output.request_id in self._new:
            self._new.remove(output.request_id)
            found = output.num_cached_tokens or 0
            self.num_found += found
            self.num_prefilled += len(output.prompt_token_ids) - found


def _cache_settings(
    policy: "Policy", max_running: int, kv_gb: float | None, gpu_share: float, device: torch.device
) -> dict[str, Any]:
    """How large vLLM makes its cache: on a CPU by the rule of the built-in engine up to `_CPU_BYTES`; on a GPU by vLLM's own, within this
    process's part of `gpu_share`."""
    if device.type == "cpu":
        memory = available_memory(device, gpu_share)
        memory = memory._replace(usual=min(memory.usual, _CPU_BYTES))
        plan = plan_cache(policy, _CPU_PAGE_TOKENS, max_running, kv_gb, memory)
        return {"block_size": _CPU_PAGE_TOKENS, "kv_cache_memory_bytes": plan.num_pages * plan.page_bytes}
    share = gpu_share / int(os.environ.get(GPU_PROCESSES, "1"))
    given = {} if kv_gb is None else {"kv_cache_memory_bytes": int(kv_gb * 1e9)}
    return {"gpu_memory_utilization": share, **given}


def _open_llm(settings: dict[str, Any], policy: "Policy") -> Any:
    """vLLM's engine in this process, with random weights."""
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault(_LOG_LEVEL, "ERROR")
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports] - an extra

    is_cpu = current_platform.is_cpu()
    if is_cpu:
        type(
            current_platform
        ).simple_compile_backend = "eager"  # it would compile the ranks of tokens, which are not used
        _check_heads(policy.head_dim)
    from vllm import EngineArgs, LLMEngine  # pyright: ignore[reportMissingImports]

    try:
        arguments = EngineArgs(
            **settings,
            max_model_len=policy.context,
            load_format="dummy",
            hf_overrides={} if is_cpu else _WHOLE_LOGITS,
            skip_tokenizer_init=True,
            enforce_eager=is_cpu,  # compiling takes a minute there
            async_scheduling=False,
            disable_log_stats=True,
            logprobs_mode="processed_logits",
            logits_processors=[_SAMPLER],
        )
        return LLMEngine.from_engine_args(arguments)
    except (ValueError, NotImplementedError) as error:
        raise SettingError(f"rollout.engine=vllm: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """vLLM's own reason in one line; pydantic puts it behind the name of a class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    own = next((line for line in lines if line.startswith(_PYDANTIC)), lines[0])
    return own.removeprefix(_PYDANTIC).split(" [type=")[0][:_LONGEST]


def _check_heads(head_dim: int) -> None:
    """Refuse heads for which vLLM has no kernel on a CPU: it would end with an error at the first step."""
    from vllm.v1.attention.backends.cpu_attn import (  # pyright: ignore[reportMissingImports] - an extra
        CPUAttentionBackend,
    )

    known = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in known:
        raise SettingError(
            f"rollout.engine=vllm: on a CPU vLLM has no attention for heads of {head_dim} numbers, only of"
            f" {', '.join(map(str, known))}"
        )


def _load(model: Any, weights: Mapping[str, Tensor], config: Any) -> None:
    """Write weights into vLLM's own tensors, whose layouts differ from the checkpoint's, and which keep their addresses."""
    from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports] - an extra
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    expected = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    with torch.no_grad():
        loaded = model.load_weights(iter(weights.items()))
    finalize_layerwise_reload(model, config)
    if config.hf_text_config.tie_word_embeddings:
        # The reload has not seen the head, which keeps a packed copy of the embedding on a CPU.
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    if missing := expected - (loaded or set()):
        raise SettingError(f"rollout.engine=vllm: vLLM found no weights for {', '.join(sorted(missing)[:3])}")
