from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close
from torch import nn
from torch.utils.checkpoint import checkpoint

from brickwork.blocks import MoE, SelectionBias, decay_parameter_groups, update_balance
from brickwork.kernels.backend import prefer


def make(**options):
    options = {"hidden_dim": 5, "num_experts": 4, "top_k": 2, "selection_bias": True} | options
    return MoE(6, **options)


def counted(indices, num_experts=4, mask=None):
    real = indices if mask is None else indices[mask]
    return torch.bincount(real.flatten(), minlength=num_experts)


def test_update_is_the_equation():
    """D4 73: by the sign of the violation, centred, so that the biases never drift."""
    part = SelectionBias(4)
    for counts, direction in (
        ([9, 1, 1, 1], [-1, 1, 1, 1]),
        ([5, 5, 1, 1], [-1, -1, 1, 1]),
        ([3, 3, 3, 3], [0, 0, 0, 0]),
        ([4, 3, 3, 2], [-1, 0, 0, 1]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
    ):
        before = part.bias.clone()
        part.counts = torch.tensor(counts)
        update_balance(part, rate=0.125)
        step = torch.tensor(direction, dtype=torch.float32)
        assert_close(part.bias, before + 0.125 * (step - step.mean()), terms=4, scale=1.0)
        assert (part.counts == 0).all()
    for _ in range(1000):
        part.counts = torch.tensor([9, 1, 1, 1])
        update_balance(part, rate=0.125)
    assert abs(part.bias.sum().item()) < 1e-3 * part.bias.abs().max().item()


def test_it_balances():
    """A router that prefers one expert is balanced by choice alone."""
    moe = MoE(6, hidden_dim=2, num_experts=8, top_k=2, selection_bias=True)
    moe.router.weight.data[0] += 0.3
    x = torch.randn(512, 6) + 1.0
    violation = []
    for _ in range(400):
        with torch.no_grad():
            moe(x)
        load = moe.selection_bias.counts.float()
        violation.append((load.max() / load.mean() - 1).item())
        moe.update_balance(rate=2e-3)
    assert violation[0] > 1
    assert violation[-1] < 0.15


def test_counts_in_training_only():
    """D4 72."""
    moe, x = make(), torch.randn(3, 5, 6)
    moe.eval()
    moe(x)
    assert (moe.selection_bias.counts == 0).all()
    moe.train()
    out = moe(x)
    assert torch.equal(moe.selection_bias.counts, counted(out.indices))
    again = moe(x)
    assert torch.equal(moe.selection_bias.counts, counted(out.indices) + counted(again.indices))
    moe(x[:0])
    replayed = moe(x, routing=torch.zeros(3, 5, 2, dtype=torch.int64))
    assert moe.selection_bias.counts[0] == 2 * counted(out.indices)[0] + 30
    assert not replayed.indices.any()
    moe.reset_parameters()
    assert (moe.selection_bias.counts == 0).all()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", ["torch", "grouped"])
def test_counts_once_under_checkpointing(reentrant, backend):
    """D4 72: the forward that the backward pass runs again is not another one."""
    moe, x = make(), torch.randn(7, 6, requires_grad=True)
    with prefer(backend):
        y = checkpoint(lambda t: moe(t).y, x, use_reentrant=reentrant)
        y.sum().backward()
    assert moe.selection_bias.counts.sum() == 14
    assert moe.router.weight.grad is not None


def test_counts_once_in_compiled_code():
    """D4 72: compiled, compiled within a checkpoint, and with a checkpoint within."""
    x = torch.randn(7, 6, requires_grad=True)
    moe = make()
    compiled = torch.compile(lambda t: moe(t).y, fullgraph=True, backend="aot_eager")
    for times in (1, 2):
        compiled(x).sum().backward()
        assert moe.selection_bias.counts.sum() == 14 * times
    update_balance(moe, rate=1e-3)
    checkpoint(compiled, x, use_reentrant=False).sum().backward()
    assert moe.selection_bias.counts.sum() == 14
    update_balance(moe, rate=1e-3)
    within = torch.compile(
        lambda t: checkpoint(lambda u: moe(u).y, t, use_reentrant=False), backend="aot_eager"
    )
    within(x).sum().backward()
    assert moe.selection_bias.counts.sum() == 14
    indices = moe.eval()(x).indices
    assert torch.equal(moe.selection_bias.counts, counted(indices))


@given(mask=st.lists(st.booleans(), min_size=6, max_size=6))
def test_padding_is_not_counted(mask):
    """D4 66: as if the padding were not there; any dtype of mask; y does not depend on it."""
    moe, x = make(), torch.randn(2, 3, 6)
    real = torch.tensor(mask).view(2, 3)
    for kind in (torch.bool, torch.int64, torch.float32):
        out = moe(x, mask=real.to(kind))
        assert torch.equal(moe.selection_bias.counts, counted(out.indices, mask=real))
        assert torch.equal(out.y, moe.eval()(x).y)
        moe.train()
        update_balance(moe, rate=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_stays_float32(dtype):
    """Cast, halved, assigned or loaded: the values and the counts are those from before."""
    moe = make()
    value = torch.tensor([0.1, -0.2003, 1e-3, 0.0999])
    moe.selection_bias.bias.copy_(value)
    moe(torch.randn(5, 6))
    counts = moe.selection_bias.counts.clone()
    moe.to(dtype)
    assert moe.gate_up.dtype == dtype
    assert moe.selection_bias.bias.dtype == torch.float32
    assert torch.equal(moe.selection_bias.bias, value)
    assert not moe.selection_bias.bias.requires_grad
    assert torch.equal(moe.selection_bias.counts, counts)
    state = moe.state_dict()
    assert state["selection_bias.bias"].dtype == torch.float32
    other = make().to(dtype)
    other.load_state_dict(state)
    assert torch.equal(other.selection_bias.bias, value)
    narrow = {name: t.to(dtype) for name, t in state.items()}
    other.load_state_dict(narrow, assign=True)
    assert other.selection_bias.bias.dtype == torch.float32
    assert_close(other.selection_bias.bias, value.to(dtype).float())
    assert torch.equal(copy.deepcopy(moe).selection_bias.bias, value)
    assert copy.deepcopy(moe).selection_bias.counts is not moe.selection_bias.counts


def test_made_under_a_narrow_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        moe = make()
    finally:
        torch.set_default_dtype(torch.float32)
    assert moe.gate_up.dtype == torch.bfloat16
    assert moe.selection_bias.bias.dtype == torch.float32


def test_survives_the_meta_device():
    """Made on meta and loaded, or emptied and reset: bias and counts are whole either way."""
    whole = make()
    whole.selection_bias.bias.copy_(torch.tensor([0.5, 0.0, -0.25, -0.25]))
    with torch.device("meta"):
        loaded, emptied = make(), make()
    loaded.load_state_dict(whole.state_dict(), assign=True)
    emptied.to_empty(device="cpu").reset_parameters()
    x = torch.randn(9, 6)
    for moe, bias in ((loaded, whole.selection_bias.bias), (emptied, torch.zeros(4))):
        assert torch.equal(moe.selection_bias.bias, bias)
        indices = moe(x).indices
        assert torch.equal(moe.selection_bias.counts, counted(indices))
        assert moe.selection_bias.counts.device.type == "cpu"
    whole(x)
    assert whole.to("meta").selection_bias.counts.is_meta
    whole(x.to("meta"))


def test_optimisers_leave_it_alone():
    moe = make()
    moe.selection_bias.bias.fill_(0.5)
    _, kept = decay_parameter_groups(moe, weight_decay=0.1)
    assert "selection_bias.bias" in kept["param_names"]
    optimizer = torch.optim.AdamW(moe.parameters(), weight_decay=0.5, lr=0.1)
    moe(torch.randn(5, 6)).y.sum().backward()
    optimizer.step()
    assert (moe.selection_bias.bias == 0.5).all()


def test_a_model_of_several():
    model = nn.ModuleList([make(), make(num_experts=6), nn.Linear(2, 2)])
    x = torch.randn(20, 6)
    counts = [counted(moe(x).indices, moe.num_experts) for moe in model[:2]]
    update_balance(model, rate=0.5)
    for moe, count in zip(model[:2], counts):
        step = torch.sign(count.float().mean() - count.float())
        assert_close(moe.selection_bias.bias, 0.5 * (step - step.mean()), terms=4, scale=1)


SCRIPT = """
import sys, torch
from brickwork.blocks import MoE, update_balance
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.manual_seed(0)
moe = MoE(6, hidden_dim=5, num_experts=4, top_k=2, selection_bias=True)
x = torch.randn(30, 6)
parallel = torch.nn.parallel.DistributedDataParallel(moe)
for part in x[:10] if rank == 0 else x[10:], x[:0]:
    out = parallel(part)
    out.y.sum().backward()
update_balance(parallel, rate=0.25)
torch.save(moe.selection_bias.bias, f"{folder}/{rank}.pt")
torch.distributed.destroy_process_group()
"""


def test_two_processes_sum_their_counts(tmp_path):
    """D4 67, 74: each sees other tokens, under DistributedDataParallel; both get the update of the
    whole batch."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, str(rank), str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for run in runs:
        _, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors
    torch.manual_seed(0)
    moe = make()
    moe(torch.randn(30, 6))
    alone = moe.selection_bias.counts.clone()
    update_balance(moe, rate=0.25)
    assert len(alone.unique()) > 1
    for rank in range(2):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), moe.selection_bias.bias)


def test_errors():
    with pytest.raises(ValueError, match=r"model must hold a MoE\(selection_bias=True\), got none"):
        update_balance(make(selection_bias=False), rate=1e-3)
    for wrong in (-1e-3, float("nan"), float("inf"), None, True):
        with pytest.raises(ValueError, match="rate must be a finite number of at least 0, got"):
            make().update_balance(rate=wrong)
    with pytest.raises(ValueError, match="num_experts must be an integer of at least 1, got 0"):
        SelectionBias(0)
    for moe in (make(), make(selection_bias=False)):
        with pytest.raises(
            ValueError, match=r"mask must have x's leading shape \(2, 3\), got \(2,"
        ):
            moe(torch.randn(2, 3, 6), mask=torch.ones(2))
        with pytest.raises(ValueError, match="mask must hold only 0 and 1"):
            moe(torch.randn(2, 3, 6), mask=torch.full((2, 3), -1e9))
