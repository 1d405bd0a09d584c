"""causal-conv1d's own tests, from its source distribution, with our function in place of theirs.

Their file is read as it is but for `device = "cuda"`. What it calls are the adapters below: they
turn the package's layout, buffers and conventions into arguments of `causal_conv1d`.
`docs/vendor_tests.md` says what is left out, and why.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from brickwork.kernels.causal_conv1d import causal_conv1d

REPEATS = 5
LEFT_OUT = {
    "test_causal_conv1d_ref_varlen_initial_states": "their reference against itself",
    "test_causal_conv1d_bwd_deterministic_reproducible": "needs CUDA",
    "test_causal_conv1d_bwd_deterministic_close_to_default": "needs CUDA",
    "test_causal_conv1d_bwd_default_mode_is_not_reproducible": "needs CUDA",
}


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Channels first, and negative ids for padding."""
    mask = None if seq_idx is None else seq_idx >= 0
    named = {"mask": mask, "seq_ids": seq_idx, "initial_state": initial_states}
    y, final = causal_conv1d(x.mT, weight, bias, activation=activation, **named)
    return (y.mT, final) if return_final_states else y.mT


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """A buffer of any length that is updated in place, circular or not, its rows anywhere."""
    if conv_state_indices is not None:
        out = torch.zeros_like(x)
        real = conv_state_indices >= 0
        rows = conv_state_indices[real]
        chosen = conv_state[rows]
        lengths = None if cache_seqlens is None else cache_seqlens[real]
        out[real] = causal_conv1d_update(x[real], chosen, weight, bias, activation, lengths)
        conv_state[rows] = chosen
        return out
    length, before = conv_state.shape[-1], weight.shape[1] - 1
    if cache_seqlens is None:
        state = conv_state[..., length - before :]
        updated = torch.cat([conv_state, x], -1)[..., -length:]
    else:
        at = (torch.arange(-before, x.shape[-1]) + cache_seqlens[:, None]) % length
        at = at[:, None].expand(-1, x.shape[1], -1)
        state = conv_state.gather(2, at[..., :before])
        updated = conv_state.scatter(2, at[..., before:], x)
    y, _ = causal_conv1d(x.mT, weight, bias, activation=activation, initial_state=state)
    conv_state.copy_(updated)
    return y.mT


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last tokens of each packed sequence: the final states of one padded row for each."""
    lengths = cu_seqlens.diff()
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    rows = x.new_zeros(*mask.shape, x.shape[1])
    rows[mask] = x
    weight = x.new_zeros(x.shape[1], state_len + 1)
    return causal_conv1d(rows, weight, mask=mask).final_state


def suite() -> dict[str, object]:
    path = Path(os.environ["BRICKWORK_VENDOR"]) / "sources" / "tests" / "test_causal_conv1d.py"
    text = path.read_text(encoding="utf-8")
    assert 'device = "cuda"' in text
    names: dict[str, object] = {"__name__": "causal_conv1d_suite"}
    exec(compile(text.replace('device = "cuda"', 'device = "cpu"'), str(path), "exec"), names)
    names["range"] = lambda n: range(min(n, REPEATS))  # 10,000 in their search for races
    for adapter in (causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states):
        assert adapter.__name__ in names
        names[adapter.__name__] = adapter
    return names


SUITE = {name: test for name, test in suite().items() if name.startswith("test_")}
globals().update({name: test for name, test in SUITE.items() if name not in LEFT_OUT})


def test_what_is_left_out_is_in_the_suite_and_in_the_docs():
    assert set(LEFT_OUT) <= set(SUITE)
    docs = Path(__file__).parents[2] / "docs" / "vendor_tests.md"
    for name in LEFT_OUT:
        assert name in docs.read_text(encoding="utf-8")
