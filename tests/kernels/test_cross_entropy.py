from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close, assert_same_function, gradcheck, gradients
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from brickwork.kernels import cross_entropy_chunked as chunked
from brickwork.kernels.backend import BackendUnavailable, prefer
from brickwork.kernels.cross_entropy import (
    cross_entropy,
    cross_entropy_reference,
    token_cross_entropy,
)

BACKENDS = ["torch", "chunked"]
REDUCTIONS = ["mean", "sum", "none"]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Several chunks at test sizes, the last one shorter."""
    monkeypatch.setattr(chunked, "CHUNK_ENTRIES", 40)


def problem(tokens=9, width=5, vocabulary=13, *, tokens_only=None, ignored=(2, 5), label=-100):
    hidden, weight = torch.randn(tokens, width), torch.randn(vocabulary, width)
    labels = torch.randint(0, tokens_only or vocabulary, (tokens,))
    for i in ignored:
        labels[i : i + 1] = label
    return hidden, weight, labels, torch.rand(tokens) + 0.1


def marked(labels):
    """The labels as the ops take them."""
    return torch.where(labels == -100, chunked.IGNORED, labels)


def by_definition(hidden, weight, labels, weights, reduction, ignore_index=-100, vocab_size=None):
    """One token at a time, in float64."""
    terms = []
    for h, label, w in zip(hidden.double(), labels, weights.double()):
        logits = weight[:vocab_size].double() @ h
        scored = label != ignore_index
        terms.append(w * -torch.log(torch.softmax(logits, 0)[label]) if scored else 0 * w)
    losses = torch.stack(terms) if terms else weights.double()
    count = max(int((labels != ignore_index).sum()), 1)
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / count}[reduction]


@given(
    tokens=st.sampled_from([0, 1, 4, 9, 33]),
    vocabulary=st.sampled_from([1, 2, 13, 50, 257]),
    reduction=st.sampled_from(REDUCTIONS),
    backend=st.sampled_from(BACKENDS),
    weighted=st.booleans(),
    trim=st.booleans(),
)
def test_is_the_definition(tokens, vocabulary, reduction, backend, weighted, trim):
    """D3 46 to 49: every reduction with token weights, sizes around nothing in particular, a
    vocabulary whose last rows only pad it; the shape of "none"."""
    vocab_size = (vocabulary + 1) // 2 if trim else None
    hidden, weight, labels, weights = problem(tokens, 5, vocabulary, tokens_only=vocab_size)
    loss = cross_entropy(
        hidden,
        weight,
        labels,
        weights=weights if weighted else None,
        reduction=reduction,
        vocab_size=vocab_size,
        backend=backend,
    )
    ones = weights if weighted else torch.ones(tokens)
    expected = by_definition(hidden, weight, labels, ones, reduction, vocab_size=vocab_size)
    assert loss.shape == expected.shape == ((tokens,) if reduction == "none" else ())
    assert_close(loss, expected, terms=4 * tokens + 5, scale=1 + expected.abs().sum().item())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("vocab_size", [None, 11])
def test_chunked_equals_reference(reduction, vocab_size):
    """D3 46: every gradient, that of the token weights too, with an upstream gradient per token."""
    hidden, weight, labels, weights = problem(tokens_only=vocab_size)
    options = {"reduction": reduction, "vocab_size": vocab_size}
    assert_same_function(
        lambda h, w, t: cross_entropy(h, w, labels, weights=t, backend="chunked", **options),
        lambda h, w, t: cross_entropy_reference(h, w, labels, weights=t, **options),
        [hidden, weight, weights],
        terms=64,
    )
    assert_same_function(
        lambda h, w: cross_entropy(h, w, labels, backend="chunked", **options),
        lambda h, w: cross_entropy_reference(h, w, labels, **options),
        [hidden, weight],
        terms=64,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck_of_the_reference(reduction):
    hidden, weight, labels, weights = problem(5, 3, 4, ignored=(2,))
    gradcheck(
        lambda h, w, t: cross_entropy_reference(
            h, w, labels, weights=t, reduction=reduction, vocab_size=4
        ),
        [hidden, weight, weights],
    )
    logits = torch.randn(2, 3, 4)
    labels = torch.tensor([[0, -100, 3], [1, 1, 2]])
    gradcheck(
        lambda x, t: token_cross_entropy(x, labels, weights=t, reduction=reduction),
        [logits, torch.rand(2, 3)],
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck_of_chunked(reduction):
    hidden, weight, labels, weights = problem(5, 3, 6, tokens_only=4)
    inputs = [t.double().requires_grad_() for t in (hidden, weight, weights)]
    assert torch.autograd.gradcheck(
        lambda h, w, t: cross_entropy(
            h, w, labels, weights=t, reduction=reduction, vocab_size=4, backend="chunked"
        ),
        inputs,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_second_derivative_of_chunked_raises(reduction):
    """D1 5: also where the first is one term of a larger sum."""
    hidden, weight, labels, _ = problem()
    hidden.requires_grad_()
    weight.requires_grad_()

    def penalty(backend):
        loss = cross_entropy(hidden, weight, labels, reduction=reduction, backend=backend)
        (grad,) = torch.autograd.grad(loss.sum(), hidden, create_graph=True)
        return grad.square().sum() + weight.sum()

    with pytest.raises(RuntimeError, match=r"'chunked' can be differentiated once; .*prefer"):
        penalty("chunked").backward()
    with prefer("torch"):
        penalty("auto").backward()
    assert (weight.grad - 1).abs().max() > 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_second_backward_is_equal_and_nothing_is_written(backend, reduction):
    """D1 2, 3: the loss of exp(a), whose result autograd has saved, and a second pass."""
    a, weight, labels, weights = problem()
    for t in (a, weight, weights):
        t.requires_grad_()
    saved = a.exp()
    before = [t.detach().clone() for t in (saved, weight, labels, weights)]
    loss = cross_entropy(
        saved, weight, labels, weights=weights, reduction=reduction, backend=backend
    )
    upstream = torch.rand_like(loss)
    kept = upstream.clone()
    first = torch.autograd.grad(loss, (a, weight, weights), upstream, retain_graph=True)
    second = torch.autograd.grad(loss, (a, weight, weights), upstream)
    assert all(torch.equal(x, y) for x, y in zip(first, second))
    assert all(torch.equal(x, y) for x, y in zip(before, (saved, weight, labels, weights)))
    assert torch.equal(upstream, kept)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nothing_scored_is_zero_with_a_graph(backend, reduction):
    """D3 50, L2: 0 and zero gradients, not NaN."""
    for tokens in (0, 4):
        hidden, weight, _, weights = problem(tokens)
        labels = torch.full((tokens,), -100)
        values, grads = gradients(
            lambda h, w, t, n=labels: cross_entropy(
                h, w, n, weights=t, reduction=reduction, backend=backend
            ),
            [hidden, weight, weights],
        )
        assert (values[0] == 0).all()
        assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignore_index", [-100, -1, 3, 10**6])
def test_rows_not_scored_have_no_influence(backend, reduction, ignore_index):
    """D3 51: whatever they hold, and whatever label marks them, a token's id or past the end."""
    hidden, weight, labels, weights = problem(label=ignore_index)
    labels[[0, 1]] = 4
    options = {"reduction": reduction, "backend": backend, "ignore_index": ignore_index}
    kept = labels != ignore_index
    expected, expected_grads = gradients(
        lambda h, w, t: cross_entropy(h, w, labels[kept], weights=t, **options),
        [hidden[kept], weight, weights[kept]],
    )
    for junk in (0.0, float("nan"), float("inf"), 1e30):
        spoilt, spoilt_weights = hidden.clone(), weights.clone()
        spoilt[~kept] = junk
        spoilt_weights[~kept] = junk
        leaves = [spoilt.requires_grad_(), weight.clone().requires_grad_(), spoilt_weights]
        loss = cross_entropy(*leaves[:2], labels, weights=leaves[2].requires_grad_(), **options)
        upstream = torch.randn(expected[0].shape, generator=torch.Generator().manual_seed(1))
        if reduction == "none":
            assert (loss[~kept] == 0).all()
            loss = loss[kept]
        assert_close(loss, expected[0], terms=16)
        loss.backward(upstream)
        for leaf, want in zip(leaves, expected_grads):
            if len(leaf) == len(kept):
                assert (leaf.grad[~kept] == 0).all()
                assert_close(leaf.grad[kept], want, terms=16)
            else:
                assert_close(leaf.grad, want, terms=16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mean_divides_by_the_number_of_scored_labels(backend):
    hidden, weight, labels, weights = problem()
    both = [
        cross_entropy(hidden, weight, labels, weights=weights, reduction=r, backend=backend)
        for r in ("mean", "sum")
    ]
    assert_close(both[0] * 7, both[1], terms=9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_serves_the_diffusion_bound(backend):
    """`Σ CE / p` over the masked tokens, divided by a number of one's own choosing."""
    hidden, weight, labels, p = problem()
    loss = cross_entropy(
        hidden, weight, labels, weights=1 / p, reduction="sum", backend=backend
    ) / len(labels)
    single = cross_entropy(hidden, weight, labels, reduction="none", backend=backend)
    assert_close(loss, (single / p).sum() / 9, terms=9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_pad_the_vocabulary_take_no_probability(backend):
    hidden, weight, labels, _ = problem(tokens_only=11)
    weight[11:] = 100.0
    values, grads = gradients(
        lambda h, w: cross_entropy(h, w, labels, vocab_size=11, backend=backend), [hidden, weight]
    )
    expected, expected_grads = gradients(
        lambda h, w: cross_entropy(h, w, labels, backend=backend), [hidden, weight[:11]]
    )
    assert torch.equal(values[0], expected[0])
    assert torch.equal(grads[0], expected_grads[0])
    assert torch.equal(grads[1][:11], expected_grads[1])
    assert (grads[1][11:] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(backend, dtype):
    """The loss is float32 for narrow inputs, gradients are rounded once, to their own dtype."""
    hidden, weight, labels, weights = problem(40)
    narrow = [hidden.to(dtype), weight.to(dtype), weights]
    for reduction in REDUCTIONS:

        def loss(h, w, t, r=reduction):
            return cross_entropy(h, w, labels, weights=t, reduction=r, backend=backend)

        values, grads = gradients(loss, narrow)
        expected, expected_grads = gradients(loss, [t.double() for t in narrow])
        assert values[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_close(values[0], expected[0], terms=64)
        for t, grad, want in zip(narrow, grads, expected_grads):
            assert grad.dtype == t.dtype
            assert_close(grad, want, terms=64)


def test_mixed_dtypes_compute_in_the_widest():
    hidden, weight, labels, _ = problem()
    for backend in BACKENDS:
        mixed = cross_entropy(hidden.bfloat16(), weight, labels, backend=backend)
        wide = cross_entropy(hidden.bfloat16().float(), weight, labels, backend=backend)
        assert_close(mixed, wide, terms=9)
        assert (
            cross_entropy(hidden, weight.double(), labels, backend=backend).dtype == torch.float64
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits(backend):
    """1e4 and more: neither overflow nor loss of the small differences."""
    hidden, weight, labels, _ = problem(ignored=())
    for scale in (1e3, 1e18):
        values, grads = gradients(
            lambda h, w: cross_entropy(h, w, labels, reduction="sum", backend=backend),
            [hidden * scale, weight],
        )
        expected = torch.nn.functional.cross_entropy(
            (hidden * scale).double() @ weight.double().T, labels, reduction="sum"
        )
        assert_close(values[0], expected, terms=9)
        assert all(grad.isfinite().all() for grad in grads)
    easy = cross_entropy(torch.eye(3) * 30, torch.eye(3), torch.arange(3), backend=backend)
    assert 0 <= easy < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("leaf", ["hidden", "weight", "weights"])
def test_only_wanted_gradients_are_computed(backend, leaf):
    inputs = dict(zip(("hidden", "weight", "labels", "weights"), problem()))
    for reduction in REDUCTIONS:
        labels = inputs["labels"]
        _, everything = gradients(
            lambda h, w, t, n=labels, r=reduction: cross_entropy(
                h, w, n, weights=t, reduction=r, backend="torch"
            ),
            [inputs["hidden"], inputs["weight"], inputs["weights"]],
        )
        leaves = {k: v.clone().requires_grad_(k == leaf) for k, v in inputs.items()}
        tensors = (leaves[k] for k in ("hidden", "weight", "labels"))
        loss = cross_entropy(
            *tensors, weights=leaves["weights"], reduction=reduction, backend=backend
        )
        loss.backward(torch.randn(loss.shape, generator=torch.Generator().manual_seed(1)))
        assert [k for k, v in leaves.items() if v.grad is not None] == [leaf]
        want = everything[("hidden", "weight", "weights").index(leaf)]
        assert_close(leaves[leaf].grad, want, terms=64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_expanded_and_int32(backend):
    """D1 7, 9: any stride, a stride-0 upstream gradient."""
    hidden, weight, labels, weights = problem()
    views = [
        torch.stack((hidden, hidden), -1)[..., 0],
        weight.t().contiguous().t(),
        torch.stack((weights, weights), 1)[:, 1],
    ]
    int32 = torch.stack((labels, labels), 1)[:, 0].int()
    for reduction in REDUCTIONS:
        assert_same_function(
            lambda h, w, t, r=reduction: cross_entropy(
                h, w, int32, weights=t, reduction=r, backend=backend
            ),
            lambda h, w, t, r=reduction: cross_entropy_reference(
                h, w, labels, weights=t, reduction=r
            ),
            views,
            terms=64,
        )
    row = hidden[:1].expand(9, 5)
    expected = cross_entropy(row.contiguous(), weight, labels, backend=backend)
    assert_close(cross_entropy(row, weight, labels, backend=backend), expected, terms=9)
    leaf = hidden.clone().requires_grad_()
    losses = cross_entropy(leaf, weight, labels, reduction="none", backend=backend)
    (ones,) = torch.autograd.grad(losses.sum(), leaf, retain_graph=True)
    assert torch.equal(ones, torch.autograd.grad(losses, leaf, torch.ones(9))[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_nothing_on_the_cpu(backend):
    hidden, weight, labels, _ = problem()
    for dtype in (torch.float32, torch.bfloat16):
        h, w = hidden.to(dtype), weight.to(dtype)
        expected = cross_entropy(h, w, labels, backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(cross_entropy(h, w, labels, backend=backend), expected)


class LargestTensor(TorchDispatchMode):
    """The most entries any tensor had that an operator returned, and that none is float64."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                assert t.dtype != torch.float64, func
                self.largest = max(self.largest, t.numel())
        return out


def test_no_tensor_of_all_logits():
    """Neither forward nor backward: the largest tensor is the head, or what hidden would cost."""
    tokens, width, vocabulary = 300, 8, 200
    hidden, weight, labels, weights = problem(tokens, width, vocabulary)
    with LargestTensor() as seen:
        chunked._run(hidden, weight, marked(labels), weights, (True, True))
        assert seen.largest == max(tokens * width, vocabulary * width)
        gradients(lambda h: cross_entropy_reference(h, weight, labels), [hidden])
        assert seen.largest == tokens * vocabulary


def test_peak_memory():
    """A process that takes a training step with 320 MB of logits grows by a fraction of them."""
    code = """
import resource, torch
from brickwork.kernels.cross_entropy import cross_entropy
torch.set_num_threads(1)
hidden = torch.randn(2000, 2, requires_grad=True)
weight = torch.randn(40000, 2, requires_grad=True)
labels = torch.randint(0, 40000, (2000,))
cross_entropy(hidden[:8], weight, labels[:8]).backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cross_entropy(hidden, weight, labels).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kibibytes = int(done.stdout)
    assert kibibytes * 1024 < 0.3 * 2000 * 40000 * 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiles_to_one_graph(backend, reduction):
    def function(hidden, weight, weights, labels):
        return cross_entropy(
            hidden, weight, labels, weights=weights, reduction=reduction, backend=backend
        )

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    hidden, weight, labels, weights = problem()
    assert_same_function(compiled, function, [hidden, weight, weights, labels], terms=64)
    with torch.no_grad():
        expected = function(hidden, weight, weights, labels)
        assert_close(compiled(hidden, weight, weights, labels), expected, terms=64)


def test_wrong_labels_raise_where_they_cannot_be_checked_before():
    """In a compiled graph, also one that is another's mark of what is not scored."""
    hidden, weight, labels, _ = problem()
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    assert compiled(hidden, weight, labels).isfinite()
    for wrong in (-1, -5, 13):
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            compiled(hidden, weight, labels.index_fill(0, torch.tensor([4]), wrong))


def test_registered_ops():
    hidden, weight, labels, weights = problem()
    labels = marked(labels)
    for t in (hidden, weight, weights):
        t.requires_grad_()
    ops = torch.ops.brickwork
    torch.library.opcheck(ops.token_losses.default, (hidden, weight, labels))
    torch.library.opcheck(ops.summed_loss.default, (hidden, weight, labels, weights, [True, True]))
    hidden, weight, weights = (t.detach() for t in (hidden, weight, weights))
    for wanted in ([True, False], [False, True]):
        args = (weights, hidden, weight, labels, wanted)
        torch.library.opcheck(ops.token_losses_backward.default, args)
        _, *kept = chunked.summed_loss(hidden, weight, labels, weights, wanted)
        args = (torch.tensor(2.0), hidden, weight, weights, *kept)
        torch.library.opcheck(ops.summed_loss_backward.default, args)


def test_a_graph_made_for_other_leaves_says_so():
    hidden, weight, labels, weights = problem()
    labels = marked(labels)
    total, *_ = chunked.summed_loss(
        hidden.requires_grad_(), weight, labels, weights, [False, False]
    )
    with pytest.raises(RuntimeError, match="made for other inputs that need gradients"):
        total.backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_exports_and_traces_as_plain_operators():
    class Head(torch.nn.Module):
        def forward(self, hidden, weight, labels):
            return cross_entropy(hidden, weight, labels)

    hidden, weight, labels, _ = problem()
    program = torch.export.export(Head(), (hidden, weight, labels))
    assert not any("brickwork" in str(node.target) for node in program.graph.nodes)
    traced = torch.jit.trace(Head(), (hidden, weight, labels), check_trace=False)
    for ignored in ((2, 5), (0,), (1, 3, 7)):
        inputs = problem(ignored=ignored)[:3]
        expected = cross_entropy_reference(*inputs)
        assert_close(program.module()(*inputs), expected, terms=9)
        assert_close(traced(*inputs), expected, terms=9)
    with pytest.raises(BackendUnavailable, match=r"torch\.func transforms"):
        torch.func.grad(lambda h: cross_entropy(h, weight, labels, backend="chunked"))(hidden)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_checkpoint(backend, reduction):
    hidden, weight, labels, weights = problem()

    def function(h, w, t):
        return cross_entropy(h, w, labels, weights=t, reduction=reduction, backend=backend)

    assert_same_function(
        lambda *t: checkpoint(function, *t, use_reentrant=False),
        function,
        [hidden, weight, weights],
    )


def test_transforms():
    """Gradients per sample, with auto."""
    _, weight, _, _ = problem()
    hidden, labels = torch.randn(3, 9, 5), torch.randint(0, 13, (3, 9))
    labels[0] = -100
    grads = torch.func.vmap(torch.func.grad(lambda h, n: cross_entropy(h, weight, n)))(
        hidden, labels
    )
    for i in range(3):
        leaf = hidden[i].clone().requires_grad_()
        cross_entropy(leaf, weight, labels[i]).backward()
        assert_close(grads[i], leaf.grad, terms=16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_meta(backend):
    hidden, weight, labels, weights = (t.to("meta") for t in problem())
    hidden.requires_grad_()
    for reduction in REDUCTIONS:
        loss = cross_entropy(
            hidden, weight, labels, weights=weights, reduction=reduction, backend=backend
        )
        assert loss.shape == ((9,) if reduction == "none" else ())
        assert torch.autograd.grad(loss.sum(), hidden)[0].shape == hidden.shape


def test_rows_are_masked_where_they_are_not_selected(monkeypatch):
    """The form for devices, where finding the scored rows would wait, on the CPU."""
    hidden, weight, labels, weights = problem()
    hidden[labels < 0] = float("nan")
    weights[labels < 0] = float("nan")
    labels = marked(labels)
    expected = chunked._run(hidden, weight, labels, weights, (True, True))

    class Elsewhere:
        type = "elsewhere"

    monkeypatch.setattr(torch.Tensor, "device", Elsewhere())
    monkeypatch.setattr(chunked, "autocast_off", lambda tensor: torch.no_grad())
    monkeypatch.setattr(
        torch, "empty", lambda *shape, dtype, device: hidden.new_empty(*shape, dtype=dtype)
    )
    actual = chunked._run(hidden, weight, labels, weights, (True, True))
    monkeypatch.undo()
    for a, b in zip(actual, expected):
        assert_close(a, b, terms=16)


def test_autocast_on_other_devices(monkeypatch):
    """There, products take autocast's dtype; here, on meta tensors."""
    hidden, weight, labels, _ = (t.to("meta") for t in problem())
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda device: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    seen = []

    def record(hidden, weight, labels):
        seen.append((hidden.dtype, weight.dtype))
        return hidden.new_zeros(len(labels), dtype=torch.float32)

    monkeypatch.setattr(chunked, "token_losses", record)
    loss = cross_entropy(hidden, weight, labels, reduction="none")
    assert (loss.dtype, seen) == (torch.float32, [(torch.bfloat16, torch.bfloat16)])
    cross_entropy(hidden.double(), weight, labels, reduction="none")
    assert seen[1] == (torch.float64, torch.float64)


def test_auto_is_chunked_and_can_be_told_otherwise(monkeypatch):
    hidden, weight, labels, _ = problem()
    ran = []
    monkeypatch.setattr(
        chunked, "cross_entropy_chunked", lambda *t: ran.append("chunked") or torch.zeros(())
    )
    cross_entropy(hidden, weight, labels)
    assert ran == ["chunked"]
    with prefer("torch"):
        cross_entropy(hidden, weight, labels)
    assert ran == ["chunked"]


@given(leading=st.sampled_from([(), (1,), (4,), (2, 3), (0,), (2, 0)]), weighted=st.booleans())
def test_token_cross_entropy(leading, weighted):
    """The same rules on logits of any leading shape; those past `vocab_size` take no part."""
    logits = torch.randn(*leading, 7)
    logits[..., 5:] = 50.0
    labels = torch.randint(0, 5, leading)
    labels = torch.where(torch.rand(leading) < 0.3, -100, labels)
    logits = torch.where((labels == -100)[..., None], float("nan"), logits)
    weights = torch.rand(leading) if weighted else torch.ones(leading)
    for reduction in REDUCTIONS:
        loss = token_cross_entropy(
            logits,
            labels,
            weights=weights if weighted else None,
            reduction=reduction,
            vocab_size=5,
        )
        expected = by_definition(
            logits.reshape(-1, 7),
            torch.eye(7),
            labels.flatten(),
            weights.flatten(),
            reduction,
            vocab_size=5,
        )
        if reduction == "none":
            expected = expected.view(leading)
        assert_close(loss, expected, terms=16, scale=1 + expected.abs().sum().item())
    leaf = logits.clone().requires_grad_()
    token_cross_entropy(leaf, labels, vocab_size=5).backward()
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[labels == -100] == 0).all()
    assert (leaf.grad[..., 5:] == 0).all()


def test_token_cross_entropy_equals_pytorch():
    logits, labels = torch.randn(6, 7), torch.tensor([0, 6, -100, 3, 3, 1])
    assert_same_function(
        lambda x: token_cross_entropy(x, labels),
        lambda x: torch.nn.functional.cross_entropy(x, labels),
        [logits],
    )
    narrow = token_cross_entropy(logits.bfloat16(), labels)
    assert torch.equal(narrow, token_cross_entropy(logits.bfloat16().float(), labels))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(narrow, token_cross_entropy(logits.bfloat16(), labels))
    compiled = torch.compile(token_cross_entropy, fullgraph=True, backend="aot_eager")
    assert_close(compiled(logits, labels), token_cross_entropy(logits, labels))
    assert token_cross_entropy(logits.to("meta"), labels.to("meta")).shape == ()


def test_errors():
    hidden, weight, labels, weights = problem()

    def refused(message, **changed):
        arguments = {"hidden_SC": hidden, "weight_VC": weight, "labels_S": labels} | changed
        with pytest.raises(ValueError, match=message):
            cross_entropy(**arguments)

    refused(r"hidden must have shape \(S, C\), got \(3, 3, 5\)", hidden_SC=torch.ones(3, 3, 5))
    refused(r"weight must have shape .* with C = 5 as in hidden", weight_VC=torch.ones(13, 4))
    refused(r"labels must have shape \(S,\) with S = 9", labels_S=labels[:3])
    refused(r"weights must have shape \(S,\) with S = 9", weights=weights[:3])
    refused(r"hidden must be floating point, got torch\.int64", hidden_SC=hidden.long())
    refused(r"weights must be floating point, got torch\.bool", weights=labels > 0)
    refused(r"labels must be int32 or int64, got torch\.float32", labels_S=labels.float())
    refused(r"reduction must be one of .*, got 'batchmean'", reduction="batchmean")
    refused("the vocabulary must have at least one row, got none", weight_VC=torch.ones(0, 5))
    refused("vocab_size must be an integer of at least 1, got 0", vocab_size=0)
    refused("vocab_size must be at most the vocabulary rows, 13, got 14", vocab_size=14)
    for wrong in (-1, 13, -101):
        bad = labels.clone()
        bad[4] = wrong
        refused(rf"labels must be in \[0, 13\).* ignore_index = -100, got {wrong}", labels_S=bad)
    refused(r"labels must be in \[0, 2\), .* got", vocab_size=2, labels_S=labels.clamp(min=2))
    refused(r"labels must be in .* ignore_index = 0, got -100", ignore_index=0)
    with pytest.raises(BackendUnavailable, match="cross_entropy has no backend 'grouped'"):
        cross_entropy(hidden, weight, labels, backend="grouped")

    logits = torch.randn(2, 3, 7)
    labels = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"labels must have .* \(2, 3\), got \(3, 2\)"):
        token_cross_entropy(logits, labels.t())
    with pytest.raises(ValueError, match=r"weights must have .* \(2, 3\), got \(3,\)"):
        token_cross_entropy(logits, labels, weights=torch.ones(3))
    with pytest.raises(ValueError, match=r"labels must be in \[0, 7\).* got 7"):
        token_cross_entropy(logits, labels + 7)
    with pytest.raises(ValueError, match=r"reduction must be one of .*, got None"):
        token_cross_entropy(logits, labels, reduction=None)
    with pytest.raises(ValueError, match=r"logits must be floating point, got torch\.int64"):
        token_cross_entropy(logits.long(), labels)
    with pytest.raises(
        ValueError, match="vocab_size must be at most the vocabulary rows, 7, got 8"
    ):
        token_cross_entropy(logits, labels, vocab_size=8)
