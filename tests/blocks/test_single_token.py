"""Steps for one token against the modules they stand for, compiled and by PyTorch's operators."""

from __future__ import annotations

import pytest
import torch
from support import assert_close
from torch import nn

from brickwork.blocks import Attention, KVCache, MoE, RMSNorm, RoPE, single_token
from brickwork.blocks.router import Router
from brickwork.blocks.single_token import AttentionStep, MoEStep, Turn, product_of
from brickwork.kernels import token_step_cpu
from brickwork.kernels.backend import prefer

DTYPES = [torch.float32, torch.float64]
WAYS = ["compiled", "operators"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    if request.param == "compiled":
        assert token_step_cpu.unavailable_here() is None
    else:
        monkeypatch.setattr(single_token, "unavailable_here", lambda: "not wanted here")
    return request.param


def drawn(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """With parameters that are neither 0 nor 1, in eval mode."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.to(dtype).eval()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dim", "heads", "groups", "head_dim", "length"),
    [(16, 4, 2, 4, 5), (33, 3, 3, 6, 1), (64, 4, 1, 32, 70), (256, 4, 4, 64, 40)],
)
@torch.no_grad()
def test_attention(way, dtype, bias, dim, heads, groups, head_dim, length):
    attention = drawn(
        Attention(
            dim, num_heads=heads, num_kv_heads=groups, head_dim=head_dim, qk_norm="full",
            rope=RoPE(head_dim), causal=True, bias=bias,
        ),
        dtype,
    )  # fmt: skip
    norm = drawn(RMSNorm(dim, eps=1e-5), dtype)
    x = torch.randn(1, length + 4, dim, dtype=dtype)
    cache = KVCache()
    attention(x[:, :length], cache=cache)
    step = AttentionStep(attention, norm, cache.held(), length, length + 2)
    assert (step.compiled is None) == (way == "operators")
    turn = Turn(attention.rope, torch.tensor([[length]]), dtype)
    for slot in range(length, length + 4):
        if slot == step.slots:
            step.grow(2 * step.slots)
        token = x[:, slot]
        expected = token + norm(attention(token[:, None], cache=cache)[:, 0])
        found = step(token, slot, turn(), None)
        assert_close(found, expected, terms=dim * heads * head_dim)


@pytest.mark.parametrize("padding", [0.0, 7.0])
@torch.no_grad()
def test_padding_in_the_cache_is_never_seen(way, padding):
    attention = drawn(
        Attention(16, num_heads=4, qk_norm="full", rope=RoPE(4), causal=True), torch.float64
    )
    norm = drawn(RMSNorm(16), torch.float64)
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    cache = KVCache()
    attention(x[:, 2:5], cache=cache)
    expected = x[:, 5] + norm(attention(x[:, 5:], cache=cache)[:, 0])
    held = cache.held()
    filler = torch.full_like(held.keys[:, :2], padding)
    keys, values = (torch.cat((filler, t[:, :3]), 1) for t in (held.keys, held.values))
    step = AttentionStep(attention, norm, held._replace(keys=keys, values=values), 5, 9)
    seen = torch.arange(9)[None] >= 2
    turn = Turn(attention.rope, torch.tensor([[3]]), torch.float64)
    found = step(x[:, 5], 5, turn(), seen)
    assert_close(found, expected, terms=256)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("dim", "hidden", "experts", "top_k", "bias"),
    [(16, 12, 5, 2, False), (33, 7, 3, 3, True), (64, 96, 1, 1, False), (256, 128, 8, 2, False)],
)
@torch.no_grad()
def test_experts(way, dtype, normalize, dim, hidden, experts, top_k, bias):
    moe = drawn(
        MoE(
            dim, hidden_dim=hidden, num_experts=experts, top_k=top_k, normalize=normalize,
            router=Router(dim, experts, bias=bias),
        ),
        dtype,
    )  # fmt: skip
    norm = drawn(RMSNorm(dim), dtype)
    step = MoEStep(moe, norm, 1)
    assert (step.compiled is None) == (way == "operators")
    for x in torch.randn(5, 1, dim, dtype=dtype):
        assert_close(step(x), x + norm(moe(x).y), terms=dim * hidden * top_k)


@torch.no_grad()
def test_equal_scores_choose_the_first_experts_and_nan_stays_nan(way):
    moe = drawn(MoE(8, hidden_dim=4, num_experts=4, top_k=2), torch.float64)
    nn.init.zeros_(moe.router.weight)
    norm = drawn(RMSNorm(8), torch.float64)
    step, x = MoEStep(moe, norm, 1), torch.randn(1, 8, dtype=torch.float64)
    assert_close(step(x), x + norm(moe(x).y), terms=64)
    assert step(x * float("nan")).isnan().all()


@pytest.mark.parametrize("normalize", [False, True])
@torch.no_grad()
def test_a_nan_of_the_router_reaches_the_result(way, normalize):
    moe = drawn(MoE(8, hidden_dim=4, num_experts=4, top_k=2, normalize=normalize), torch.float64)
    moe.router.weight[3] = float("nan")
    assert MoEStep(moe, RMSNorm(8).double(), 1)(torch.randn(1, 8).double()).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 33), (50, 16), (600, 256)])
@torch.no_grad()
def test_product(way, dtype, rows, columns):
    """Rows and columns that fill no vector, weights that are no whole matrix."""
    weight = torch.randn(columns, rows + 1, dtype=dtype).mT[1:]
    bias, x = torch.randn(rows, dtype=dtype), torch.randn(1, columns, dtype=dtype)
    for b in (None, bias):
        product = product_of(weight, b, 1)
        assert_close(product(x), nn.functional.linear(x, weight, b), terms=columns)


def test_the_specification_is_preferred_where_asked_for():
    weight = torch.randn(4, 4)
    with prefer("torch"):
        assert isinstance(product_of(weight, None, 1), single_token.Product)
    assert not isinstance(product_of(weight, None, 1), single_token.Product)
    assert isinstance(product_of(weight, None, 2), single_token.Product)


@torch.no_grad()
def test_results_do_not_depend_on_the_number_of_threads():
    moe = drawn(MoE(256, hidden_dim=256, num_experts=4, top_k=2), torch.float32)
    norm, x = drawn(RMSNorm(256), torch.float32), torch.randn(1, 256)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(MoEStep(moe, norm, 1)(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
