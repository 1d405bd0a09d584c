from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close, gradients

from brickwork.blocks import BiMamba, Collator, Mamba2, pack, pad

LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=6)
DIM = 8


def make(lengths):
    return [torch.randn(n, DIM, dtype=torch.float64) for n in lengths]


@given(
    lengths=LENGTHS,
    spare=st.sampled_from([None, 0, 3]),
    how=st.sampled_from(["left", "right", "pack"]),
)
def test_round_trip(lengths, spare, how):
    """Order, values, gradients, masks, ids and positions, for sequences without tokens too."""
    sequences = make(lengths)
    room = None if spare is None else max(lengths) + spare

    def lay(sequences):
        if how == "pack":
            return pack(sequences, row_length=room, fill=-5)
        return pad(sequences, side=how, length=room, fill=-5)

    batch = lay(sequences)
    assert batch.lengths == tuple(lengths)
    assert batch.mask.sum() == sum(lengths)
    assert (batch.values[~batch.mask] == -5).all()
    assert (batch.seq_ids[~batch.mask] == -1).all()
    for number, (sequence, back) in enumerate(zip(sequences, batch.unpack())):
        assert torch.equal(sequence, back)
        here = batch.seq_ids == number
        assert batch.positions[here].tolist() == list(range(len(sequence)))
        assert len(here.any(1).nonzero()) <= 1
    results, grads = gradients(lambda *s: lay(s).unpack(), sequences)
    generator = torch.Generator().manual_seed(1)
    for result, grad in zip(results, grads):
        upstream = torch.randn(result.shape, generator=generator).to(result.dtype)
        assert torch.equal(grad, upstream)


@given(lengths=LENGTHS, room=st.integers(7, 12))
def test_rows_take_what_fits(lengths, room):
    batch = pack(make(lengths), row_length=room)
    assert batch.values.shape[1] == room
    used = batch.mask.sum(1)
    assert all(used[r] + used[s] > room for r in range(len(used)) for s in range(r))


@pytest.mark.parametrize(
    "block", [BiMamba(DIM, d_state=3), Mamba2(DIM, d_state=3, head_dim=4)], ids=["bi", "mamba2"]
)
def test_one_contract_for_padded_and_packed(block):
    """The same results and parameter gradients padded, packed, packed from padded, one by one."""
    block = block.double()
    lengths = [3, 1, 12, 5]
    sequences = make(lengths)
    padded = pad(sequences, side="left")
    batches = [padded, pad(sequences), pack(sequences), pack(sequences, row_length=13)]
    batches.append(pack(padded.values, mask=padded.mask))
    expected = [block(s[None])[0] for s in sequences]
    wanted = torch.autograd.grad(sum((e**2).sum() for e in expected), list(block.parameters()))
    for batch in batches:
        y = block(batch.values, mask=batch.mask, seq_ids=batch.seq_ids)
        for a, e in zip(batch.unpack(y), expected):
            assert_close(a, e, terms=12 * 64)
        found = torch.autograd.grad((y**2).sum(), list(block.parameters()))
        scale = max(w.abs().max().item() for w in wanted)
        for a, e in zip(found, wanted):
            assert_close(a, e, terms=21 * 64, scale=scale)


def test_padded_batch_without_a_mask_is_all_real():
    batch = pack(torch.tensor([[1, 2], [3, 4]]))
    assert batch.values.tolist() == [[1, 2, 3, 4]]
    assert batch.seq_ids.tolist() == [[0, 0, 1, 1]]
    interior = pack(torch.tensor([[1, 2, 3]]), mask=torch.tensor([[1, 0, 1]]))
    assert interior.values.tolist() == [[1, 3]]


@pytest.mark.parametrize("packed", [False, True])
def test_collator(packed):
    collate = Collator(fill={"input_ids": 1, "labels": -100}, packed=packed, row_length=5)
    examples = [
        {"input_ids": [5, 6, 7], "labels": torch.tensor([-100, 6, 7])},
        {"input_ids": torch.tensor([8]), "labels": [9]},
    ]
    batch = collate(examples)
    assert set(batch) == {"input_ids", "labels", "attention_mask", "seq_ids", "positions"}
    if packed:
        assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 1]]
        assert batch["labels"].tolist() == [[-100, 6, 7, 9, -100]]
        assert batch["seq_ids"].tolist() == [[0, 0, 0, 1, -1]]
        assert batch["positions"].tolist() == [[0, 1, 2, 0, 0]]
    else:
        assert batch["input_ids"].tolist() == [[5, 6, 7, 1, 1], [8, 1, 1, 1, 1]]
        assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    assert batch["input_ids"].dtype == torch.int64
    loader = torch.utils.data.DataLoader(examples, batch_size=2, collate_fn=collate)
    assert torch.equal(next(iter(loader))["input_ids"], batch["input_ids"])


@pytest.mark.parametrize("packed", [False, True])
def test_collator_of_labels_per_sequence(packed):
    """They come in the order of `unpack`, whatever row a sequence was put into."""
    fields = ["label", "map"]
    collate = Collator(fill={"ids": 0}, packed=packed, row_length=4, per_sequence=fields)
    lengths = (2, 3, 1, 4)
    examples = [{"ids": [n] * n, "label": n, "map": [[n, 0.5]]} for n in lengths]
    batch = collate(examples)
    assert batch["label"].tolist() == list(lengths)
    assert batch["map"].shape == (4, 1, 2)
    laid = pack([torch.full((n,), n) for n in lengths], row_length=4) if packed else None
    if laid is not None:
        assert torch.equal(laid.values, batch["ids"])
        assert [part.unique().item() for part in laid.unpack(batch["ids"])] == list(lengths)
    with pytest.raises(
        ValueError, match=r"map must have one shape in all examples: \(2,\) in .* 1"
    ):
        collate([examples[0], examples[1] | {"map": [0, 1]}])
    with pytest.raises(ValueError, match=r"ids must have a value for each token.*per_sequence"):
        collate([{"ids": 1, "label": 0, "map": 0}])
    with pytest.raises(ValueError, match=r"must have the fields \['ids', 'label', 'map'\]"):
        collate([{"ids": [1], "map": 0}])
    for wrong in (None, "helix"):
        with pytest.raises(ValueError, match=f"label of example 1 must be numbers, got {wrong!r}"):
            collate([examples[0], examples[1] | {"label": wrong}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_sequence": "label"}, "per_sequence must be names of fields, got one string 'label'"),
        ({"per_sequence": ["ids"]}, r"per_sequence must name no field .* there already, .*'ids'"),
        ({"per_sequence": ["a", "a"]}, r"per_sequence must name a field once, got \('a', 'a'\)"),
        ({"per_sequence": ["positions"]}, "per_sequence must name no field that is there already"),
        ({"fill": {"ids": 0, "seq_ids": 0}}, r"fill must name no field .* got \['seq_ids'\]"),
    ],
)
def test_fields_of_a_collator_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        Collator(**({"fill": {"ids": 0}} | options))


def test_a_batch_moves_as_a_whole():
    batch = pack([torch.ones(2, 3), torch.ones(1, 3)])
    moved = batch.to("meta")
    tensors = (moved.values, moved.mask, moved.seq_ids, moved.positions)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.lengths == batch.lengths
    back = batch.to("cpu", non_blocking=True)
    assert torch.equal(back.values, batch.values)
    assert torch.equal(back.seq_ids, batch.seq_ids)
    assert torch.equal(back.positions, batch.positions)
    assert torch.equal(back.mask, batch.mask)
    for wrong in (torch.float64, torch.ones(1)):
        with pytest.raises(ValueError, match=r"device must be a device, got .*several dtypes"):
            batch.to(wrong)


def test_a_batch_is_built_where_its_sequences_are():
    with torch.device("meta"):
        batch = pack([torch.ones(2, device="cpu"), torch.ones(1, device="cpu")], row_length=4)
    assert batch.values.tolist() == [[1, 1, 1, 0]]
    assert batch.positions.tolist() == [[0, 1, 0, 0]]


def test_pinned_by_a_loader(monkeypatch):
    """`DataLoader` pins what has a `pin_memory`; without a GPU only the call can be seen."""
    pinned = []
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor: (pinned.append(tensor), tensor)[1]
    )
    batch = pack([torch.ones(2)]).pin_memory()
    assert len(pinned) == 4
    assert batch.unpack()[0].tolist() == [1, 1]


def test_errors():
    with pytest.raises(ValueError, match="sequence 0 must be a tensor, got list"):
        pad([[1, 2], [3]])
    with pytest.raises(ValueError, match="sequences must hold at least one sequence"):
        pad([])
    with pytest.raises(
        ValueError, match=r"sequences must be equal but for their length: sequence 1"
    ):
        pack([torch.zeros(2, 3), torch.zeros(2, 4)])
    with pytest.raises(ValueError, match=r"sequence 1 is \(2,\) torch\.int64"):
        pack([torch.zeros(2), torch.zeros(2, dtype=torch.int64)])
    with pytest.raises(ValueError, match=r"sequence 0 must have shape \(T, \.\.\.\)"):
        pad([torch.tensor(1)])
    with pytest.raises(ValueError, match="sequence 1 has 3 tokens, got length = 2"):
        pad([torch.zeros(1), torch.zeros(3)], length=2)
    with pytest.raises(ValueError, match="sequence 0 has 3 tokens, got row_length = 2"):
        pack([torch.zeros(3)], row_length=2)
    with pytest.raises(ValueError, match=r"side must be one of .* got 'middle'"):
        pad([torch.zeros(1)], side="middle")
    with pytest.raises(ValueError, match="mask must be None for a list"):
        pack([torch.zeros(1)], mask=torch.ones(1, 1, dtype=torch.bool))
    with pytest.raises(
        ValueError, match=r"a padded batch must have shape \(R, L, ...\), got \(3,\)"
    ):
        pack(torch.zeros(3))
    with pytest.raises(
        ValueError, match=r"values must have shape \(R, L, ...\) with \(R, L\) = \(1, 3\)"
    ):
        pack([torch.zeros(3)]).unpack(torch.zeros(3, 1))
    with pytest.raises(ValueError, match="fill must name at least one field"):
        Collator(fill={})
    collate = Collator(fill={"input_ids": 0, "labels": 0})
    with pytest.raises(
        ValueError, match=r"example 0 must have the fields \['input_ids', 'labels'\]"
    ):
        collate([{"input_ids": [1]}])
    with pytest.raises(ValueError, match="the fields of example 0 must be equally long"):
        collate([{"input_ids": [1], "labels": [1, 2]}])
