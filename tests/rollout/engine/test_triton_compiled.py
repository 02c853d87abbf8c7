"""The Triton kernels compiled for GPUs that are not here: registers, shared memory and spills under bounds.

Triton brings the assembler, which needs no GPU. `bash tests/extras.sh` installs it aside. Triton's interpreter (`test_triton.py`) multiplies the bit patterns of
bfloat16, so its numbers are checked on a GPU alone.
"""

import pytest
import torch
from support.compiled import ARCHITECTURES, needs_compiler, resources

pytestmark = [pytest.mark.extra, needs_compiler]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("kind", "dim", "group", "registers", "shared"),
    [("bf16", 64, 7, 80, 16e3), ("fp16", 64, 7, 80, 16e3), ("bf16", 128, 4, 112, 32e3), ("bf16", 256, 2, 168, 48e3)],
)
def test_decode_attention_in_half_precision_spills_nothing(tmp_path, architecture, kind, dim, group, registers, shared):
    arguments = {
        "query": f"*{kind}", "keys": f"*{kind}", "values": f"*{kind}", "table": "*i32", "lengths": "*i32", "out": "*fp32",
        "lse": "*fp32", "scale": "fp32", "softcap": "fp32", "window": "i32", "table_stride": "i32", "page_stride": "i32",
        "head_stride": "i32", "num_splits": "i32",
    }  # fmt: skip
    constants = {
        "GROUP": group, "GROUP_ROWS": 16, "DIM": dim, "DIM_ROWS": dim, "PAGE": 64, "KV_HEADS": 2, "SPLIT": 512, "BLOCK": 32,
        "HAS_SOFTCAP": False,
    }  # fmt: skip
    from headrace.rollout.engine.attention.triton_decode import _split_kernel

    found = resources(tmp_path, _split_kernel, architecture, arguments, constants, 4)
    assert found.registers <= registers and found.spilled == 0 and found.shared <= shared, found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_merge_of_splits_takes_few_registers_and_no_memory(tmp_path, architecture, has_sinks):
    arguments = {
        "parts": "*fp32", "lse": "*fp32", "lengths": "*i32", "sinks": "*bf16" if has_sinks else "*i32", "out": "*bf16",
        "window": "i32", "num_splits": "i32",
    }  # fmt: skip
    constants = {"HEADS": 14, "DIM": 128, "DIM_ROWS": 128, "SPLIT": 512, "HAS_SINKS": has_sinks}
    from headrace.trainer.policy.kernels.merge import _merge_kernel

    found = resources(tmp_path, _merge_kernel, architecture, arguments, constants, 1)
    assert found.registers <= 64 and found.spilled == 0 and found.shared <= 1024, found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
def test_the_gate_takes_few_registers_and_no_memory(tmp_path, architecture, kind):
    from headrace.trainer.policy.kernels.gate import _gate_kernel

    pointers = {"gates": f"*{kind}", "ups": f"*{kind}", "out": f"*{kind}"}
    arguments = {**pointers, "row_stride": "i32", "columns": "i32"}
    found = resources(tmp_path, _gate_kernel, architecture, arguments, {"BLOCK": 1024}, 4)
    assert found.registers <= 48 and found.spilled == found.shared == 0, found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("kind", "dim", "rotary"), [("bf16", 64, 64), ("bf16", 128, 128), ("fp16", 128, 96), ("fp32", 256, 256)])  # fmt: skip
def test_the_way_of_heads_into_the_cache_takes_few_registers_and_no_memory(
    tmp_path, architecture, has_norm, kind, dim, rotary
):
    from headrace.trainer.policy.kernels.heads import _heads_kernel

    arguments = {
        "qkv": f"*{kind}", "cos": f"*{kind}", "sin": f"*{kind}", "query_norm": f"*{kind}", "key_norm": f"*{kind}",
        "table": "*i32", "lengths": "*i32", "query": f"*{kind}", "keys": f"*{kind}", "values": f"*{kind}", "eps": "fp32",
        "table_width": "i32", "table_stride": "i32", "page_stride": "i32", "head_stride": "i32",
    }  # fmt: skip
    constants = {
        "HEADS": 14, "KV_HEADS": 2, "DIM": dim, "HALF": rotary // 2, "REST": dim - rotary,
        "HALF_ROWS": 1 << (rotary // 2 - 1).bit_length(), "REST_ROWS": max(1, dim - rotary), "DIM_ROWS": dim, "PAGE": 64,
        "HAS_NORM": has_norm,
    }  # fmt: skip
    found = resources(tmp_path, _heads_kernel, architecture, arguments, constants, 1)
    assert found.registers <= 64 and found.spilled == found.shared == 0, found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plain_sampling_takes_few_registers_and_little_memory_and_rounds_each_product(tmp_path, architecture):
    from headrace.rollout.engine.triton_draw import BLOCK, DRAW_OPTIONS, SUMS_OPTIONS, _draw_kernel, _sums_kernel

    sums = {"peaks": "*fp32", "sums": "*fp32", "best": "*i32"}
    sizes = {"vocab": "i32", "num_blocks": "i32"}
    inputs = {"logits": "*fp32", "scales": "*fp32", **sums}
    found = resources(tmp_path, _sums_kernel, architecture, inputs | sizes, {"BLOCK": BLOCK}, **SUMS_OPTIONS)
    assert found.registers <= 64 and found.spilled == found.num_fused == 0 and found.shared <= 1024, found
    rows = {"is_greedy": "*i1", "keys": "*i64", "positions": "*i64", "tokens": "*i64", "logprobs": "*fp32"}
    arguments, constants = inputs | rows | sizes, {"BLOCKS": 64, "BLOCK": BLOCK}
    found = resources(tmp_path, _draw_kernel, architecture, arguments, constants, **DRAW_OPTIONS)
    assert found.registers <= 128 and found.spilled == found.num_fused == 0 and found.shared <= 32e3, found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("kind", "result"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp32", "fp32")])
def test_an_exact_linear_layer_spills_nothing(tmp_path, architecture, kind, result):
    from headrace.trainer.policy.kernels.exact_linear import COLUMNS, GROUP, ROWS, _linear_kernel

    arguments = {
        "x": f"*{kind}", "weight": f"*{kind}", "bias": f"*{kind}", "out": f"*{result}", "rows": "i32", "columns": "i32",
        "inputs": "i32",
    }  # fmt: skip
    constants = {
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "INPUTS": 32 if kind == "fp32" else 64,
        "GROUP": GROUP,
        "HAS_BIAS": True,
    }
    found = resources(tmp_path, _linear_kernel, architecture, arguments, constants, 4, num_stages=3)
    assert found.registers <= 168 and found.spilled == 0 and found.shared <= 64e3, found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("kind", "dim", "group"), [("bf16", 64, 7), ("bf16", 128, 4), ("fp16", 128, 8), ("bf16", 256, 2), ("fp32", 128, 4)])  # fmt: skip
def test_exact_attention_spills_next_to_nothing(tmp_path, architecture, kind, dim, group):
    from headrace.trainer.policy.kernels.exact_attention import _tile_kernel, block_and_warps, tile_rows

    arguments = {
        "query": f"*{kind}", "keys": f"*{kind}", "values": f"*{kind}", "tiles": "*i32", "table": "*i32", "out": "*fp32",
        "lse": "*fp32", "scale": "fp32", "window": "i32", "table_stride": "i32", "num_keys": "i32", "num_splits": "i32",
    }  # fmt: skip
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    block, warps = block_and_warps(dim, dtype)
    constants = {
        "KV_HEADS": 2, "GROUP": group, "ROWS": tile_rows(group, dtype), "DIM": dim, "DIM_ROWS": dim, "PAGE": 64, "SPLIT": 512,
        "BLOCK": block,
    }  # fmt: skip
    found = resources(tmp_path, _tile_kernel, architecture, arguments, constants, warps, num_stages=2)
    assert found.registers <= 240 and found.spilled <= 8 and found.shared <= 99e3, found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_exact_sums_over_rows_take_few_registers_and_little_memory(tmp_path, architecture):
    from headrace.trainer.policy.kernels.exact_rows import BLOCK, _norm_kernel, _normalizer_kernel

    arguments = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32", "rows": "i32", "columns": "i32"}
    for rows, columns, warps in ((32, 128, 4), (1, 4096, 4), (1, 8192, 8)):
        constants = {"ROWS": rows, "COLUMNS": columns}
        found = resources(tmp_path, _norm_kernel, architecture, arguments, constants, warps)
        assert found.registers <= 96 and found.spilled == 0 and found.shared <= 1024, found
    arguments = {"logits": "*fp32", "normalizer": "*fp32", "vocab": "i32"}
    found = resources(tmp_path, _normalizer_kernel, architecture, arguments, {"BLOCK": BLOCK}, 8)
    assert found.registers <= 64 and found.spilled == 0 and found.shared <= 1024, found
