"""A GPU whose memory is full: one line that names bytes and settings, and a trainer that continues with less."""

import pytest
import torch
from support.job import MakeJob, assert_account_adds_up

from headrace.launch.processes.full_gpu import describe_full_gpu, is_full_gpu
from headrace.trainer.recovery import micro_tokens

TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 512.00 MiB is free."
    " Including non-PyTorch memory, this process has 78.50 GiB memory in use. Of the allocated memory 70.00 GiB is allocated"
    " by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
GREEDY_LOSS = f"""
import torch

def loss(inputs):
    if inputs.logprobs.numel() > 120:
        raise torch.OutOfMemoryError({TORCH_SAYS!r})
    return -inputs.advantages * inputs.logprobs, torch.zeros_like(inputs.logprobs, dtype=torch.bool)
"""


def test_the_message_has_the_bytes_and_the_settings_of_the_role_that_need_less():
    error = torch.OutOfMemoryError(TORCH_SAYS)
    assert is_full_gpu(error) and not is_full_gpu(RuntimeError("CUDA error"))
    facts = TORCH_SAYS.partition(" Of the")[0]
    facts = TORCH_SAYS.partition(". Of the")[0]
    assert describe_full_gpu("actor", error).startswith(f"{facts}; set a smaller optimizer.micro_tokens, lora.")
    others = (
        "a smaller generator.kv_gb, a smaller generator.max_running, a larger rollout.tp or another generator.gpu_share"
    )
    assert describe_full_gpu("rollout", error) == f"{facts}; set {others}"


def test_a_micro_batch_is_halved_for_each_such_death_and_never_empty():
    assert [micro_tokens(8192, deaths) for deaths in range(3)] == [8192, 4096, 2048]
    assert micro_tokens(3, 5) == 1


@pytest.mark.parametrize(
    "advantage",
    [
        pytest.param("grpo", id="as rows come"),
        pytest.param("reinforce_plus_plus", id="after the step's last row", marks=pytest.mark.slow),
    ],
)
def test_a_trainer_that_died_of_a_full_gpu_starts_again_with_half_the_micro_batch_and_ends_its_run(
    job: MakeJob, advantage: str
):
    # A group comes whole, and its prompt counts once: 16 responses of 12 tokens are too many for the loss, half of them are not.
    settings = {"batch__prompts_per_step": 1, "batch__samples_per_prompt": 16}
    ended = job(run__steps=2, optimizer__micro_tokens=240, algorithm__advantage=advantage, **settings)
    (ended.folder / "loss.py").write_text(GREEDY_LOSS)
    console = ended.run(**{"algorithm.loss": f"{ended.folder / 'loss.py'}:loss"})
    [line] = [line for line in console.splitlines() if "out of memory" in line]
    assert "Tried to allocate 2.00 GiB" in line and "; set a smaller optimizer.micro_tokens" in line
    assert "a micro-batch has at most 120 tokens now, instead of optimizer.micro_tokens=240" in console
    assert ended.summary()["trainer_restarts"] == 1
    assert_account_adds_up(ended)
