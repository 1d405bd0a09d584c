from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scans import PADDINGS, padding_mask, sequences, with_parameters
from support import assert_close, assert_same_function
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from brickwork.blocks import BiMamba, Mamba1, Mamba2, MambaState, pack, pad
from brickwork.kernels.backend import prefer

DIM = 8
MIXERS = {
    "mamba1": (Mamba1, {"d_state": 3}),
    "mamba2": (Mamba2, {"d_state": 3, "head_dim": 4, "num_groups": 2}),
}
GRID = list(itertools.product(MIXERS, ["add", "multiply"], [True, False], [False, True]))
EVERY = pytest.mark.parametrize(("kind", "combine", "tie", "bias"), GRID)


def build(kind="mamba1", combine="add", tie=True, bias=False):
    """A float64 block whose convolution biases would show at padding (B3)."""
    mixer, options = MIXERS[kind]
    block = BiMamba(DIM, mixer=mixer, combine=combine, tie=tie, bias=bias, **options).double()
    for side in (block.mamba_fwd, block.mamba_rev):
        nn.init.constant_(side.conv1d.bias, 3.0)
    return block


def by_flips(block, x):
    """`combine(fwd(x), flip(rev(flip(x))))` with two whole mixers."""
    fwd, rev = block.mamba_fwd(x), block.mamba_rev(x.flip(1)).flip(1)
    return fwd + rev if block.combine == "add" else fwd * rev


@EVERY
def test_equals_its_equation(kind, combine, tie, bias):
    """Values and every gradient, the doubled bias of a tied out_proj among them."""
    block = build(kind, combine, tie, bias)
    run, parameters = with_parameters(block, block)
    expected, _ = with_parameters(block, lambda x: by_flips(block, x))
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    assert_same_function(run, expected, [x, *parameters], terms=2 * 7 * 64, one_scale=True)


@pytest.mark.parametrize(("kind", "combine", "tie", "bias"), GRID[::3])
@given(T=st.integers(1, 8), padding=PADDINGS.filter(bool), packed=st.booleans())
def test_padded_and_packed_equal_each_sequence_alone(kind, combine, tie, bias, T, padding, packed):
    """B2, B3, P4; field notes, Mamba: #236, #244, #383."""
    block = build(kind, combine, tie, bias)
    mask = padding_mask(padding, 2, T)
    ids = (torch.rand(2, T) < 0.4).long().cumsum(1) if packed else None

    def together(x):
        y = block(x, mask=mask, seq_ids=ids)
        assert not y[~mask].any()
        return y

    def alone(x):
        y = torch.zeros_like(x) + 0 * block(x)
        for row in range(2):
            for tokens in sequences(mask, ids, row, T, False):
                out = block(x[row, tokens][None])[0]
                y = y.index_put((torch.tensor(row), torch.tensor(tokens)), out)
        return y

    run, parameters = with_parameters(block, together)
    expected, _ = with_parameters(block, alone)
    x = torch.randn(2, T, DIM, dtype=torch.float64)
    assert_same_function(run, expected, [x, *parameters], terms=2 * T * 64, one_scale=True)


@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_three_lengths_through_two_layers(kind, side):
    """P4: batched = one by one in every hidden state, values and gradients, lengths 3, 7, 12."""
    layers = [build(kind), build(kind, combine="multiply")]
    lengths = [3, 7, 12]
    x = torch.randn(3, 12, DIM, dtype=torch.float64, requires_grad=True)
    at = torch.arange(12)
    mask = torch.stack([at < n if side == "right" else at >= 12 - n for n in lengths])
    hidden, total = x, 0
    rows = [x[i, mask[i]][None] for i in range(3)]
    for layer in layers:
        hidden = hidden + layer(hidden, mask=mask)
        rows = [row + layer(row) for row in rows]
        for i in range(3):
            assert_close(hidden[i, mask[i]], rows[i][0], terms=12 * 64)
        total = total + (hidden[mask] ** 2).sum() - sum((row**2).sum() for row in rows)
    (dx,) = torch.autograd.grad(total, x)
    assert_close(dx, torch.zeros_like(dx), terms=12 * 64, scale=(2 * x.abs().max() * 100).item())


@pytest.mark.parametrize("kind", MIXERS)
def test_lengths_beyond_the_chunks(kind):
    """P4 in float32: 3, 60 and 500 tokens, batched, packed and one by one."""
    mixer, options = MIXERS[kind]
    block = BiMamba(DIM, mixer=mixer, **options)
    sequences = [torch.randn(n, DIM) for n in (3, 60, 500)]
    alone = [block(s[None])[0] for s in sequences]
    for batch in (pad(sequences), pad(sequences, side="left"), pack(sequences)):
        y = block(batch.values, mask=batch.mask, seq_ids=batch.seq_ids)
        for a, e in zip(batch.unpack(y), alone):
            assert_close(a, e, terms=500 * 16)


@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize("combine", ["add", "multiply"])
def test_commutes_with_reversal_when_the_directions_are_equal(kind, combine):
    block = build(kind, combine)
    block.mamba_rev.load_state_dict(
        {name: block.mamba_fwd.get_parameter(name) for name in block.mamba_rev.state_dict()}
    )
    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    assert_close(block(x.flip(1)), block(x).flip(1), terms=64)


class _Counting(TorchDispatchMode):
    """Reordered copies of activations (B, T, ...)."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens, self.copies = tokens, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("flip", "gather", "index_select", "roll"):
            self.copies += out.is_floating_point() and out.dim() == 3 and self.tokens in out.shape
        return out


@EVERY
def test_tied_projections_are_applied_once_and_nothing_is_flipped(kind, combine, tie, bias):
    block = build(kind, combine, tie, bias)
    calls = dict.fromkeys(("in_proj", "out_proj"), 0)
    projections = {
        id(getattr(side, name)): (getattr(side, name), name)
        for side in (block.mamba_fwd, block.mamba_rev)
        for name in calls
    }
    for module, name in projections.values():
        module.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    with torch.no_grad(), prefer("torch"), _Counting(9) as counting:  # faster ops are opaque
        block(torch.randn(2, 9, DIM, dtype=torch.float64))
    assert counting.copies == 0
    assert calls["in_proj"] == (1 if tie else 2)
    assert calls["out_proj"] == (1 if tie and combine == "add" else 2)


def assert_tied(block):
    for name in ("in_proj", "out_proj"):
        assert getattr(block.mamba_rev, name) is getattr(block.mamba_fwd, name)
    names = [name for name, _ in block.named_parameters(remove_duplicate=False)]
    assert not [n for n in names if n.startswith(("mamba_rev.in_proj", "mamba_rev.out_proj"))]
    assert set(block.state_dict()) == set(names)
    for alias, name in block.tied_parameters().items():
        assert block.get_parameter(alias) is block.get_parameter(name)


@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize(
    "treat",
    [
        lambda b: b,
        copy.deepcopy,
        lambda b: pickle.loads(pickle.dumps(b)),
        lambda b: b.to(torch.bfloat16),
        lambda b: b.half().float(),
        lambda b: b.to("meta").to_empty(device="cpu"),
        lambda b: b.share_memory(),
    ],
)
def test_the_tie_survives(kind, treat):
    """B8, and again after loading by assignment and by copying."""
    block = treat(build(kind, bias=True))
    assert_tied(block)
    other = build(kind, bias=True)
    for assign in (True, False):
        block.load_state_dict(other.state_dict(), assign=assign)
        assert_tied(block)
        assert torch.equal(
            block.mamba_rev.in_proj.weight,
            other.mamba_fwd.in_proj.weight.to(block.mamba_rev.in_proj.weight.dtype),
        )
    block.reset_parameters()
    assert_tied(block)
    block.double()(torch.randn(1, 3, DIM).double()).sum().backward()
    step = torch.optim.SGD(block.parameters(), lr=0.1)
    step.step()
    assert_tied(block)


def both_copies(block):
    """A checkpoint as other code writes it, with each tied parameter under both names."""
    state = block.state_dict()
    return state | {alias: state[name].clone() for alias, name in block.tied_parameters().items()}


@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize("dropped", ["mamba_fwd", "mamba_rev", None])
@pytest.mark.parametrize("assign", [False, True])
def test_either_copy_of_a_tied_parameter_may_be_missing(kind, dropped, assign):
    """B1, also below a parent; strict loading finds nothing missing and nothing too much."""
    source = build(kind, bias=True)
    state = {
        f"layers.0.{name}": tensor
        for name, tensor in both_copies(source).items()
        if dropped is None or not name.startswith((f"{dropped}.in_proj", f"{dropped}.out_proj"))
    }
    before = set(state)
    parent = nn.ModuleDict({"layers": nn.ModuleList([build(kind, bias=True)])})
    parent.load_state_dict(state, assign=assign)
    assert set(state) == before
    x = torch.randn(1, 4, DIM, dtype=torch.float64)
    assert torch.equal(parent["layers"][0](x), source(x))


def test_checkpoints_that_do_not_fit_a_tie():
    block = build(bias=True)
    state = both_copies(build(bias=True))
    state["mamba_rev.in_proj.bias"] = state["mamba_rev.in_proj.bias"] + 1e-9
    with pytest.raises(
        ValueError, match=r"mamba_fwd\.in_proj\.bias and mamba_rev\.in_proj\.bias are"
    ):
        block.load_state_dict(state)
    build(tie=False, bias=True).load_state_dict(state)
    for wrong in (state["mamba_fwd.in_proj.bias"][:3], state["mamba_fwd.in_proj.bias"].float()):
        with pytest.raises(ValueError, match=r"mamba_rev\.in_proj\.bias are one tied parameter"):
            block.load_state_dict(state | {"mamba_rev.in_proj.bias": wrong})
    for side in ("mamba_fwd", "mamba_rev"):
        del state[f"{side}.in_proj.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*mamba_fwd\.in_proj\.bias"):
        block.load_state_dict(state)
    meta = {k: v.to("meta") for k, v in block.state_dict().items()}
    block.to("meta").load_state_dict(meta, assign=True)
    assert_tied(block)


@EVERY
def test_functional_calls_leave_the_block_as_it_was(kind, combine, tie, bias):
    block = build(kind, combine, tie, bias)
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    before = dict(block.named_parameters())
    y = block(x)
    expected = torch.autograd.grad(y.square().sum(), list(before.values()))
    given = {name: p.detach().clone() for name, p in before.items()}
    zeros = {name: torch.zeros_like(p) for name, p in given.items()}
    assert not functional_call(block, zeros, (x,)).any()
    found = torch.func.grad(lambda p: functional_call(block, p, (x,)).square().sum())(given)
    for name, e in zip(before, expected):
        assert_close(found[name], e, terms=10 * 64, name=name)
    after = dict(block.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    if tie:
        assert_tied(block)
    assert torch.equal(block(x), y)


@pytest.mark.parametrize("combine", ["add", "multiply"])
@pytest.mark.parametrize("side", ["mamba_fwd", "mamba_rev"])
@pytest.mark.parametrize("treat", [lambda b: b, copy.deepcopy])
def test_a_replaced_projection_serves_both_directions(combine, side, treat):
    block = build(combine=combine, bias=True)
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    for name in ("in_proj", "out_proj"):
        old = getattr(block.mamba_fwd, name)
        new = nn.Linear(old.in_features, old.out_features, dtype=torch.float64)
        setattr(getattr(block, side), name, new)
        assert getattr(block.mamba_rev, name) is getattr(block.mamba_fwd, name) is new
    block = treat(block)
    assert_tied(block)
    assert_close(block(x), by_flips(block, x), terms=2 * 64)


@pytest.mark.parametrize("tie", [True, False])
def test_safetensors_stores_a_tied_parameter_once(tie, tmp_path):
    """B9."""
    safetensors = pytest.importorskip("safetensors.torch")
    block, other = build(tie=tie), build(tie=tie)
    safetensors.save_model(block, str(tmp_path / "model.safetensors"))
    stored = safetensors.load_file(str(tmp_path / "model.safetensors"))
    assert len(stored) == len(list(block.parameters()))
    safetensors.load_model(other, str(tmp_path / "model.safetensors"))
    x = torch.randn(1, 4, DIM, dtype=torch.float64)
    assert torch.equal(other(x), block(x))


def test_float32_parameters_of_both_directions():
    block = BiMamba(DIM).to(torch.bfloat16)
    for side in (block.mamba_fwd, block.mamba_rev):
        assert side.A_log.dtype == side.D.dtype == side.dt_proj.bias.dtype == torch.float32
    assert block(torch.randn(1, 3, DIM).bfloat16()).dtype == torch.bfloat16


def test_compiles_to_one_graph():
    block = build(bias=True)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 4, DIM, dtype=torch.float64)
    assert_same_function(
        lambda x: compiled(x, mask=mask), lambda x: block(x, mask=mask), [x], terms=64
    )


def test_memory_kept_for_backward():
    """As the docstring says, each storage counted once, parameters not."""
    block = BiMamba(64)
    x = torch.randn(1, 1024, 64, requires_grad=True)
    kept = {}

    def record(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with prefer("chunked"), torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
        y = block(x)
    for parameter in block.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) <= 18.5 * x.nbytes
    y.sum().backward()


def test_errors():
    block = build()
    x = torch.randn(2, 3, DIM, dtype=torch.float64)
    with pytest.raises(ValueError, match="state must be None: a bidirectional mixer"):
        block(x, state=MambaState())
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, C\) with C = 8"):
        block(x[..., :3])
    with pytest.raises(ValueError, match=r"mask must have shape \(B, T\) = \(2, 3\)"):
        block(x, mask=torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(TypeError, match="reverse"):
        block(x, reverse=True)
    with pytest.raises(ValueError, match=r"combine must be one of .* got 'ew_multiply'"):
        BiMamba(DIM, combine="ew_multiply")
    with pytest.raises(ValueError, match="tie must be True or False, got 1"):
        BiMamba(DIM, tie=1)
    with pytest.raises(
        ValueError, match="mixer must be a MambaMixer class such as Mamba1, got 'Mamba1'"
    ):
        BiMamba(DIM, mixer="Mamba1")
    with pytest.raises(TypeError, match="num_groups"):
        BiMamba(DIM, num_groups=2)


WATCH = {
    "forward hook": lambda m, seen: m.register_forward_hook(lambda *_: seen.append(1)),
    "forward pre-hook": lambda m, seen: m.register_forward_pre_hook(lambda *_: seen.append(1)),
    "backward hook": lambda m, seen: m.register_full_backward_hook(lambda *_: seen.append(1)),
}


@pytest.mark.parametrize("part", ["", ".conv1d"])
@pytest.mark.parametrize("watch", WATCH)
@pytest.mark.parametrize("combine", ["add", "multiply"])
@pytest.mark.parametrize(("mixer", "tie"), [(Mamba1, True), (Mamba1, False), (Mamba2, True)])
def test_hooks_of_a_mixer_and_of_its_convolution_run(mixer, tie, combine, watch, part):
    """Whatever is fused otherwise; and the values are the same."""
    options = {"head_dim": 4} if mixer is Mamba2 else {}
    block = BiMamba(8, mixer=mixer, tie=tie, combine=combine, d_state=4, **options)
    x = torch.randn(2, 6, 8, requires_grad=True)
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    expected = block(x, mask=mask)
    for side in ("mamba_fwd", "mamba_rev"):
        seen = []
        handle = WATCH[watch](block.get_submodule(side + part), seen)
        found = block(x, mask=mask)
        found.sum().backward()
        assert seen == [1]
        handle.remove()
        assert_close(found, expected, terms=32)


def test_a_mixer_with_a_forward_of_its_own_is_called():
    class Doubled(Mamba1):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    torch.manual_seed(0)
    doubled = BiMamba(8, mixer=Doubled, d_state=4)
    torch.manual_seed(0)
    plain = BiMamba(8, d_state=4)
    x = torch.randn(2, 6, 8)
    assert_close(doubled(x), 2 * plain(x), terms=32)
    plain.mamba_rev.forward = lambda x, **_: torch.zeros_like(x)
    assert_close(plain(x), plain.mamba_fwd(x), terms=32)
