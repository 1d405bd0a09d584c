from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close, gradcheck

from brickwork.kernels.backend import BackendUnavailable
from brickwork.kernels.rms_norm import rms_norm
from brickwork.kernels.rope import rope
from brickwork.kernels.rope_qk import rope_qk, rope_qk_reference

LAYOUTS = ["half", "interleaved"]


def make(B=2, T=3, H=4, G=2, D=8, R=6, layout="half"):
    q, k = torch.randn(B, T, H, D), torch.randn(B, T, G, D)
    weights = {"q_weight": torch.randn(D), "k_weight": torch.randn(D)}
    turn = {"inv_freq": torch.rand(R // 2), "layout": layout, "rotary_dim": R, "scale": 1.3}
    return q, k, torch.randint(0, 99, (B, T)), weights, turn


@given(
    sizes=st.tuples(*(st.integers(1, 5) for _ in range(4))),
    layout=st.sampled_from(LAYOUTS),
    cast=st.sampled_from(["once", "before_weight"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_is_the_ops_one_after_the_other(sizes, layout, cast, dtype):
    """A5, D1 33: the norm of each head comes before its rotation."""
    q, k, positions, weights, turn = make(*sizes, layout=layout)
    q, k = q.to(dtype), k.to(dtype)
    for given_weights in ({}, weights):
        found = rope_qk(q, k, positions, **given_weights, **turn, eps=0.1, cast=cast)
        for result, x, weight in zip(found, (q, k), given_weights.values() or (None, None)):
            if weight is not None:
                x = rms_norm(x, weight, eps=0.1, cast=cast)
            assert torch.equal(result, rope(x, positions, **turn))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck(layout):
    q, k, positions, weights, turn = make(1, 2, 2, 1, layout=layout)

    def function(q, k, q_weight, k_weight):
        return rope_qk(q, k, positions, q_weight=q_weight, k_weight=k_weight, eps=0.1, **turn)

    gradcheck(function, [q, k, *weights.values()])


def test_empty_meta_and_strided():
    q, k, positions, weights, turn = make()
    out = rope_qk(q[:, :0], k[:, :0], positions[:, :0], **weights, **turn)
    assert [t.shape for t in out] == [(2, 0, 4, 8), (2, 0, 2, 8)]
    on_meta = {n: t.to("meta") for n, t in {**weights, "inv_freq": turn["inv_freq"]}.items()}
    out = rope_qk(q.to("meta"), k.to("meta"), positions.to("meta"), **{**turn, **on_meta})
    assert [t.shape for t in out] == [q.shape, k.shape]
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    expected = rope_qk(q, k, positions, **weights, **turn)
    assert_close(rope_qk(turned, k, positions, **weights, **turn).q, expected.q, terms=8)


def test_compiles_to_one_graph():
    q, k, positions, weights, turn = make()
    compiled = torch.compile(rope_qk, fullgraph=True, backend="aot_eager")
    found = compiled(q, k, positions, **weights, **turn)
    for a, b in zip(found, rope_qk_reference(q, k, positions, **weights, **turn)):
        assert_close(a, b, terms=8)


def test_errors():
    q, k, positions, weights, turn = make()
    with pytest.raises(ValueError, match=r"q must have shape \(B, T, H, D\), got"):
        rope_qk(q[0], k, positions, **turn)
    with pytest.raises(ValueError, match=r"k must have shape \(B, T, G, D\) with T = 3 as in q"):
        rope_qk(q, k[:, :2], positions, **turn)
    with pytest.raises(ValueError, match=r"k_weight must have shape \(D,\) with D = 8 as in q"):
        rope_qk(q, k, positions, **{**weights, "k_weight": torch.ones(7)}, **turn)
    with pytest.raises(ValueError, match=r"k_weight must be given with q_weight, got None"):
        rope_qk(q, k, positions, q_weight=torch.ones(8), **turn)
    with pytest.raises(ValueError, match=r"q_weight must be given with k_weight, got None"):
        rope_qk(q, k, positions, k_weight=torch.ones(8), **turn)
    with pytest.raises(ValueError, match=r"k must be floating point"):
        rope_qk(q, k.long(), positions, **turn)
    with pytest.raises(ValueError, match="eps must be a finite number"):
        rope_qk(q, k, positions, **turn, eps=-1.0)
    with pytest.raises(ValueError, match="cast must be one of"):
        rope_qk(q, k, positions, **turn, cast="later")
    with pytest.raises(BackendUnavailable, match="rope has no backend 'cpu'"):
        rope_qk(q, k, positions, **turn, backend="cpu")
