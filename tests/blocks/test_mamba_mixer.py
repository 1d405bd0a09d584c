"""What both mixers promise: padding, packing, state, precision, initialisation, loading."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scans import PADDINGS, padding_mask, sequences, with_parameters
from support import assert_close, assert_same_function
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from brickwork.blocks import Mamba1, Mamba2, MambaState

DIM = 8
MIXERS = {
    "mamba1": lambda **options: Mamba1(DIM, d_state=3, **options),
    "mamba2": lambda **options: Mamba2(DIM, d_state=3, head_dim=4, num_groups=2, **options),
}
BOTH = pytest.mark.parametrize("kind", MIXERS)


def build(kind, **options):
    """A float64 mixer whose convolution bias would show at padding (B3)."""
    mixer = MIXERS[kind](**options).double()
    if mixer.conv1d.bias is not None:
        nn.init.constant_(mixer.conv1d.bias, 3.0)
    return mixer


@BOTH
@given(
    T=st.integers(1, 9),
    padding=PADDINGS.filter(bool),
    reverse=st.booleans(),
    bias=st.booleans(),
    width=st.sampled_from([1, 2, 4]),
)
def test_padded_equals_each_row_alone(kind, T, padding, reverse, bias, width):
    """B2, B3, P4; field notes, Mamba: #66, #31540, #48256, #46773 (batches of one too), fla#1272
    (interior padding), #37 (gradients with biases)."""
    mask = padding_mask(padding, 3, T)
    mixer = build(kind, bias=bias, d_conv=width)

    def padded(x):
        y = mixer(x, mask=mask, reverse=reverse)
        assert not y[~mask].any()
        return y

    def alone(x):
        y = torch.zeros_like(x) + 0 * mixer(x)
        for row in range(3):
            out = mixer(x[row, mask[row]][None], reverse=reverse)[0]
            y = y.index_put((torch.tensor(row), mask[row].nonzero()[:, 0]), out)
        return y

    run, parameters = with_parameters(mixer, padded)
    expected, _ = with_parameters(mixer, alone)
    x = torch.randn(3, T, DIM, dtype=torch.float64)
    assert_same_function(run, expected, [x, *parameters], terms=3 * T * 64, one_scale=True)
    assert_close(padded(x)[:1], mixer(x[:1], mask=mask[:1], reverse=reverse), terms=64)


@BOTH
@given(T=st.integers(1, 9), padding=PADDINGS, reverse=st.booleans())
def test_packed_equals_each_sequence_alone(kind, T, padding, reverse):
    """Field notes, Mamba: #383, #3572, #3001, #2056, #746, #955, values and gradients."""
    mask, ids = padding_mask(padding, 2, T), (torch.rand(2, T) < 0.4).long().cumsum(1)
    mixer = build(kind)

    def packed(x):
        return mixer(x, mask=mask, seq_ids=ids, reverse=reverse)

    def alone(x):
        y = torch.zeros_like(x) + 0 * mixer(x)
        for row in range(2):
            for tokens in sequences(mask, ids, row, T, False):
                out = mixer(x[row, tokens][None], reverse=reverse)[0]
                y = y.index_put((torch.tensor(row), torch.tensor(tokens)), out)
        return y

    run, parameters = with_parameters(mixer, packed)
    expected, _ = with_parameters(mixer, alone)
    x = torch.randn(2, T, DIM, dtype=torch.float64)
    assert_same_function(run, expected, [x, *parameters], terms=2 * T * 64, one_scale=True)


@BOTH
@given(
    cuts=st.lists(st.integers(0, 9), max_size=8).map(sorted),
    padding=PADDINGS,
    reverse=st.booleans(),
    width=st.sampled_from([1, 2, 4]),
)
def test_chunks_and_steps_with_a_state_equal_the_full_pass(kind, cuts, padding, reverse, width):
    """B7; field notes, Mamba: #683, #187 (step against forward), #46032, vLLM#22034 (batch of
    one), #296, #29514 (gradients through steps), #48256 (padded prefill)."""
    T = 9
    mask = padding_mask(padding, 2, T)
    mixer = build(kind, d_conv=width)
    parts = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, T])]

    def in_parts(x):
        state = MambaState()
        outputs = [
            mixer(
                x[:, at],
                mask=None if mask is None else mask[:, at],
                reverse=reverse,
                state=state,
            )
            for at in (parts[::-1] if reverse else parts)
        ]
        return torch.cat(outputs[::-1] if reverse else outputs, 1), state.conv, state.scan

    def whole(x):
        state = MambaState()
        y = mixer(x, mask=mask, reverse=reverse, state=state)
        assert_close(y, mixer(x, mask=mask, reverse=reverse), terms=64)
        return y, state.conv, state.scan

    run, parameters = with_parameters(mixer, in_parts)
    expected, _ = with_parameters(mixer, whole)
    x = torch.randn(2, T, DIM, dtype=torch.float64)
    assert_same_function(run, expected, [x, *parameters], terms=2 * T * 64, one_scale=True)


@BOTH
def test_a_padded_prefill_leaves_the_state_of_the_real_tokens(kind):
    """Field notes, Mamba: #48256 (state decayed over pads, convolution state of pads)."""
    mixer = build(kind)
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0]])
    padded = MambaState()
    mixer(x, mask=mask, state=padded)
    for row in range(2):
        alone = MambaState()
        mixer(x[row, mask[row] == 1][None], state=alone)
        assert_close(padded.conv[row], alone.conv[0], terms=8)
        assert_close(padded.scan[row], alone.scan[0], terms=64)


@BOTH
def test_reverse_is_the_flipped_pass(kind):
    mixer = build(kind)
    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    assert_close(mixer(x, reverse=True), mixer(x.flip(1)).flip(1), terms=64)


@BOTH
def test_later_tokens_change_nothing(kind):
    """B4: causality."""
    mixer = build(kind)
    x = torch.randn(1, 6, DIM, dtype=torch.float64)
    other = x.clone()
    other[:, 4:] = torch.randn(1, 2, DIM)
    assert_close(mixer(x)[:, :4], mixer(other)[:, :4], terms=64)
    assert not torch.equal(mixer(x)[:, 4:], mixer(other)[:, 4:])


@BOTH
def test_gradcheck_with_biases(kind):
    """Field notes, Mamba: #37, #203, #38600, #431."""
    mixer = build(kind, bias=True, expand=1)
    state = torch.randn(1, 3, DIM, dtype=torch.float64)
    run, parameters = with_parameters(mixer, mixer)
    leaves = [t.requires_grad_() for t in (state, *parameters)]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def float32_values(mixer):
    return {name: mixer.get_parameter(name).detach().clone() for name in mixer.float32_parameters}


@BOTH
@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: nn.Sequential(m).to(torch.bfloat16)[0],
        lambda m: copy.deepcopy(m).to(dtype=torch.float16),
        lambda m: copy.deepcopy(m.to(torch.bfloat16)),
        lambda m: pickle.loads(pickle.dumps(m.half())),
        lambda m: m.type(torch.bfloat16),
        lambda m: m.double().bfloat16(),
    ],
)
def test_decay_skip_and_step_bias_stay_float32(kind, cast):
    """Values too, not only dtypes; everything else is cast; the gradients keep the same dtype."""
    mixer = MIXERS[kind]()
    for parameter in mixer.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = float32_values(mixer)
    after = cast(mixer)
    for name, value in before.items():
        assert after.get_parameter(name).dtype == torch.float32
        assert torch.equal(after.get_parameter(name), value)
    assert after.in_proj.weight.dtype in (torch.bfloat16, torch.float16)
    for parameter in after.parameters():
        assert parameter.grad is None or parameter.grad.dtype == parameter.dtype
    after(torch.randn(1, 3, DIM, dtype=after.in_proj.weight.dtype)).sum().backward()


def _parametrize(mixer):
    class Squeezed(nn.Module):
        def forward(self, w):
            return w * 0.75

    for name in ("A_log", "D"):
        nn.utils.parametrize.register_parametrization(mixer, name, Squeezed())
    return ["parametrizations.A_log.original", "parametrizations.D.original"]


def _prune(mixer):
    prune.l1_unstructured(mixer, "D", 0.5)
    return ["D_orig"]


def _freeze(mixer):
    values = mixer.A_log.detach().clone()
    del mixer.A_log
    mixer.register_buffer("A_log", values)
    return ["A_log"]


@BOTH
@pytest.mark.parametrize("change", [_parametrize, _prune, _freeze])
def test_casts_of_parameters_that_became_something_else(kind, change):
    mixer = MIXERS[kind]()
    names = change(mixer)
    held = dict([*mixer.named_parameters(), *mixer.named_buffers()])
    before = {name: held[name].detach().clone() for name in names}
    for cast in (nn.Module.cpu, nn.Module.float, nn.Module.bfloat16):
        cast(mixer)
        mixer(torch.randn(1, 3, DIM, dtype=mixer.in_proj.weight.dtype)).sum().backward()
    held = dict([*mixer.named_parameters(), *mixer.named_buffers()])
    for name, value in before.items():
        assert torch.equal(held[name], value), name


@BOTH
def test_float32_parameters_survive_loading(kind):
    """From a narrow checkpoint, assigned or copied; under a narrow default dtype; from meta."""
    source = MIXERS[kind]()
    narrow = {k: v.bfloat16() for k, v in source.state_dict().items()}
    for assign in (False, True):
        mixer = nn.ModuleDict({"a": MIXERS[kind]().bfloat16()})
        mixer.load_state_dict({f"a.{k}": v for k, v in narrow.items()}, assign=assign)
        for name in source.float32_parameters:
            assert mixer.a.get_parameter(name).dtype == torch.float32
            assert torch.equal(mixer.a.get_parameter(name), narrow[name].float())
        assert mixer.a.in_proj.weight.dtype == torch.bfloat16
    torch.set_default_dtype(torch.bfloat16)
    try:
        built = MIXERS[kind]()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(v.dtype == torch.float32 for v in float32_values(built).values())
    with torch.device("meta"):
        empty = MIXERS[kind]()
    empty = empty.to(torch.bfloat16).to_empty(device="cpu")
    empty.load_state_dict(source.state_dict())
    assert all(torch.equal(v, float32_values(source)[n]) for n, v in float32_values(empty).items())


@BOTH
def test_double_is_double(kind):
    mixer = MIXERS[kind]().double()
    assert all(p.dtype == torch.float64 for p in mixer.parameters())
    assert all(p.dtype == torch.float32 for p in mixer.float().parameters())


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_mixer_is_near_the_wide_one(kind, dtype):
    """The roundings of the stored activations, a few ulp, and nothing worse."""
    mixer = MIXERS[kind](conv_bias=True)
    x = torch.randn(2, 20, DIM)
    expected = mixer(x)
    actual = copy.deepcopy(mixer).to(dtype)(x.to(dtype))
    assert actual.dtype == dtype
    error = (actual.float() - expected).abs().max() / expected.abs().max()
    assert error < 16 * torch.finfo(dtype).eps


@BOTH
def test_autocast(kind):
    """Field notes, Mamba: fla#1264, fla#137."""
    mixer = MIXERS[kind]()
    x = torch.randn(2, 5, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        y = mixer(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in mixer.parameters())


def assert_initial(mixer):
    """B5: step sizes in [1e-3, 1e-1], D = 1, the decay as Mamba starts it."""
    bias = mixer.dt_proj.bias if isinstance(mixer, Mamba1) else mixer.dt_bias
    step = nn.functional.softplus(bias)
    assert (step > 0.99e-3).all()
    assert (step < 1.01e-1).all()
    assert step.log().std() > 0.5
    assert torch.equal(mixer.D, torch.ones_like(mixer.D))
    A = -torch.exp(mixer.A_log)
    if isinstance(mixer, Mamba1):
        assert_close(A, -torch.arange(1.0, mixer.d_state + 1).expand_as(A))
    else:
        assert (A <= -1).all()
        assert (A >= -16).all()


@BOTH
def test_initial_values_survive_a_parent(kind):
    """B5: the bare block, a parent's generic initialisation, meta loading, module-wise resets."""
    big = {"mamba1": lambda: Mamba1(64), "mamba2": lambda: Mamba2(64, head_dim=2, d_state=4)}[kind]
    mixer = big()
    assert_initial(mixer)

    def generic(module):
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    filters = mixer.conv1d.weight.detach().clone()
    nn.Sequential(mixer).apply(generic)
    assert_initial(mixer)
    assert torch.equal(mixer.conv1d.weight, filters)

    with torch.device("meta"):
        empty = big()
    empty.to_empty(device="cpu")
    for parameter in empty.parameters():
        nn.init.constant_(parameter, torch.nan)
    for module in reversed(list(empty.modules())):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(p.isfinite().all() for p in empty.parameters())
    assert_initial(empty)
    assert_initial(copy.deepcopy(mixer))


@BOTH
def test_compiles_to_one_graph_and_checkpoints(kind):
    mixer = build(kind)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    x = torch.randn(2, 4, DIM, dtype=torch.float64)

    def run(x):
        return mixer(x, mask=mask)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same_function(compiled, run, [x], terms=64)
    assert_same_function(lambda x: checkpoint(run, x, use_reentrant=False), run, [x], terms=64)


@BOTH
def test_exports_to_plain_operators(kind):
    """Field notes, Mamba: pytorch#130150."""
    mixer = build(kind)
    x = torch.randn(2, 4, DIM, dtype=torch.float64)
    program = torch.export.export(mixer, (x,))
    assert not [n for n in program.graph.nodes if "brickwork" in str(n.target)]
    other = torch.randn_like(x)
    assert_close(program.module()(other), mixer(other), terms=64)


@BOTH
def test_a_step_compiles_without_recompiling(kind):
    mixer = build(kind)
    x = torch.randn(1, 6, DIM, dtype=torch.float64)
    state, compiled = MambaState(), MambaState()
    step = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        mixer(x[:, :2], state=state)
        mixer(x[:, :2], state=compiled)
        step(x[:, 2:3], state=compiled)
        with torch.compiler.set_stance("fail_on_recompile"):
            rest = [step(x[:, t : t + 1], state=compiled) for t in range(3, 6)]
        expected = mixer(x[:, 2:], state=state)
    assert_close(torch.cat(rest, 1), expected[:, 1:], terms=64)


@BOTH
def test_empty_input(kind):
    mixer = build(kind)
    state = MambaState()
    assert mixer(torch.zeros(0, 3, DIM).double()).shape == (0, 3, DIM)
    assert mixer(torch.zeros(2, 0, DIM).double(), state=state).shape == (2, 0, DIM)
    x = torch.randn(2, 3, DIM).double()
    assert_close(mixer(x, state=state), mixer(x), terms=64)


def test_state_selects_detaches_and_resets():
    mixer = build("mamba1")
    x = torch.randn(2, 3, DIM).double()
    state = MambaState()
    mixer(x, state=state)
    assert state.scan.requires_grad
    state.detach()
    assert not state.scan.requires_grad
    state.select(torch.tensor([1, 1, 0]))
    rows = torch.tensor([1, 1, 0])
    y = mixer(x[rows, :1], state=state)
    expected = mixer(torch.cat([x, x[:, :1]], 1))[rows, -1:]
    assert_close(y, expected, terms=64)
    state.reset()
    assert state.is_empty
    assert_close(mixer(x, state=state), mixer(x), terms=64)
    MambaState().select(rows)
    MambaState().detach()


@BOTH
def test_errors(kind):
    mixer = build(kind)
    x = torch.randn(2, 3, DIM).double()
    with pytest.raises(
        ValueError, match=r"x must have shape \(B, T, C\) with C = 8, got \(2, 3, 7\)"
    ):
        mixer(x[..., :7])
    with pytest.raises(ValueError, match=r"mask must have shape \(B, T\) = \(2, 3\)"):
        mixer(x, mask=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="seq_ids must be integers"):
        mixer(x, seq_ids=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="reverse must be True or False, got 'left'"):
        mixer(x, reverse="left")
    with pytest.raises(TypeError, match="attention_mask"):
        mixer(x, attention_mask=None)
    with pytest.raises(ValueError, match="state must be a MambaState or None, got tuple"):
        mixer(x, state=(None, None))
    state = MambaState()
    mixer(x, state=state)
    with pytest.raises(ValueError, match="state holds a batch of 2, x one of 1"):
        mixer(x[:1], state=state)
    with pytest.raises(ValueError, match="state was filled with reverse=False, got reverse=True"):
        mixer(x, state=state, reverse=True)


def test_a_state_belongs_to_one_mixer():
    first, second = Mamba1(8), Mamba1(8)
    state, x = MambaState(), torch.randn(1, 3, 8)
    first(x, state=state)
    first(x, state=state)
    with pytest.raises(ValueError, match="state must be this Mamba1's own"):
        second(x, state=state)
    state.reset()
    second(x, state=state)
