"""Our functions against mamba-ssm's reference functions: values and gradients, both precisions."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator

import pytest
import torch
from einops import rearrange, repeat
from mamba_ssm.modules.ssd_minimal import ssd_minimal_discrete
from mamba_ssm.ops import selective_scan_interface
from mamba_ssm.ops.selective_scan_interface import mamba_inner_ref, selective_scan_ref
from mamba_ssm.ops.triton import ssd_combined
from mamba_ssm.ops.triton.layer_norm import layer_norm_ref, rms_norm_ref
from mamba_ssm.ops.triton.layernorm_gated import rms_norm_ref as gated_rms_norm_ref
from mamba_ssm.ops.triton.selective_state_update import selective_state_update_ref
from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_ref, ssd_selective_scan
from support import assert_close, gradients

from brickwork.blocks import Mamba1, Mamba2
from brickwork.kernels.add_norm import add_norm
from brickwork.kernels.rms_norm import rms_norm
from brickwork.kernels.selective_scan import selective_scan
from brickwork.kernels.selective_scan_mamba_ssm import selective_scan_mamba_ssm
from brickwork.kernels.ssd_scan import ssd_scan

DTYPES = [torch.float32, torch.float64]
SCANS = ["torch", "chunked", "cpu"]


@contextlib.contextmanager
def in_the_dtype_of_the_inputs() -> Iterator[None]:
    """Their references cast everything to float32; within the block, to float64 instead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def theirs(function, dtype):
    def run(*tensors):
        with in_the_dtype_of_the_inputs() if dtype == torch.float64 else contextlib.nullcontext():
            return function(*tensors)

    return run


def same(ours, reference, tensors, dtype, terms):
    """Equal values, and equal gradients of everything, computed in `dtype`."""
    tensors = [t.to(dtype) for t in tensors]
    values, grads = gradients(ours, tensors)
    expected, expected_grads = gradients(theirs(reference, dtype), tensors)
    assert len(values) == len(expected)
    for i, (a, e) in enumerate(zip([*values, *grads], [*expected, *expected_grads])):
        assert_close(a, e.to(a.dtype), terms=terms, compute=dtype, name=f"result {i}")


def scan_inputs(T, G, options):
    x, delta, z = torch.randn(3, 2, T, 6)
    B, C = torch.randn(2, 2, T, G, 4) if G else torch.randn(2, 2, T, 4)
    tensors = [x, delta, -torch.rand(6, 4) * 3, B, C]
    return tensors + ([torch.randn(6), z, torch.randn(6)] if options else [])


def their_selective_scan(function, softplus=True):
    """One of mamba-ssm's functions in our layout."""

    def run(x, delta, A, B, C, D=None, z=None, bias=None):
        B, C = (rearrange(t, "b t ... n -> b ... n t") for t in (B, C))
        z = None if z is None else z.mT
        y, state = function(x.mT, delta.mT, A, B, C, D, z, bias, softplus, True)
        return y.mT, state

    return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", SCANS)
@pytest.mark.parametrize("options", [False, True])
@pytest.mark.parametrize("G", [0, 1, 3])
@pytest.mark.parametrize("T", [1, 2, 33, 65])
def test_selective_scan(T, G, options, backend, dtype):
    def ours(x, delta, A, B, C, D=None, z=None, bias=None):
        named = {"D": D, "z": z, "delta_bias": bias, "backend": backend}
        return selective_scan(x, delta, A, B, C, softplus=True, **named)

    tensors = scan_inputs(T, G, options)
    same(ours, their_selective_scan(selective_scan_ref), tensors, dtype, T)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("options", [False, True])
def test_our_backend_on_the_package(monkeypatch, options, reverse):
    """The arguments that the adapter hands over, with the package's reference as the kernel."""

    def kernel(*arguments, return_last_state):
        y, last = selective_scan_ref(*arguments, return_last_state=return_last_state)
        return y, last.detach()

    signature = inspect.signature(selective_scan_interface.selective_scan_fn)
    assert signature == inspect.signature(selective_scan_ref)
    monkeypatch.setattr(selective_scan_interface, "selective_scan_fn", kernel)
    absent = dict.fromkeys(("mask", "starts", "initial_state"))

    def adapted(x, delta, A, B, C, D=None, z=None, bias=None):
        named = {"D": D, "z": z, "delta_bias": bias, "reverse": reverse, "softplus": True}
        return selective_scan_mamba_ssm(x, delta, A, B, C, **named, **absent)

    def ours(x, delta, A, B, C, D=None, z=None, bias=None):
        named = {"D": D, "z": z, "delta_bias": bias, "reverse": reverse, "softplus": True}
        return selective_scan(x, delta, A, B, C, **named, backend="torch")

    tensors = scan_inputs(9, 3, options)
    values, grads = gradients(adapted, tensors)
    expected, expected_grads = gradients(ours, tensors)
    for a, e in zip([*values, *grads], [*expected, *expected_grads]):
        assert_close(a, e, terms=9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", SCANS)
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("G", [1, 2, 4])
def test_ssd_scan_against_ssd_minimal_discrete(G, initial, backend, dtype):
    x, delta = torch.randn(2, 32, 4, 5), torch.rand(2, 32, 4)
    tensors = [x, delta, -torch.rand(4) * 3, torch.randn(2, 32, G, 6), torch.randn(2, 32, G, 6)]
    tensors += [torch.randn(2, 4, 5, 6)] if initial else []

    def ours(x, delta, A, B, C, state=None):
        return ssd_scan(x, delta, A, B, C, initial_state=state, chunk_size=8, backend=backend)

    def minimal(x, delta, A, B, C, state=None):
        B, C = (repeat(t, "b t g n -> b t (g k) n", k=4 // G) for t in (B, C))
        before = None if state is None else state[:, None]
        return ssd_minimal_discrete(x * delta[..., None], A * delta, B, C, 8, before)

    same(ours, minimal, tensors, dtype, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", SCANS)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("T", [1, 31, 33])
def test_ssd_scan_against_the_scan_of_mamba_1(monkeypatch, T, per_channel, backend, dtype):
    """Gate, D per head or channel, bias and softplus; mamba-ssm says both models by one scan."""
    monkeypatch.setattr(selective_scan_interface, "selective_scan_fn", selective_scan_ref)
    x, z = torch.randn(2, 2, T, 4, 5)
    D = torch.randn(4, 5) if per_channel else torch.randn(4)
    tensors = [x, torch.randn(2, T, 4), -torch.rand(4) * 3]
    tensors += [torch.randn(2, T, 2, 6), torch.randn(2, T, 2, 6), D, z, torch.randn(4)]

    def ours(x, delta, A, B, C, D, z, bias):
        named = {"D": D, "z": z, "delta_bias": bias, "softplus": True, "backend": backend}
        return (ssd_scan(x, delta, A, B, C, **named, chunk_size=8).y,)

    def wide(x, delta, A, B, C, D, z, bias):
        # their conversion of A to float32 would undo float64
        A = repeat(A, "h -> (h p) n", p=5, n=6)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "to", lambda t, *a, **k: t)
            return (ssd_selective_scan(x, delta, A, B, C, D, z, bias, True),)

    same(ours, wide, tensors, dtype, T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_single_steps_of_mamba_1(dtype):
    """A state update in place against a scan over one token."""
    state, x, dt, A = torch.randn(2, 6, 4), torch.randn(2, 6), torch.randn(2, 6), -torch.rand(6, 4)
    B, C, z = torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 6)
    D, bias = torch.randn(6), torch.randn(6)
    given = [t.to(dtype) for t in (state, x, dt, A, B, C, D, z, bias)]
    state, x, dt, A, B, C, D, z, bias = given
    named = {"D": D, "delta_bias": bias, "softplus": True, "initial_state": state}
    y, final = selective_scan(
        x[:, None], dt[:, None], A, B[:, None], C[:, None], z=z[:, None], **named
    )
    updated = state.clone()
    expected = selective_state_update_ref(updated, x, dt, A, B, C, D, z, bias, True)
    assert_close(y[:, 0], expected, terms=4)
    assert_close(final, updated, terms=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_single_steps_of_mamba_2(dtype):
    H, P, N, G = 4, 3, 5, 2
    state, x, dt = torch.randn(2, H, P, N), torch.randn(2, H, P), torch.randn(2, H)
    A, D, bias = -torch.rand(H), torch.randn(H), torch.randn(H)
    B, C, z = torch.randn(2, G, N), torch.randn(2, G, N), torch.randn(2, H, P)
    given = [t.to(dtype) for t in (state, x, dt, A, B, C, D, z, bias)]
    state, x, dt, A, B, C, D, z, bias = given
    named = {"D": D, "delta_bias": bias, "softplus": True, "initial_state": state}
    y, final = ssd_scan(x[:, None], dt[:, None], A, B[:, None], C[:, None], z=z[:, None], **named)
    updated = state.clone()
    wide = [
        repeat(dt, "b h -> b h p", p=P),
        repeat(A, "h -> h p n", p=P, n=N),
        B,
        C,
        repeat(D, "h -> h p", p=P),
        z,
        repeat(bias, "h -> h p", p=P),
    ]
    expected = selective_state_update_ref(updated, x, *wide, True)
    assert_close(y[:, 0], expected, terms=N)
    assert_close(final, updated, terms=N)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("kind", "reference"), [("rms", rms_norm_ref), ("layer", layer_norm_ref)])
def test_add_norm(kind, reference, residual, bias, dtype):
    tensors = [torch.randn(3, 33), torch.randn(33)]
    tensors += [torch.randn(33)] if bias else []
    tensors += [torch.randn(3, 33)] if residual else []

    def split(tensors):
        x, weight, *rest = tensors
        return x, weight, rest[0] if bias else None, rest[-1] if residual else None

    def ours(*tensors):
        x, weight, b, r = split(tensors)
        return add_norm(x, r, weight, b, kind=kind, eps=1e-5)

    def wide(*tensors):
        x, weight, b, r = split(tensors)
        return reference(x, weight, b, residual=r, eps=1e-5, prenorm=True, upcast=True)

    same(ours, wide, tensors, dtype, 33)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype):
    def wide(x, weight):
        return (rms_norm_ref(x, weight, None, eps=1e-6, upcast=True),)

    tensors = [torch.randn(3, 33), torch.randn(33)]
    same(lambda x, w: (rms_norm(x, w, eps=1e-6),), wide, tensors, dtype, 33)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_add_norm_in_half_precision(half):
    """The residual in float32, the result rounded once: the bits of mamba-ssm's reference."""
    x, weight, residual = torch.randn(7, 33).to(half), torch.randn(33), torch.randn(7, 33)
    y, total = add_norm(x, residual, weight, eps=1e-5, residual_dtype=torch.float32)
    expected, kept = rms_norm_ref(
        x, weight, None, residual=residual, eps=1e-5, prenorm=True, upcast=True
    )
    assert torch.equal(total, kept)
    assert_close(y, expected, terms=33)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_gated_norm_of_mamba_2(groups, before, dtype):
    mixer = Mamba2(8, d_state=4, head_dim=4, num_groups=groups, norm_before_gate=before)

    def ours(y, z, weight):
        silu = torch.nn.functional.silu
        normed = torch.func.functional_call(
            mixer.norm, {"weight": weight}, (y if before else y * silu(z),)
        )
        return (normed * silu(z) if before else normed,)

    def wide(y, z, weight):
        size = None if groups == 1 else 16 // groups
        return (gated_rms_norm_ref(y, weight, None, z, 1e-5, size, before),)

    tensors = [torch.randn(2, 5, 16), torch.randn(2, 5, 16), torch.randn(16)]
    same(ours, wide, tensors, dtype, 16)


def their_convolution(x, weight, bias=None, *others, activation=None, **named):
    from causal_conv1d.causal_conv1d_interface import causal_conv1d_ref

    return causal_conv1d_ref(x, weight, bias, activation=activation)


def test_the_mixer_of_mamba_1(monkeypatch):
    """The whole block, from its projections on, against mamba-ssm's fused reference."""
    monkeypatch.setattr(selective_scan_interface, "causal_conv1d_fn", their_convolution)
    monkeypatch.setattr(selective_scan_interface, "selective_scan_fn", selective_scan_ref)
    mixer = Mamba1(8, d_state=4, dt_rank=3)
    names = dict(mixer.named_parameters())
    x = torch.randn(2, 9, 8)

    def ours(x, *parameters):
        return (torch.func.functional_call(mixer, dict(zip(names, parameters)), (x,)),)

    def fused(x, *parameters):
        p = dict(zip(names, parameters))
        return (
            mamba_inner_ref(
                (x @ p["in_proj.weight"].mT).mT,
                p["conv1d.weight"],
                p["conv1d.bias"],
                p["x_proj.weight"],
                p["dt_proj.weight"],
                p["out_proj.weight"],
                None,
                -torch.exp(p["A_log"]),
                D=p["D"],
                delta_bias=p["dt_proj.bias"],
            ),
        )

    same(ours, fused, [x, *names.values()], torch.float32, 16)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.01, 0.5)])
def test_the_mixer_of_mamba_2(monkeypatch, limit, before, groups):
    monkeypatch.setattr(ssd_combined, "causal_conv1d_fn", their_convolution)
    # their reference forgets the groups of the norm, which their fused function passes on
    norm = functools.partial(gated_rms_norm_ref, group_size=16 // groups)
    monkeypatch.setattr(ssd_combined, "rmsnorm_fn", norm)
    monkeypatch.setattr(selective_scan_interface, "selective_scan_fn", selective_scan_ref)
    options = {"d_state": 6, "head_dim": 4, "num_groups": groups, "dt_limit": limit}
    mixer = Mamba2(8, norm_before_gate=before, **options)
    names = dict(mixer.named_parameters())
    x = torch.randn(2, 9, 8)

    def ours(x, *parameters):
        return (torch.func.functional_call(mixer, dict(zip(names, parameters)), (x,)),)

    def fused(x, *parameters):
        p = dict(zip(names, parameters))
        return (
            mamba_split_conv1d_scan_ref(
                x @ p["in_proj.weight"].mT,
                p["conv1d.weight"][:, 0],
                p["conv1d.bias"],
                p["dt_bias"],
                -torch.exp(p["A_log"]),
                p["D"],
                chunk_size=256,
                dt_limit=limit,
                rmsnorm_weight=p["norm.weight"],
                rmsnorm_eps=1e-5,
                outproj_weight=p["out_proj.weight"],
                headdim=4,
                ngroups=groups,
                norm_before_gate=before,
            ),
        )

    same(ours, fused, [x, *names.values()], torch.float32, 16)
