from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import assert_close, gradcheck

from brickwork.blocks.norm import RMSNorm
from brickwork.blocks.rope import RoPE
from brickwork.kernels.rope import rope

HEAD_DIM, TRAINED = 16, 32
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": TRAINED},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
    "yarn_options": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "factor": 2,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [1, 2, 3, 4, 5, 6, 7, 8],
        "factor": 4.0,
        "max_position_embeddings": 4 * TRAINED,
        "original_max_position_embeddings": TRAINED,
    },
    "longrope_attention_factor": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": TRAINED,
        "attention_factor": 1.5,
        "factor": 4.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
LENGTH_DEPENDENT = ("dynamic", "longrope", "longrope_attention_factor")
scalings = pytest.mark.parametrize("name", SCALINGS)


def of_transformers(scaling: dict, base: float = 10000.0, length: int | None = None, part=1.0):
    """Frequencies and attention factor that transformers computes for the same dict."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {**copy.deepcopy(scaling), "rope_theta": base}
    if part != 1.0:
        parameters["partial_rotary_factor"] = part
    longest = parameters.pop("max_position_embeddings", TRAINED)
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=longest,
    )
    config.rope_parameters = parameters
    if parameters["rope_type"] == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length)


@scalings
@pytest.mark.parametrize("length", [None, TRAINED - 1, TRAINED, TRAINED + 1, 5 * TRAINED])
def test_frequencies_are_those_of_transformers(name, length):
    scaling = SCALINGS[name]
    turn = RoPE(HEAD_DIM, base=500.0, scaling=scaling)
    expected, scale = of_transformers(scaling, 500.0, length)
    lengths = None if length is None else torch.tensor([length])
    actual = turn.inv_freq("cpu", lengths)
    assert turn.length_dependent == (name in LENGTH_DEPENDENT)
    if turn.length_dependent and length is not None:
        actual = actual[0]
    assert_close(actual / expected, torch.ones_like(expected))
    assert turn.scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn", "llama3"])
def test_frequencies_of_a_partial_rotation_are_those_of_transformers(name):
    """D2 #39: rotary_dim, not head_dim, decides."""
    turn = RoPE(HEAD_DIM, rotary_dim=8, scaling=SCALINGS[name])
    expected, _ = of_transformers(SCALINGS[name], length=100, part=0.5)
    lengths = torch.tensor([100])
    actual = turn.inv_freq("cpu", lengths).reshape(-1)
    assert_close(actual / expected, torch.ones_like(expected))
    dict_says_so = SCALINGS[name] | {"partial_rotary_factor": 0.5, "rope_theta": 10000.0}
    same = RoPE(HEAD_DIM, rotary_dim=8, scaling=dict_says_so).inv_freq("cpu", lengths)
    assert torch.equal(same.reshape(-1), actual)


def test_output_is_that_of_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = torch.randn(2, 5, 4, HEAD_DIM), torch.randn(2, 5, 2, HEAD_DIM)
    positions = torch.randint(0, 20, (2, 5))
    inv_freq, scale = of_transformers(SCALINGS["yarn"])
    angles = (positions[..., None] * inv_freq).repeat(1, 1, 2)
    expected = apply_rotary_pos_emb(
        q.transpose(1, 2), k.transpose(1, 2), angles.cos() * scale, angles.sin() * scale
    )
    turn = RoPE(HEAD_DIM, scaling=SCALINGS["yarn"])
    for x, theirs in zip((q, k), expected):
        assert_close(turn(x, positions), theirs.transpose(1, 2), terms=HEAD_DIM)


def test_spellings_that_mean_the_same():
    """`type` for `rope_type`, None for missing, either length where the other is missing."""
    lengths = torch.tensor([5 * TRAINED])

    def same(one, other):
        a, b = (RoPE(HEAD_DIM, scaling=s) for s in (one, other))
        assert torch.equal(a.inv_freq("cpu", lengths), b.inv_freq("cpu", lengths))
        assert a.scale == b.scale

    linear, yarn = SCALINGS["linear"], SCALINGS["yarn"]
    longrope, llama3 = SCALINGS["longrope"], SCALINGS["llama3"]
    same(linear, {"type": "linear", "factor": 4.0, "attention_factor": None})
    same(linear, linear | {"type": "linear", "max_position_embeddings": 7})
    same(yarn, {"rope_type": "yarn", "factor": 4, "max_position_embeddings": TRAINED})
    same(yarn, yarn | {"factor": None, "max_position_embeddings": 4 * TRAINED})
    same(longrope, {k: v for k, v in longrope.items() if k != "factor"})
    same(longrope, {k: v for k, v in longrope.items() if k != "max_position_embeddings"})
    same(
        llama3, llama3 | {"original_max_position_embeddings": None, "max_position_embeddings": 8192}
    )
    original = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": TRAINED}
    same(SCALINGS["dynamic"], original)
    same({"rope_type": "default"}, None)


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
@given(data=st.data())
def test_the_length_is_each_rows_own(name, data):
    """A row alone, and beside longer and shorter ones."""
    turn = RoPE(HEAD_DIM, scaling=SCALINGS[name])
    rows = data.draw(st.lists(st.integers(0, 4 * TRAINED), min_size=1, max_size=4))
    positions = torch.stack([torch.arange(3) + start for start in rows])
    x = torch.randn(len(rows), 3, 2, HEAD_DIM)
    y = turn(x, positions)
    for b, start in enumerate(rows):
        alone = slice(b, b + 1)
        assert torch.equal(y[alone], turn(x[alone], positions[alone]))
        expected = rope(
            x[alone],
            positions[alone],
            inv_freq=of_transformers(SCALINGS[name], length=start + 3)[0],
            layout="half",
            scale=turn.scale,
        )
        assert_close(y[alone], expected, terms=HEAD_DIM, scale=1.0 + start)


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_given_lengths_of_rows_and_of_tokens(name):
    turn = RoPE(HEAD_DIM, scaling=SCALINGS[name])
    x, positions = torch.randn(2, 4, 1, HEAD_DIM), torch.tensor([[0, 1, 0, 1]] * 2)
    lengths = torch.tensor([[5, 5, 90, 90], [90, 90, 90, 90]])
    y = turn(x, positions, lengths)
    assert torch.equal(y[1:], turn(x[1:], positions[1:], torch.tensor([90])))
    assert torch.equal(y[:1, :2], turn(x[:1, :2], positions[:1, :2], torch.tensor([5])))
    assert torch.equal(y[:1, 2:], turn(x[:1, 2:], positions[:1, 2:], torch.tensor([90])))


@scalings
def test_a_call_leaves_no_trace(name):
    """R9: short, long, short; also through threads and deepcopy."""
    turn = RoPE(HEAD_DIM, scaling=SCALINGS[name])
    short, long = torch.randn(1, 4, 1, HEAD_DIM), torch.randn(1, 80, 1, HEAD_DIM)
    first = turn(short, torch.arange(4))
    far = turn(long, torch.arange(80))
    assert torch.equal(turn(short, torch.arange(4)), first)
    assert torch.equal(copy.deepcopy(turn)(short, torch.arange(4)), first)
    with ThreadPoolExecutor(2) as pool:
        calls = [(short, first), (long, far)] * 20
        found = pool.map(lambda call: turn(call[0], torch.arange(call[0].shape[1])), calls)
        for (_, expected), y in zip(calls, found):
            assert torch.equal(y, expected)


@scalings
def test_there_is_no_state_to_damage(name):
    """R2, R4, R5, R11, D2 #36-38: casts, meta devices and loading change nothing."""
    turn = RoPE(HEAD_DIM, scaling=SCALINGS[name])
    x, positions = torch.randn(1, 8, 2, HEAD_DIM), 8192 - torch.arange(8)
    expected = turn(x, positions)
    assert not turn.state_dict()
    assert not list(turn.buffers())
    for cast in (turn.to(torch.bfloat16), turn.half(), turn.to("meta").to_empty(device="cpu")):
        assert torch.equal(cast(x, positions), expected)
        assert torch.equal(
            cast(x.bfloat16(), positions), turn(x.bfloat16().float(), positions).bfloat16()
        )
    with torch.device("meta"):
        built = RoPE(HEAD_DIM, scaling=SCALINGS[name])
    assert torch.equal(built(x, positions), expected)
    built.reset_parameters()
    assert turn(x.to("meta"), positions.to("meta")).is_meta


@scalings
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_gradcheck(name, layout):
    turn = RoPE(HEAD_DIM, layout=layout, scaling=SCALINGS[name])
    gradcheck(lambda x: turn(x, torch.tensor([[3, 70]])), [torch.randn(1, 2, 1, HEAD_DIM)])


@scalings
def test_compiles_to_one_graph_for_every_position(name):
    turn = RoPE(HEAD_DIM, scaling=SCALINGS[name], max_positions=1000)
    torch.compiler.reset()
    compiled = torch.compile(turn, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 2, HEAD_DIM)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for start in (0, 20, 31, 500):
            positions = torch.arange(3).expand(2, 3) + start
            assert_close(compiled(x, positions), turn(x, positions), terms=HEAD_DIM)


def test_positions_past_the_limit():
    """R8: by length and by value."""
    turn = RoPE(4, max_positions=64)
    turn(torch.zeros(1, 64, 1, 4), torch.arange(64))
    turn(torch.zeros(1, 0, 1, 4), torch.arange(0))
    with pytest.raises(ValueError, match="positions must be below max_positions = 64, got 64"):
        turn(torch.zeros(1, 65, 1, 4), torch.arange(65))
    with pytest.raises(ValueError, match="positions must be below max_positions = 64, got 64"):
        turn(torch.zeros(1, 3, 1, 4), torch.tensor([[62, 63, 64]]))
    unlimited = RoPE(4)
    assert unlimited(torch.zeros(1, 1, 1, 4), torch.tensor([10**6])).shape == (1, 1, 1, 4)


@pytest.mark.parametrize("name", [None, *SCALINGS])
def test_empty_input(name):
    turn = RoPE(HEAD_DIM, scaling=None if name is None else SCALINGS[name])
    for shape in ((0, 3), (2, 0)):
        x = torch.empty(*shape, 2, HEAD_DIM)
        assert turn(x, torch.zeros(shape, dtype=torch.long)).shape == x.shape
        assert turn(x, torch.zeros(shape[1], dtype=torch.long)).shape == x.shape


def test_errors():
    x, positions = torch.randn(2, 3, 1, 4), torch.arange(3)
    turn = RoPE(4)
    with pytest.raises(ValueError, match=r"heads of width head_dim = 4, got \(2, 3, 1, 6\)"):
        turn(torch.randn(2, 3, 1, 6), positions)
    with pytest.raises(ValueError, match=r"positions must have shape"):
        turn(x, torch.arange(4))
    with pytest.raises(ValueError, match=r"lengths must have shape .* got \(3,\)"):
        turn(x, positions, torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="lengths must be integers"):
        turn(x, positions, torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="head_dim must be even to be rotated, got 3"):
        RoPE(3)
    with pytest.raises(ValueError, match="head_dim must be an integer of at least 1, got 'a'"):
        RoPE("a")
    for base in (0.0, 1.0, -3.0, float("inf"), float("nan"), "x", True):
        with pytest.raises(ValueError, match="base must be a finite number greater than 1"):
            RoPE(4, base=base)
    with pytest.raises(ValueError, match="layout must be one of"):
        RoPE(4, layout="complex")
    with pytest.raises(ValueError, match="rotary_dim must be even and at most head_dim = 4, got 6"):
        RoPE(4, rotary_dim=6)
    with pytest.raises(ValueError, match="max_positions must be an integer of at least 1, got 0"):
        RoPE(4, max_positions=0)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("linear", "scaling must be a dict or None, got 'linear'"),
        ({}, "scaling must have one rope_type of .* got {}"),
        ({"factor": 2.0}, "scaling must have one rope_type"),
        ({"rope_type": "ntk", "factor": 2.0}, "scaling must have one rope_type of .*'ntk'"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "scaling must have one rope_type"),
        ({"rope_type": ["linear"]}, "scaling must have one rope_type"),
        ({"rope_type": "default", "factor": 2.0}, "type 'default' has no key 'factor'"),
        ({"rope_type": "linear", "factor": 2.0, "x": 1}, "type 'linear' has no key 'x'"),
        ({"rope_type": "linear"}, "type 'linear' must have the key 'factor'"),
        ({"rope_type": "linear", "factor": None}, "type 'linear' must have the key 'factor'"),
        ({"rope_type": "linear", "factor": 0.5}, "factor must be a finite number of at least 1"),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a finite number of at least 1"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor must be a finite number"),
        ({"rope_type": "dynamic", "factor": 2.0}, "must have the key 'max_position_embeddings'"),
        (
            SCALINGS["dynamic"] | {"original_max_position_embeddings": 7},
            "has one length: .* = 32 and .* = 7 must be equal",
        ),
        ({"rope_type": "yarn", "factor": 2.0}, "the key 'original_max_position_embeddings'"),
        (SCALINGS["yarn"] | {"factor": None}, "type 'yarn' must have the key 'factor'"),
        (SCALINGS["yarn"] | {"beta_fast": 0.5}, "beta_fast .* must be at least beta_slow"),
        (
            SCALINGS["yarn"] | {"attention_factor": -1.0},
            "attention_factor must be a finite positive",
        ),
        (SCALINGS["yarn"] | {"truncate": 1}, "truncate must be True or False, got 1"),
        (SCALINGS["longrope"] | {"long_factor": [1.0]}, "long_factor must hold 8 positive numbers"),
        (SCALINGS["longrope"] | {"short_factor": [0] * 8}, "short_factor must hold 8 positive"),
        (SCALINGS["longrope"] | {"factor": 2.0}, r"factor must be .* 128 / 32 .*, got 2\.0"),
        (
            SCALINGS["longrope"] | {"factor": None, "max_position_embeddings": None},
            "type 'longrope' must have the key 'factor'",
        ),
        (SCALINGS["llama3"] | {"high_freq_factor": 1.0}, "high_freq_factor must be greater"),
        (SCALINGS["llama3"] | {"low_freq_factor": None}, "must have the key 'low_freq_factor'"),
        (
            SCALINGS["llama3"] | {"original_max_position_embeddings": 8192.5},
            "original_max_position_embeddings must be an integer of at least 2",
        ),
        (SCALINGS["linear"] | {"rope_theta": 5e5}, r"rope_theta .* equal base = 10000\.0, got 5"),
        (SCALINGS["linear"] | {"partial_rotary_factor": 0.5}, "partial_rotary_factor .* 16 of"),
    ],
)
def test_scaling_errors(scaling, message):
    """R9: an unknown type is an error, and so is anything that would be ignored."""
    with pytest.raises(ValueError, match=message):
        RoPE(HEAD_DIM, scaling=scaling)


def test_dynamic_needs_two_angles():
    with pytest.raises(ValueError, match=r"rotary_dim must be at least 4 for .* 'dynamic', got 2"):
        RoPE(HEAD_DIM, rotary_dim=2, scaling=SCALINGS["dynamic"])


def test_the_callers_dict_is_left_alone():
    scaling = copy.deepcopy(SCALINGS["longrope"])
    turn = RoPE(HEAD_DIM, scaling=scaling)
    assert scaling == SCALINGS["longrope"]
    scaling["short_factor"][0] = 100.0
    assert torch.equal(turn.inv_freq(), RoPE(HEAD_DIM, scaling=SCALINGS["longrope"]).inv_freq())
    assert "scaling={'rope_type': 'longrope'" in repr(turn)
    assert repr(RoPE(8, rotary_dim=4, max_positions=5)) == (
        "RoPE(8, base=10000.0, layout='half', rotary_dim=4, max_positions=5)"
    )


def norm_pair(dim, **options):
    norms = RMSNorm(dim, **options), RMSNorm(dim, **options)
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    return norms


@pytest.mark.parametrize("scaling", [None, {"rope_type": "dynamic", "factor": 2.0}])
def test_queries_and_keys_together_are_each_alone(scaling):
    """A5: the norm comes before the rotation."""
    if scaling is not None:
        scaling["original_max_position_embeddings"] = 8
    turn = RoPE(8, scaling=scaling)
    q, k, positions = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 1, 8), torch.randint(0, 99, (2, 3))
    for norms in ((), norm_pair(8), norm_pair(8, eps=0.1, cast="before_weight")):
        found = turn.qk(q, k, positions, *norms)
        for result, x, norm in zip(found, (q, k), norms or (None, None)):
            assert torch.equal(result, turn(x if norm is None else norm(x), positions))


def test_modules_that_are_not_plain_are_called():
    """A hook, a subclass and norms that differ stay what they are."""
    q, k, positions = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 1, 8), torch.arange(2)
    first, second = RMSNorm(8), RMSNorm(8, eps=0.5)
    turn = RoPE(8)
    for norms in ((first, second), (torch.nn.Identity(), torch.nn.Identity()), (first, first)):
        found = turn.qk(q, k, positions, *norms)
        assert torch.equal(found.q, turn(norms[0](q), positions))
        assert torch.equal(found.k, turn(norms[1](k), positions))
    calls = []
    for module in (first, turn):
        handle = module.register_forward_hook(lambda *_: calls.append(1))
        turn.qk(q, k, positions, first, first)
        handle.remove()
    assert len(calls) == 4

    class Doubled(RoPE):
        def forward(self, x_BTHD, positions, lengths=None):
            return 2 * super().forward(x_BTHD, positions, lengths)

    assert torch.equal(Doubled(8).qk(q, k, positions).q, 2 * turn(q, positions))


def test_queries_and_keys_of_the_wrong_width():
    turn, positions = RoPE(8), torch.arange(2)
    with pytest.raises(ValueError, match="x must have heads of width head_dim = 8"):
        turn.qk(torch.randn(1, 2, 4, 6), torch.randn(1, 2, 1, 6), positions)
    with pytest.raises(ValueError, match=r"k must have shape \(B, T, G, D\) with D = 8 as in q"):
        turn.qk(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 1, 6), positions)
