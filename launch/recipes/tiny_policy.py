"""A small policy made on the spot, in Hugging Face form: a Qwen3-shaped transformer, a tokenizer of single characters.

It is warmed up by imitation until it answers in the right form and is often wrong, which leaves something to gain.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from ...comm.disk import tell

PAD = "<pad>"
EOS = "<eos>"
PAD_ID = 0
EOS_ID = 1
CONTEXT = 64
BATCH = 64
BATCHES_AT_ONCE = 25
LR = 3e-3
LR_WARMUP = 20
TELL_S = 10.0
"""Seconds between two lines about the warm-up."""
_IGNORED = -100

Example = tuple[str, ...]
"""A prompt and a response; or a prompt, turns of the policy and, between them, what a tool has answered."""


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """One token for each of `characters`, and nothing added around a text."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *characters])}
    tokenizer: Any = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def small_transformer(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """0.6 million parameters: 3 layers of width 128, 4 heads on 2 key-value heads, tied embeddings."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
    )
    return Qwen3ForCausalLM(config)


def build_policy(
    folder: Path, characters: str, example: Callable[[Random], Example], *, seed: int, num_steps: int
) -> float:
    """Make, warm up and save a policy in `folder`, unless another process is faster; returns the last loss of the warm-up."""
    disable_progress_bar()
    torch.manual_seed(seed)
    tokenizer = character_tokenizer(characters)
    model = small_transformer(tokenizer)
    loss = warm_up(model, tokenizer, example, Random(f"warm-up {seed}"), num_steps)
    unfinished = Path(mkdtemp(prefix=f"{folder.name}.unfinished-", dir=folder.parent))
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    try:
        unfinished.rename(folder)
    except OSError:  # another process has made it meanwhile
        rmtree(unfinished)
        if not folder.is_dir():
            raise
    return loss


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    example: Callable[[Random], Example],
    random: Random,
    num_steps: int,
) -> float:
    """Imitate examples for `num_steps` of AdamW (short rise, then linear to a tenth); returns the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    loss = torch.zeros(())
    told_at = time.monotonic()
    for step, (inputs, targets) in zip(range(num_steps), _batches(tokenizer, example, random), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = LR * min((step + 1) / LR_WARMUP, 1.0 - 0.9 * step / num_steps)
        logits = model(inputs).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if time.monotonic() - told_at >= TELL_S:
            told_at = time.monotonic()
            tell(f"warming up the policy: {step + 1} of {num_steps} steps")
    return loss.item()


def _batches(
    tokenizer: PreTrainedTokenizerFast, example: Callable[[Random], Example], random: Random
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, each [B, T], of examples with like prompts: padding to the longest of all would double the time."""
    while True:
        examples = [example(random) for _ in range(BATCH * BATCHES_AT_ONCE)]
        examples.sort(key=lambda pieces: len(pieces[0]))
        starts = list(range(0, len(examples), BATCH))
        random.shuffle(starts)
        for start in starts:
            yield _pad(tokenizer, examples[start : start + BATCH])


def _pad(tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> tuple[Tensor, Tensor]:
    """Every second piece is a turn of the policy: it ends with the stop token, and its tokens alone are targets."""
    rows: list[tuple[list[int], list[int]]] = []
    for pieces in examples:
        inputs = list[int]()
        targets = list[int]()
        for index, piece in enumerate(pieces):
            tokens = [*tokenizer.encode(piece), EOS_ID] if index % 2 else tokenizer.encode(piece)
            inputs += tokens
            targets += tokens if index % 2 else [_IGNORED] * len(tokens)
        rows.append((inputs, [*targets[1:], _IGNORED]))
    longest = max(len(inputs) for inputs, _ in rows)

    def padded(lists: Iterable[list[int]], filler: int) -> Tensor:
        return torch.tensor([[*each, *[filler] * (longest - len(each))] for each in lists])

    return padded((i for i, _ in rows), PAD_ID), padded((t for _, t in rows), _IGNORED)
