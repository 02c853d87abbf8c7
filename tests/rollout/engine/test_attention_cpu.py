"""Partial attention of the pool's pages by matrix products is that of the formula and of the fused kernel."""

import pytest
import torch

from headrace.rollout.engine.attention.cpu import attend_by_products
from headrace.trainer.policy.exact.pages import MASKED_SCORE, attend_pages


@pytest.mark.parametrize("head_dim", [8, 64])
@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("scale", [0.3, 3.0])
@pytest.mark.parametrize("is_masked", [True, False])
def test_products_give_the_outputs_and_normalizers_of_each_page(head_dim, rows, scale, is_masked):
    torch.manual_seed(0)
    q, k, v = (torch.randn(5, 3, count, head_dim) for count in (rows, 64, 64))
    seen = torch.tensor([64, 1, 63, 30, 0])[:, None] > torch.arange(64)
    bias = torch.where(seen, 0.0, MASKED_SCORE)[:, None, None] if is_masked else None
    out, lse = attend_by_products(q, k, v, bias, scale)
    scores = q.double() @ k.double().transpose(2, 3) * scale
    scores = scores if bias is None else scores + bias
    pages = slice(4) if is_masked else slice(5)
    torch.testing.assert_close(out[pages].double(), (scores.softmax(-1) @ v.double())[pages], rtol=0, atol=1e-4)
    torch.testing.assert_close(lse[pages].double(), scores.logsumexp(-1)[pages], rtol=1e-6, atol=1e-5)
    kernel_out, kernel_lse = attend_pages(q, k, v, bias, scale)
    torch.testing.assert_close(out[pages], kernel_out[pages], rtol=0, atol=1e-4)
    torch.testing.assert_close(lse[pages], kernel_lse[pages], rtol=1e-6, atol=1e-5)
    # A page without a key has no weight beside any other, and no NaN.
    assert out.isfinite().all()
    assert not is_masked or (lse[4] < MASKED_SCORE / 2).all()
