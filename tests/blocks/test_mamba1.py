from __future__ import annotations

import pytest
import torch
from support import assert_close
from torch import nn

from brickwork.blocks import Mamba1


def by_steps(mixer, u):
    """The equations of Mamba, token by token, in plain operators."""
    I, N, W = mixer.D.shape[0], mixer.d_state, mixer.conv1d.weight.shape[-1]
    A = -mixer.A_log.exp()
    h = torch.zeros(u.shape[0], I, N, dtype=u.dtype)
    window = torch.zeros(u.shape[0], I, W, dtype=u.dtype)
    outputs = []
    for t in range(u.shape[1]):
        x, z = mixer.in_proj(u[:, t]).split(I, -1)
        window = torch.cat([window[..., 1:], x[..., None]], -1)
        x = (window * mixer.conv1d.weight[:, 0]).sum(-1)
        x = x if mixer.conv1d.bias is None else x + mixer.conv1d.bias
        x = x * torch.sigmoid(x)
        dt, B, C = mixer.x_proj(x).split([mixer.dt_rank, N, N], -1)
        step = torch.log1p(torch.exp(dt @ mixer.dt_proj.weight.mT + mixer.dt_proj.bias))
        h = torch.exp(step[..., None] * A) * h + (step * x)[..., None] * B[:, None]
        y = (h * C[:, None]).sum(-1) + mixer.D * x
        outputs.append(mixer.out_proj(y * z * torch.sigmoid(z)))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("d_conv", "expand", "dt_rank"), [(4, 2, None), (1, 1, 3), (5, 3, 1)])
def test_equals_the_equations(bias, d_conv, expand, dt_rank):
    options = {"d_conv": d_conv, "expand": expand, "dt_rank": dt_rank, "bias": bias}
    mixer = Mamba1(20, d_state=5, conv_bias=not bias, **options).double()
    nn.init.normal_(mixer.D)
    u = torch.randn(2, 11, 20, dtype=torch.float64)
    assert_close(mixer(u), by_steps(mixer, u), terms=11 * 60)


def test_parameters_are_mamba_ssm_s():
    shapes = {k: tuple(v.shape) for k, v in Mamba1(40, bias=True).state_dict().items()}
    assert shapes == {
        "in_proj.weight": (160, 40),
        "in_proj.bias": (160,),
        "conv1d.weight": (80, 1, 4),
        "conv1d.bias": (80,),
        "x_proj.weight": (35, 80),
        "dt_proj.weight": (80, 3),
        "dt_proj.bias": (80,),
        "A_log": (80, 16),
        "D": (80,),
        "out_proj.weight": (40, 80),
        "out_proj.bias": (40,),
    }
    names = Mamba1(40, conv_bias=False).state_dict()
    assert not {"in_proj.bias", "out_proj.bias", "conv1d.bias", "x_proj.bias"} & set(names)


def test_initial_weight_of_the_step_projection():
    weight = Mamba1(256).dt_proj.weight
    assert weight.abs().max() <= 16**-0.5
    assert abs(weight.std() / (16**-0.5 / 3**0.5) - 1) < 0.05


def test_errors():
    for name in ("d_state", "d_conv", "expand", "dt_rank"):
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
            Mamba1(8, **{name: 0})
    with pytest.raises(ValueError, match=r"dim must be an integer of at least 1, got 8\.0"):
        Mamba1(8.0)
    with pytest.raises(TypeError):
        Mamba1(8, 16)
