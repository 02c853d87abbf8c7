"""The policy: one definition that the trainer trains and the generator runs.

It takes any decoder-only checkpoint that transformers loads and `families.check_supported` accepts. Weights keep the names
that transformers gives them; a tied weight has one name.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from ...comm.errors import SettingError
from .attention import NAME, Attention, PackedAttention
from .checkpoint_files import find_checkpoint
from .device import to_device
from .exact.decoder import ExactDecoder
from .families import MULTIMODAL, Widths, cap_of, family_of, text_config
from .lm_head import LogitsHead
from .loading import persistent_buffers, read_weights
from .prefix_tree import PrefixTree
from .recurrent.network import DeltaNet, MixedAttention, install
from .recurrent.packed import PackedRecurrence, TreeRecurrence
from .rope import LongRope, RopeRows
from .supported import check_exact_supported, check_layers, check_splittable, check_supported
from .tensor_parallel import TensorParallel, splits_for
from .tree_attention import TreeAttention

transformers_logging.disable_progress_bar()

LOADING = threading.RLock()
"""Held while a model is made: transformers then sets switches of the whole process (dtype, initialisation, tying)."""


class Policy(nn.Module):
    """A decoder-only language model.

    `model` is transformers' module, `config` its configuration, `context` the largest number of positions, and `stop_ids` are
    the tokens that end a response. With `exact`, packed forward passes follow the rules of exact mode. Of a policy that was
    `split`, this process holds the slices of one rank, `tensor_parallel`.
    """

    exact: ExactDecoder | None = None
    is_part = False
    """Whether its checkpoint has other parts beside this language model."""

    def __init__(self, model: PreTrainedModel, stop_ids: frozenset[int]) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.stop_ids = stop_ids
        self.context: int = self.config.max_position_embeddings
        self.widths = widths = Widths.of(self.config)
        self.num_layers = widths.num_layers
        self.num_heads = widths.heads
        self.num_kv_heads = widths.kv_heads
        self.head_dim = widths.head_dim
        self.vocab_size = widths.vocab
        family = family_of(self.config)
        self.logit_softcap = cap_of(self.config, family.logit_cap)
        self.logit_divisor: float = getattr(self.config, family.logit_divisor) if family.logit_divisor else 1.0
        self.tensor_parallel = TensorParallel()
        layers: Any = model.base_model.layers
        check_layers(self.config, (name for layer in layers for name, _ in layer.named_parameters()))
        self.rope = RopeRows(self.config)
        self.recurrent: dict[int, DeltaNet] = install(layers_of(model)) if family.is_recurrent else {}
        """The layers that have states in place of keys and values, by their index."""
        if self.rope.switch is not None:
            model.base_model.rotary_emb = LongRope(self.config, self.rope.switch)

    @property
    def kv_layers(self) -> list[int]:
        """The layers that have keys and values."""
        return [layer for layer in range(self.num_layers) if layer not in self.recurrent]

    @property
    def head(self) -> nn.Linear:
        """The LM head; weight [vocab, hidden]."""
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def make_exact(self, dtype: torch.dtype | None = None) -> ExactDecoder:
        """From now on run packed forward passes in exact mode, with weights rounded to this type, by default their own.

        Raises SettingError where exact mode is not available.
        """
        check_exact_supported(self.config, self.device.type)
        dtype = dtype or self.dtype
        self.exact = ExactDecoder(self.model.base_model, self.config, self.rope.count, dtype, self.device)
        return self.exact

    def checkpoint_activations(self) -> None:
        """From now on keep only the layers' inputs for the backward pass, which computes the layers again."""
        assert self.exact is None, "exact mode computes the layers itself"
        for layer in layers_of(self.model):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    def compile_layers(self) -> None:
        """From now on the layers are compiled, but for attention: once for tokens of any number, when they first run."""
        assert self.exact is None, "exact mode computes the layers itself"
        # Attention has another plan in each micro-batch, for which a layer would be compiled again.
        AttentionInterface.register(NAME, torch.compiler.disable(AttentionInterface()[NAME]))
        for net in self.recurrent.values():
            net.module.forward = torch.compiler.disable(net.module.forward)
        for layer in layers_of(self.model):
            layer.forward = torch.compile(layer.forward, dynamic=True)

    @torch.no_grad()
    def split(self, tensor_parallel: TensorParallel) -> None:
        """From now on hold only this rank's slice of each layer, for `decoder.LeanDecoder`.

        Raises SettingError for a policy that cannot be split over these ranks.
        """
        assert self.tensor_parallel.size == 1, "split once"
        check_splittable(self.config, tensor_parallel.size)
        self.tensor_parallel = tensor_parallel
        parameters = dict(self.model.named_parameters()) if tensor_parallel.size > 1 else {}
        for name, split in splits_for(parameters, self.config).items():
            parameters[name].data = tensor_parallel.slice(parameters[name].data, split)

    def weights(self) -> dict[str, Tensor]:
        """Every parameter once, by transformers' name; the parts of a fused projection follow one another."""
        named = list(self.model.named_parameters())
        first: dict[str, int] = {}
        for place, (name, _) in enumerate(named):
            first.setdefault(_block(name), place)
        named.sort(key=lambda item: (first[_block(item[0])], item[0].endswith(".bias")))
        return dict(named)

    def bind(self, views: Mapping[str, Tensor]) -> None:
        """Use tensors of the same names and shapes as the parameters, without a copy: for example views of a buffer."""
        for name, parameter in self.model.named_parameters():
            assert parameter.shape == views[name].shape, name
            parameter.data = views[name]

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, hidden] after the last norm, of tokens [T] at positions [T], which are rows of `rope`."""
        assert self.tensor_parallel.size == 1, "the modules need whole layers"
        output = self.model.base_model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, attention=attention
        )
        return output.last_hidden_state[0]

    def forward_packed(self, token_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Hidden states [T, hidden] of whole sequences packed one after the other. Differentiable.

        Sequence i is token_ids[cu_seqlens[i] : cu_seqlens[i + 1]]; cu_seqlens is read on the host.
        """
        lengths: list[int] = cu_seqlens.diff().tolist()
        passes = self.rope.passes(lengths)
        if passes is None:
            return self._forward_sequences(token_ids, lengths)
        hidden = self._forward_sequences(token_ids[to_device(passes.tokens, token_ids.device)], passes.lengths)
        return hidden[to_device(passes.results, hidden.device)]

    @property
    def longest_in_tree(self) -> int:
        """Tokens of the longest row that `forward_tree` computes like `forward_packed`; 0 where it computes none."""
        if self.exact is not None:
            return 0
        return self.context if self.rope.switch is None else self.rope.switch

    @property
    def rows_alone(self) -> str:
        """Which rows `forward_tree` does not compute, and why; empty where it computes all of them."""
        if self.exact is not None:
            return "tokens that rows share are computed in each of them, as generator.exact demands"
        if self.rope.switch is not None:
            return (
                f"micro-batches with a row of more than {self.rope.switch:,} tokens compute each row alone, since LongRoPE gives"
                " its tokens other frequencies"
            )
        return ""

    def forward_tree(self, tree: PrefixTree, device: torch.device) -> Tensor:
        """Hidden states [N, hidden] of the tokens of a trie of rows, on the device that computes them. Differentiable.

        Weights that are offloaded lie elsewhere, so `self.device` is not this one.
        """
        token_ids, positions = (to_device(torch.from_numpy(x).long(), device) for x in (tree.token_ids, tree.positions))
        attention = TreeAttention(tree, device)
        if self.recurrent:
            return self(token_ids, positions, MixedAttention(attention, TreeRecurrence(tree, device)))
        return self(token_ids, positions, attention)

    def _forward_sequences(self, token_ids: Tensor, lengths: list[int]) -> Tensor:
        rows = [self.rope.of_chunk(0, length, length) for length in lengths]
        positions = to_device(torch.cat([torch.arange(row.start, row.stop) for row in rows]), token_ids.device)
        if self.exact is not None:
            return self.exact(token_ids, positions, self.exact.packed_attention(lengths))
        attention = PackedAttention(lengths, token_ids.device)
        if self.recurrent:
            return self(token_ids, positions, MixedAttention(attention, PackedRecurrence(lengths, token_ids.device)))
        return self(token_ids, positions, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [T, vocab] in fp32 of hidden states [T, hidden]. Differentiable."""
        return self._logits_head().logits(hidden)

    def token_logprobs(
        self, hidden: Tensor, targets: Tensor, temperature: float = 1.0, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, fp32 [T] each, of targets [T] given hidden states [T, hidden]. Differentiable.

        The products of the LM head are of numbers of this type, by default the weights'.
        """
        return self._logits_head(dtype).token_logprobs(hidden, targets, temperature)

    def _logits_head(self, dtype: torch.dtype | None = None) -> LogitsHead:
        head = self.head
        assert head.bias is None, "`LogitsHead` has no bias"
        exact = None
        if self.exact is not None:
            dtype = self.exact.dtype
            exact = self.exact.operators
        dtype = dtype or self.dtype
        of_products = dtype if dtype.itemsize == 2 else torch.float32
        return LogitsHead(head.weight, of_products, exact, self.logit_divisor, self.logit_softcap)


def layers_of(model: PreTrainedModel) -> Any:
    """The decoder layers of a model."""
    layers: Any = model.base_model.layers
    return layers


def load_policy(
    path: str | Path,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    weights: bool = True,
    exact: bool = False,
    tensor_parallel: TensorParallel | None = None,
    shard: Callable[[Policy], None] | None = None,
) -> Policy:
    """The policy of a Hugging Face checkpoint.

    With `weights=False` only its structure and persistent buffers, with uninitialised parameters. `shard` distributes such a policy over ranks and
    their devices before its weights are read, so that no rank holds all of them. With `tensor_parallel` it is split before
    it is moved, so the device never holds more than this rank's slices. Raises SettingError for a missing or damaged
    checkpoint and for a feature that would be computed wrongly.
    """
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise SettingError(f"model.dtype: '{dtype}' is not a floating-point type (float32, bfloat16, float16)")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SettingError(f"model.path: no Hugging Face checkpoint at {path} ({_first_line(error)})") from error
    is_part = config.model_type in MULTIMODAL
    config = text_config(config)
    check_supported(config)
    with LOADING:
        model = _build(path, config, wanted)
    policy = Policy(model.eval(), _stop_ids(path, config))
    policy.is_part = is_part
    if tensor_parallel is not None:
        if weights:
            read_weights(model, find_checkpoint(path))
        policy.split(tensor_parallel)
    if shard is not None:
        shard(policy)
    else:
        policy.to(device)
    if weights and tensor_parallel is None:
        read_weights(model, find_checkpoint(path))
    if not weights and persistent_buffers(model):
        read_weights(model, find_checkpoint(path), buffers_only=True)
    if exact:
        policy.make_exact()
    return policy


def _build(path: str | Path, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model with uninitialised parameters, which take no memory until they are written, and with its buffers."""
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    model.tie_weights()
    model.generation_config = _generation_config(path, config)
    return model


def default_device() -> torch.device:
    """The process's GPU if there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a checkpoint; raises SettingError if it has none."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SettingError(f"model.path: no tokenizer at {path} ({_first_line(error)})") from error


def _block(name: str) -> str:
    """The attention or MLP that a parameter belongs to."""
    return name.rsplit(".", 2)[0]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _generation_config(path: str | Path, config: Any) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return GenerationConfig.from_model_config(config)


def _stop_ids(path: str | Path, config: Any) -> frozenset[int]:
    """Tokens that end a response: those of the generation configuration, of the model's configuration and of the tokenizer."""
    settings: list[Any] = [_generation_config(path, config).eos_token_id, getattr(config, "eos_token_id", None)]
    with suppress(OSError, ValueError, KeyError):
        settings.append(AutoTokenizer.from_pretrained(path, trust_remote_code=False).eos_token_id)
    lists = [[setting] if isinstance(setting, int) else setting or [] for setting in settings]
    return frozenset(token for tokens in lists for token in tokens)
