"""Rish against transformers' FlexOlmo and a loop over experts; the MoE block against a dense one.

1024 tokens, width 512, 32 experts of width 512, 4 a token. All sides compute the same: the peers
have the parameters of ours. Rounding decides between experts whose probabilities are nearly equal,
and may decide otherwise elsewhere: the tokens are drawn until no choice is that close. The models
are timed each in a process of its own, the blocks in one.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from compare import assert_same_results, compare, compare_processes
from peers import flex_olmo, loop_over_experts
from torch import nn

from brickwork.assemblies import Rish, RishConfig
from brickwork.blocks import MoE, SwiGLU

TOKENS, WIDTH, HIDDEN, EXPERTS, CHOSEN = 1024, 512, 512, 32, 4
NEAR_TIE = 1e-5  # of logits; float32 is off by some 1e-6

MODES = pytest.mark.parametrize("training", [False, True], ids=["forward", "forward+backward"])


def model_and_tokens():
    config = RishConfig(
        vocab_size=512,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        pad_token_id=None,
        eos_token_id=None,
    )
    model = Rish(config)
    for _ in range(50):
        ids = torch.randint(config.vocab_size, (1, TOKENS))
        if closest_choice(model, ids) > NEAR_TIE:
            return model, ids
    raise RuntimeError("every draw of tokens had a choice of experts that is nearly tied")


@torch.no_grad()
def closest_choice(model, ids):
    """The smallest distance of a logit that was chosen from one that was not."""
    ordered = torch.stack(model(ids).router_logits).sort(-1, descending=True).values
    return (ordered[..., CHOSEN - 1] - ordered[..., CHOSEN]).min().item()


def runner(model, ids, training):
    def infer():
        with torch.no_grad():
            return [model(ids).logits]

    def train():
        logits = model(ids).logits
        grads = torch.autograd.grad(logits.sum(), list(model.parameters()))
        return [logits.detach(), grads[0]]  # that of the embedding passes through everything

    return train if training else infer


PEERS = {"FlexOlmo, grouped_mm": flex_olmo, "loop over experts": loop_over_experts}


def side(name, training):
    torch.manual_seed(0)
    model, ids = model_and_tokens()
    return runner(PEERS[name](model) if name in PEERS else model, ids, training)


@MODES
def test_rish(benchmark, training):
    assert_same_results(
        {name: side(name, training) for name in ("brickwork", *PEERS)},
        reference=reference(training),
    )
    compare_processes(benchmark, partial(side, training=training), list(PEERS), rounds=15)


def reference(training):
    torch.manual_seed(0)
    model, ids = model_and_tokens()
    return runner(model.double(), ids, training)


def equal_blocks():
    """A MoE and a dense block of as many products per token that compute the same function: the
    experts are equal, and the dense block is CHOSEN of them side by side."""
    expert = SwiGLU(WIDTH, hidden_dim=HIDDEN)
    wide = SwiGLU(WIDTH, hidden_dim=CHOSEN * HIDDEN)
    gate, up = expert.gate_up.weight.data.chunk(2)
    wide.gate_up.weight.data.copy_(torch.cat((gate.tile(CHOSEN, 1), up.tile(CHOSEN, 1))))
    wide.down.weight.data.copy_(expert.down.weight.data.tile(1, CHOSEN) / CHOSEN)
    return MoE.from_dense(expert, num_experts=EXPERTS, top_k=CHOSEN), wide


class Dense(nn.Module):
    """A SwiGLU as anybody writes it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


def by_nn_linear(ours: SwiGLU) -> Dense:
    dense = Dense(ours.dim, ours.hidden_dim)
    dense.load_state_dict(ours.state_dict())
    return dense


@MODES
def test_block(benchmark, training):
    moe, wide = equal_blocks()
    x = torch.randn(TOKENS, WIDTH)

    def block_runner(block: nn.Module, x: torch.Tensor):
        leaf = x.clone().requires_grad_()
        parameters = list(block.parameters())

        def call():
            y = block(leaf)
            return y.y if isinstance(block, MoE) else y

        def infer():
            with torch.no_grad():
                return [call()]

        def train():
            y = call()
            return [y.detach(), torch.autograd.grad(y.sum(), [leaf, *parameters])[0]]

        return train if training else infer

    compare(
        benchmark,
        block_runner(moe, x),
        {
            "dense block of equal products, nn.Linear": block_runner(by_nn_linear(wide), x),
            "dense block of equal products, SwiGLU": block_runner(wide, x),
        },
        rounds=15,
        reference=block_runner(copy.deepcopy(wide).double(), x.double()),
    )
