"""Norms of heads and the rotation as attention calls them: in one op."""

from __future__ import annotations

import pytest
import torch
from support import assert_close

from brickwork.blocks import Attention, RoPE
from brickwork.kernels import rope_triton
from brickwork.kernels.backend import prefer


@pytest.mark.parametrize("qk_norm", ["head", "full", None])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_attention_is_the_same_with_the_kernels(qk_norm, layout, monkeypatch):
    """A5, D1 32: and the kernels are called once for queries and keys."""
    attention = Attention(
        32,
        num_heads=4,
        num_kv_heads=2,
        qk_norm=qk_norm,
        rope=RoPE(8, layout=layout),
        causal=True,
    )
    x = torch.randn(2, 5, 32)
    calls = []
    kernel = rope_triton._rope
    monkeypatch.setattr(rope_triton, "_rope", lambda *a: calls.append(a) or kernel(*a))
    results = []
    for backend in ("torch", "triton"):
        with prefer(backend):
            y = attention(x)
        leaves = list(attention.parameters())
        results.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
    for found, expected in zip(*results):
        assert_close(found, expected, terms=64, scale=expected.abs().max().item() + 1)
    assert len(calls) == 1
    assert (calls[0][4] is not None) == (qk_norm == "head")
