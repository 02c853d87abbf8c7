"""Tiny random policies in Hugging Face format, with a tokenizer of printable characters, for tests."""

from pathlib import Path
from typing import Any

import torch
from support.assets import ASSETS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from headrace.trainer.policy.families import FAMILIES as DECLARED

STORIES = ASSETS / "stories260k"
"""A real pre-trained policy of 260K parameters."""

CHARACTERS = [chr(code) for code in range(32, 127)]
SPECIALS = ["<pad>", "<s>", "</s>", "\n"]
VOCABULARY = 128

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0},
    "gemma3_text": {"sliding_window": 24, "query_pre_attn_scalar": 16},
    "phi3": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "smollm3": {"num_hidden_layers": 4},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "gemma": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 24, "num_hidden_layers": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 40,
    },
    "granitemoe": {
        "num_local_experts": 4,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "gpt_oss": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 1e4,
            "truncate": False,
        },
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "swiglu_limit": 0.5,
    },
    "glm4": {},
    "glm4_moe": {
        "num_hidden_layers": 3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
    },
}

DELTA_NET = {
    "initializer_range": 0.06,  # with larger weights fp32 itself, in transformers too, is wrong by more than tests allow
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
}
"""Three layers with states, of grouped heads, and one of attention."""
QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
FAMILIES |= {
    "qwen3_next": DELTA_NET | QWEN_EXPERTS,
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET | QWEN_EXPERTS,
}
LLAMA_LINE = [name for name, family in DECLARED.items() if family.is_llama_line]

LONGROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 4.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.7 * i for i in range(8)],
    },
    "original_max_position_embeddings": 64,
}  # fmt: skip
"""Changes of "phi3": short frequencies for sequences of up to 64 tokens, long ones for longer sequences."""


def character_tokenizer():
    """One token per printable character; 0 to 3 are pad, <s>, </s> and the line break."""
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    )


def tiny_policy(folder, family="llama", seed=0, **changes) -> Path:
    """Save a random policy of a family, norms and biases too, under `folder`; returns the checkpoint's path."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family] | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn(weight.shape))
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape))
    path = Path(folder) / family
    model.save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path


def policy_with_template(folder: Path) -> None:
    """Make a small policy in `folder` whose tokenizer has a chat template, as an instruct model has."""
    folder.parent.mkdir(parents=True)
    path = tiny_policy(folder.parent, "llama")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(path)
    path.rename(folder)


def random_prompts(count, longest, seed=0) -> list[list[int]]:
    """Prompts of mixed lengths 1 to `longest`, of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(4, 99, (n,), generator=generator).tolist() for n in lengths]


def plain_logprobs(model, prompt_ids, token_ids, temperature=1.0):
    """Log-probabilities [n] of a response by a plain transformers forward, in float32 or, for a float64 model, float64."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids + token_ids])).logits[0]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    rows = logits[len(prompt_ids) - 1 : -1] / temperature
    return rows.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]
