"""The models of docs/examples/rebuild against transformers': logits, gradients, decoding."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers

FOLDER = Path(__file__).parent.parent / "docs" / "examples" / "rebuild"
SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
EXPERTS = {"num_experts_per_tok": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES = {
    "llama": ("Llama", HEADS),
    "llama with llama3 scaling": ("Llama", HEADS | {"rope_parameters": LLAMA3}),
    "llama with wide heads": ("Llama", HEADS | {"head_dim": 16}),
    "olmo2": ("Olmo2", HEADS),
    "flex_olmo": ("FlexOlmo", HEADS | EXPERTS | {"num_experts": 5}),
    "flex_olmo normalised": (
        "FlexOlmo",
        HEADS | EXPERTS | {"num_experts": 5, "norm_topk_prob": True},
    ),
    "mixtral": ("Mixtral", HEADS | EXPERTS | {"num_local_experts": 4}),
    "mamba": ("Mamba", {"state_size": 6}),
    "mamba with biases": ("Mamba", {"state_size": 6, "use_bias": True}),
}


@pytest.fixture(params=CASES)
def pair(request, monkeypatch):
    """transformers' random tiny model, and ours with its weights."""
    name, options = CASES[request.param]
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    theirs = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():  # a norm's weight of one would hide where it is applied
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 10)
            elif name != "Mamba":  # whose recurrence would magnify every rounding
                parameter.mul_(3)
    monkeypatch.syspath_prepend(str(FOLDER))
    script = FOLDER / f"{request.param.split()[0]}.py"
    spec = importlib.util.spec_from_file_location(f"rebuilt_{script.stem}", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ours = getattr(module, name)(config).load(theirs.state_dict())
    return ours, theirs.eval()


def close(found, expected):
    """At 1e-5 of the largest."""
    found, expected = found.detach(), expected.detach()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def test_logits_and_every_gradient(pair):
    ours, theirs = pair
    ids = torch.randint(0, 99, (2, 13))
    expected = theirs(ids, use_cache=False).logits
    found = ours(ids)
    close(found, expected)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    found.backward(upstream)
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    copy = type(ours)(theirs.config).load(grads | {"lm_head.weight": theirs.lm_head.weight.grad})
    wanted = dict(copy.named_parameters())
    assert wanted.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        close(parameter.grad, wanted[name].detach())


def test_padding_on_the_left(pair):
    ours, theirs = pair
    ids = torch.randint(0, 99, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    alone = ours(ids[:1, 4:])
    close(ours(ids, mask)[:1, 4:], alone)
    close(alone, theirs(ids[:1, 4:], use_cache=False).logits)


def test_decoding_with_caches(pair):
    ours, theirs = pair
    ids = torch.randint(0, 99, (2, 7))
    expected = theirs.generate(ids, max_new_tokens=12, do_sample=False)
    caches, new = ours.new_caches(), ids
    with torch.no_grad():
        while ids.shape[1] < expected.shape[1]:
            logits = ours(new, caches=caches)[:, -1]
            close(logits, ours(ids)[:, -1])
            new = logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], 1)
    assert torch.equal(ids, expected)


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_short(script):
    assert len(script.read_text().splitlines()) < 60
