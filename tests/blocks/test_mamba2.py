from __future__ import annotations

import pytest
import torch
from support import assert_close
from torch import nn

from brickwork.blocks import Mamba2
from brickwork.blocks.mamba2 import GroupRMSNorm


def by_steps(mixer, u):
    """The equations of Mamba-2, token by token, in plain operators."""
    H, P, G, N = mixer.num_heads, mixer.head_dim, mixer.num_groups, mixer.d_state
    I, W = H * P, mixer.conv1d.weight.shape[-1]
    A = -mixer.A_log.exp()
    S = torch.zeros(u.shape[0], H, P, N, dtype=u.dtype)
    window = torch.zeros(u.shape[0], I + 2 * G * N, W, dtype=u.dtype)
    outputs = []
    for t in range(u.shape[1]):
        z, x, B, C, dt = mixer.in_proj(u[:, t]).split([I, I, G * N, G * N, H], -1)
        window = torch.cat([window[..., 1:], torch.cat([x, B, C], -1)[..., None]], -1)
        xBC = (window * mixer.conv1d.weight[:, 0]).sum(-1)
        xBC = xBC if mixer.conv1d.bias is None else xBC + mixer.conv1d.bias
        xBC = xBC * torch.sigmoid(xBC)
        x = xBC[:, :I].reshape(-1, H, P)
        B, C = (xBC[:, I:].reshape(-1, 2, G, N)[:, i] for i in range(2))
        B, C = (torch.stack([t[:, h // (H // G)] for h in range(H)], 1) for t in (B, C))
        step = torch.log1p(torch.exp(dt + mixer.dt_bias)).clamp(*mixer.dt_limit)
        S = torch.exp(step * A)[..., None, None] * S
        S = S + (step[..., None] * x)[..., None] * B[:, :, None]
        D = mixer.D.reshape(H, -1)
        y = ((S * C[:, :, None]).sum(-1) + D * x).reshape(-1, I)
        gate = z * torch.sigmoid(z)
        y = y if mixer.norm_before_gate else y * gate
        groups = y.reshape(-1, G, I // G)
        y = groups * (groups.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        y = y.reshape(-1, I) * mixer.norm.weight
        outputs.append(mixer.out_proj(y * gate if mixer.norm_before_gate else y))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_groups": 2, "bias": True},
        {"num_groups": 4, "norm_before_gate": True},
        {"dt_limit": (0.02, 0.05), "num_groups": 2},
        {"D_has_hdim": True, "conv_bias": False},
        {"head_dim": 1, "expand": 1, "D_has_hdim": True},
        {"d_conv": 1, "chunk_size": 3},
    ],
)
@pytest.mark.parametrize("T", [1, 3, 4, 5, 9])
def test_equals_the_equations(options, T):
    """B4: any length and chunk, heads unlike head_dim, groups, dt_limit, D per head or channel;
    field notes, Mamba: #547, #32570 (the norm's groups)."""
    mixer = Mamba2(8, **{"d_state": 5, "head_dim": 4, "chunk_size": 4, **options}).double()
    nn.init.normal_(mixer.D)
    nn.init.normal_(mixer.norm.weight)
    u = torch.randn(2, T, 8, dtype=torch.float64)
    assert_close(mixer(u), by_steps(mixer, u), terms=T * 64)
    parameters = list(mixer.parameters())
    upstream = torch.randn(2, T, 8, dtype=torch.float64)
    actual = torch.autograd.grad(mixer(u), parameters, upstream)
    expected = torch.autograd.grad(by_steps(mixer, u), parameters, upstream)
    scale = max(e.abs().max().item() for e in expected)
    for a, e in zip(actual, expected):
        assert_close(a, e, terms=2 * T * 64, scale=scale)


def test_parameters_are_mamba_ssm_s():
    mixer = Mamba2(40, d_state=6, head_dim=10, num_groups=2, bias=True, D_has_hdim=True)
    assert {k: tuple(v.shape) for k, v in mixer.state_dict().items()} == {
        "in_proj.weight": (80 + 80 + 24 + 8, 40),
        "in_proj.bias": (80 + 80 + 24 + 8,),
        "conv1d.weight": (104, 1, 4),
        "conv1d.bias": (104,),
        "dt_bias": (8,),
        "A_log": (8,),
        "D": (80,),
        "norm.weight": (80,),
        "out_proj.weight": (40, 80),
        "out_proj.bias": (40,),
    }
    assert Mamba2(64).D.shape == (2,)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_norm(groups):
    norm = GroupRMSNorm(8, num_groups=groups).double()
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    parts = x.unflatten(-1, (groups, -1))
    expected = parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_close(norm(x), expected.flatten(-2) * norm.weight, terms=8)
    with pytest.raises(ValueError, match="x must have width 8"):
        norm(x[..., :4])


def test_errors():
    with pytest.raises(
        ValueError, match=r"head_dim must divide expand · dim, got head_dim=7, .*=16"
    ):
        Mamba2(8, head_dim=7)
    with pytest.raises(
        ValueError, match="num_groups must divide the heads, got num_groups=3, heads=4"
    ):
        Mamba2(8, head_dim=4, num_groups=3)
    for limit in ((-0.1, 1.0), (0.2, 0.1), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match=r"dt_limit must be \(low, high\)"):
            Mamba2(8, head_dim=4, dt_limit=limit)
    with pytest.raises(ValueError, match="chunk_size must be an integer of at least 1"):
        Mamba2(8, head_dim=4, chunk_size=0)
    with pytest.raises(ValueError, match="num_groups must divide dim, got num_groups=3, dim=8"):
        GroupRMSNorm(8, num_groups=3)
    with pytest.raises(ValueError, match="eps must be a finite number"):
        GroupRMSNorm(8, eps=-1.0)
