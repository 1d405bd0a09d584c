from __future__ import annotations

import pytest
import torch
from support import assert_close
from torch import nn
from torch.utils.checkpoint import checkpoint

from brickwork.assemblies import Rish, RishConfig
from brickwork.blocks import MoE, record_routing, replay_routing

SIZES = {
    **{"vocab_size": 17, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 3},
    **{"num_attention_heads": 2, "num_experts": 6, "num_experts_per_tok": 2},
    **{"pad_token_id": None, "eos_token_id": None},
}


def rish(**options):
    return Rish(RishConfig(**(SIZES | options)))


def moes(model):
    return [module for module in model.modules() if isinstance(module, MoE)]


def redraw_routers(model):
    for moe in moes(model):
        nn.init.normal_(moe.router.weight)


def hooks(model):
    return [
        hook
        for module in model.modules()
        for kept in (module._forward_hooks, module._forward_pre_hooks)
        for hook in kept
    ]


def gradients(model, run):
    model.zero_grad()
    run().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_a_record_holds_what_every_layer_chose():
    """The same as RishOutput.indices, which Rish's own routing= takes."""
    model, ids = rish(), torch.randint(17, (2, 5))
    with record_routing(model) as record:
        out = model(ids)
    assert record.names == tuple(f"layers.{i}.moe" for i in range(3))
    assert len(record) == len(out.indices) == 3
    for i, (recorded, returned) in enumerate(zip(record, out.indices)):
        assert torch.equal(recorded, returned)
        assert recorded.shape == (2, 5, 2)
        assert torch.equal(record[i], out.router_logits[i].softmax(-1).topk(2).indices)
    assert [len(part) for part in (record[:2], record[-1:])] == [2, 1]
    redraw_routers(model)
    assert not all(torch.equal(a, b) for a, b in zip(model(ids).indices, record))
    given = model(ids, routing=record)
    with replay_routing(model, record):
        replayed = model(ids)
    assert torch.equal(given.logits, replayed.logits)
    assert all(torch.equal(a, b) for a, b in zip(replayed.indices, record))
    assert hooks(model) == []


@pytest.mark.parametrize("kind", ["none", "reentrant", "non-reentrant"])
def test_under_checkpointing(kind):
    """D4 62, M13: written down once; what is computed again takes the experts of its forward."""
    layers = nn.ModuleList(MoE(6, hidden_dim=5, num_experts=8, top_k=2) for _ in range(2))
    x = torch.randn(7, 6, requires_grad=True)

    def run():
        y = x
        for moe in layers:
            if kind == "none":
                y = y + moe(y).y
            else:
                again = kind == "reentrant"
                y = y + checkpoint(lambda t, m=moe: m(t).y, y, use_reentrant=again)
        return y.square().sum()

    with record_routing(layers) as record:
        run().backward()
    assert [len(calls) for calls in record.calls] == [1, 1]
    redraw_routers(layers)
    expected = gradients(layers, lambda: _by_argument(layers, x, record))
    for routing in (record, list(record)):
        with replay_routing(layers, routing):
            found = gradients(layers, run)
            again = gradients(layers, run)  # from the beginning
        for grad, same, wanted in zip(found, again, expected):
            assert_close(grad, wanted, terms=32)
            assert torch.equal(grad, same)
    assert hooks(layers) == []


def _by_argument(layers, x, routing):
    for moe, indices in zip(layers, routing):
        x = x + moe(x, routing=indices).y
    return x.square().sum()


def test_a_checkpointed_rish():
    model, ids = rish().train(), torch.randint(17, (2, 5))
    with record_routing(model) as record:
        model(ids)
    redraw_routers(model)
    expected = gradients(model, lambda: model(ids, labels=ids, routing=record).loss)
    model.gradient_checkpointing = True
    with replay_routing(model, record):
        found = gradients(model, lambda: model(ids, labels=ids).loss)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("use_cache", [True, False])
def test_generate(use_cache):
    """Call by call: the routers moved, the experts and their number of tokens did not."""
    model = rish(use_cache=use_cache)
    ids = torch.randint(17, (2, 4))
    with record_routing(model) as record:
        first = model.generate(ids, max_new_tokens=5)
    if use_cache:
        assert [tuple(part.shape) for part in record] == [(2, 8, 2)] * 3
        whole = model(first[:, :-1])  # the last token was never sent through the model
        assert all(torch.equal(a, b) for a, b in zip(whole.indices, record))
    redraw_routers(model)
    with record_routing(model) as again, replay_routing(model, record):
        model.generate(ids, max_new_tokens=5)
    for a, b in zip(record.calls, again.calls):
        assert len(a) == len(b) == 5
        assert all(torch.equal(x, y) for x, y in zip(a, b))
    assert hooks(model) == []


def test_one_tensor_is_dealt_token_by_token():
    """What a forward over the whole sequence chose, replayed in a cached generate and in parts."""
    model, ids = rish(), torch.randint(17, (2, 6))
    routing = model(ids).indices
    redraw_routers(model)
    whole = model(ids, routing=routing)
    moe, x = model.layers[0].moe, torch.randn(2, 6, 8)
    expected = moe(x, routing=routing[0])
    with replay_routing(moe, routing[:1]):
        parts = [moe(x[:, :4]), moe(x[:, 4:5]), moe(x=x[:, 5:])]
    assert torch.equal(torch.cat([part.indices for part in parts], 1), routing[0])
    assert_close(torch.cat([part.y for part in parts], 1), expected.y, terms=16)
    with replay_routing(model, routing):
        model.generate(ids[:, :4], max_new_tokens=3)
    with replay_routing(model, routing):
        assert torch.equal(model(ids).logits, whole.logits)
    single = MoE(6, hidden_dim=5, num_experts=8, top_k=2)
    with replay_routing(single, [torch.tensor([3, 1])]):
        assert single(torch.randn(6)).indices.tolist() == [3, 1]


def test_recomputation_that_cannot_be_told_apart():
    """Two forwards of one shape with routings of their own, then a backward: an error, not a
    guess."""
    moe, x = MoE(6, hidden_dim=5, num_experts=8, top_k=2), torch.randn(4, 6, requires_grad=True)
    with record_routing(moe) as record:
        moe(x)
        moe(x + 1)
    with replay_routing(moe, record):
        y = checkpoint(lambda t: moe(t).y, x, use_reentrant=False)
        y = y + checkpoint(lambda t: moe(t).y, x + 1, use_reentrant=False)
        with pytest.raises(ValueError, match="any of 2 calls: enter replay_routing anew"):
            y.sum().backward()
    assert hooks(moe) == []


def test_nothing_is_left_behind_after_an_error():
    moe = MoE(6, hidden_dim=5, num_experts=8, top_k=2)
    with record_routing(moe) as record:
        moe(torch.randn(4, 6))
    for context in (record_routing(moe), replay_routing(moe, record)):
        with pytest.raises(KeyError), context:
            raise KeyError
        assert hooks(moe) == []


def test_records_hold_no_graph():
    moe = MoE(6, hidden_dim=5, num_experts=8, top_k=2)
    with record_routing(moe) as record:
        moe(torch.randn(4, 6, requires_grad=True))
    assert not record[0].requires_grad
    assert record[0].dtype == torch.int64


def test_errors():
    moe, x = MoE(6, hidden_dim=5, num_experts=8, top_k=2), torch.randn(4, 6)
    model = nn.Sequential(nn.Identity(), moe)
    good = moe(x).indices

    def replay(given, *inputs, part=model, **options):
        with replay_routing(part, given):
            for t in inputs:
                part(t, **options)

    def record(part):
        with record_routing(part) as found:
            return found

    for run in (record, lambda part: replay([], part=part)):
        with pytest.raises(ValueError, match="model must hold a MoE, got Linear without one"):
            run(nn.Linear(2, 2))
    empty = record(model)
    with pytest.raises(ValueError, match=r"nothing was recorded of 1: it was not called"):
        empty[0]
    with pytest.raises(ValueError, match=r"routing must not be empty, got no call of 1"):
        replay(empty)
    for wrong, got in (([good, good], "2"), ([], "0"), (good, "Tensor")):
        with pytest.raises(ValueError, match=rf"one tensor for each of .* 1 MoE, got {got}"):
            replay(wrong)
    with pytest.raises(ValueError, match="routing of 1 was not replayed: it was not called"):
        replay([good])
    with pytest.raises(ValueError, match="not used up: 0 of 1 calls and 3 tokens of the next"):
        replay([good], x[:3])
    with pytest.raises(ValueError, match="routing of 1 has 1 tokens left, got 2 to replay"):
        replay([good], x[:3], x[:2])
    with pytest.raises(ValueError, match=r"must have shape \(1, 4, 'K'\), or more .* got \(4, 2\)"):
        replay([good], x[None])
    with pytest.raises(ValueError, match="passed to a MoE within replay_routing: give it once"):
        replay([good], x, part=moe, routing=good)
    with pytest.raises(ValueError, match=r"routing must be in \[0, 8\)"):
        replay([good + 8], x)
    assert hooks(model) == []
