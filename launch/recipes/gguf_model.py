"""A Llama model of a GGUF file in Hugging Face form: weights in bfloat16, config and tokenizer.

It needs the package `gguf`, which reads the file and its quantised blocks.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

if TYPE_CHECKING:
    from gguf import GGUFReader  # type: ignore[reportMissingImports]

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}
_CONTROL = 3
"""The token type of GGUF for tokens that stand for no text."""


def convert(file: Path, folder: Path) -> None:
    """Write the model of `file` into `folder`, which exists. Its embedding must be tied and its tokenizer of the kind `smollm`.

    Raises `ValueError` for a model of another kind, `OSError` where the disk is full.
    """
    from gguf import GGUFReader  # type: ignore[reportMissingImports]

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields["general.architecture"], fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != ("llama", "gpt2", "smollm"):
        raise ValueError(f"{file.name} has a model of the kind {kind}")
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    save_file(dict(_tensors(reader, heads)), folder / "model.safetensors", {"format": "pt"})
    _write_config(fields, folder)
    _write_tokenizer(fields, folder)


def _tensors(reader: "GGUFReader", heads: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Name and weights of each tensor, in the shapes of transformers."""
    from gguf.quants import dequantize  # type: ignore[reportMissingImports]

    for tensor in reader.tensors:
        *block, part, _ = tensor.name.split(".")
        layer = f"layers.{block[1]}." if block else ""
        weight = dequantize(tensor.data, tensor.tensor_type)
        if part in heads:
            weight = _unpermuted(weight, heads[part])
        yield f"model.{layer}{_NAMES[part]}.weight", torch.tensor(weight).to(torch.bfloat16)


def _unpermuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of queries or keys [heads * width, hidden]: GGUF has the two halves of a head by turns, transformers one after the other."""
    halves = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _write_config(fields: dict[str, Any], folder: Path) -> None:
    ids = {name: fields[f"tokenizer.ggml.{name}"] for name in ("bos_token_id", "eos_token_id")}
    ids["pad_token_id"] = fields["tokenizer.ggml.padding_token_id"]
    num_heads = fields["llama.attention.head_count"]
    width = fields["llama.embedding_length"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": width,
        "head_dim": width // num_heads,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "num_hidden_layers": fields["llama.block_count"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "tie_word_embeddings": True,
        "vocab_size": fields["llama.vocab_size"],
        **ids,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ids)


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Byte-level BPE that takes each digit by itself; nothing is added around a text."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer: Any = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in kinds if kind == _CONTROL]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    specials = {f"{name}_token": tokens[fields[f"tokenizer.ggml.{other}_token_id"]] for name, other in names.items()}
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
        **specials,
    }
    _write_json(folder / "tokenizer_config.json", described)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
