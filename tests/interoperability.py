"""Small models, and what every one of them must withstand: export, ONNX, compilation."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
from support import assert_close
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from brickwork.assemblies import LCPLM, LCPLMConfig, MiniLLaDA, MiniLLaDAConfig, Rish, RishConfig

# Other batch sizes and lengths than those of `EXAMPLE`: one of each, and lengths around the borders
# of the pieces in which Mamba-2's scan runs.
EXAMPLE = (3, 6)
SHAPES = [(1, 1), (1, 5), (4, 1), (2, 9), (5, 64), (2, 65), (2, 130)]
LONGEST = 200


def mini_llada(**fields: Any) -> MiniLLaDA:
    small = {"vocab_size": 23, "mask_token_id": 22, "dim": 16, "depth": 1, "head": 2}
    return MiniLLaDA(MiniLLaDAConfig(**(small | {"intermediate_size": 12} | fields)))


def rish(**fields: Any) -> Rish:
    small: dict[str, Any] = {
        **{"vocab_size": 23, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 3},
        **{"num_experts_per_tok": 2, "max_position_embeddings": LONGEST},
        **{"pad_token_id": None, "eos_token_id": None},
    }
    return Rish(RishConfig(**(small | fields)))


def lc_plm(layer: str = "Mamba1", ssm_cfg: dict[str, Any] | None = None, **fields: Any) -> LCPLM:
    mixer = {"layer": layer, "d_state": 4} | ({"headdim": 8} if layer == "Mamba2" else {})
    small = {"d_model": 16, "n_layer": 1, "ssm_cfg": mixer | (ssm_cfg or {})}
    return LCPLM(LCPLMConfig(**(small | fields)))


LONG_ROPE: dict[str, Any] = {
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1],
        "long_factor": [2.0, 3.0],
    },
    "original_max_position_embeddings": 8,
}
MODELS = {
    "mini_llada": mini_llada,
    "rish": rish,
    "lc_plm": lc_plm,
    "lc_plm mamba2": lambda: lc_plm("Mamba2"),
}
VARIANTS = {
    "rish without groups": lambda: rish(num_key_value_heads=4),
    "rish tied, biases, normalised": lambda: rish(
        attention_bias=True, tie_word_embeddings=True, norm_topk_prob=True
    ),
    "rish dynamic": lambda: rish(
        rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=8
    ),
    "rish longrope": lambda: rish(**LONG_ROPE),
    "rish yarn": lambda: rish(rope_scaling={"rope_type": "yarn", "factor": 2.0}),
    "lc_plm untied product": lambda: lc_plm(
        bidirectional_strategy="ew_multiply", bidirectional_weight_tie=False, d_intermediate=20
    ),
    "lc_plm one direction": lambda: lc_plm(bidirectional=False),
    "lc_plm hybrid": lambda: lc_plm(
        n_layer=2,
        attn_layer_idx=[1],
        attn_cfg={"num_heads": 2, "num_heads_kv": 1, "rotary_emb_dim": 4},
        rms_norm=False,
    ),
    "lc_plm mamba2 groups": lambda: lc_plm(
        "Mamba2", {"ngroups": 2, "dt_limit": [0.01, 0.5], "norm_before_gate": True}
    ),
}


def inputs(batch: int, tokens: int, *, masked: bool) -> dict[str, Tensor]:
    """Ids and, if `masked`, a mask with padding on either side of some rows."""
    given = {"input_ids": torch.randint(0, 20, (batch, tokens))}
    if masked:
        mask = torch.ones(batch, tokens, dtype=torch.int64)
        mask[0, max(1, tokens - 2) :] = 0
        mask[1:, : tokens // 3] = 0
        given["attention_mask"] = mask
    return given


def dynamic(given: dict[str, Tensor]) -> dict[str, dict[int, Any]]:
    """Both axes of every input, from 1 on."""
    batch, tokens = torch.export.Dim("batch", min=1), torch.export.Dim("tokens", min=1)
    return {name: {0: batch, 1: tokens} for name in given}


def export(model: Any, given: dict[str, Tensor]) -> torch.export.ExportedProgram:
    """As the docs say: without gradients, which PyTorch's scan does not decompose."""
    with torch.no_grad():
        return torch.export.export(model, (), given, dynamic_shapes=dynamic(given))


def check_module(exported: Any, model: Any, *, masked: bool) -> None:
    """The logits of `exported` are the model's, at other batch sizes and lengths than its own."""
    for shape in SHAPES:
        given = inputs(*shape, masked=masked)
        found = exported(**given)
        found = found if isinstance(found, Tensor) else found.logits
        assert_equal_where_real(found, model(**given).logits, given)


def check_onnx(model: Any, *, masked: bool) -> None:
    """Through a file and ONNX Runtime, at every shape; standard operators only."""
    from onnxruntime import InferenceSession

    given = inputs(*EXAMPLE, masked=masked)
    with torch.no_grad(), warnings.catch_warnings():
        # Of the exporter's own making: deprecated parts of PyTorch that it still calls.
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            *(model, ()),
            kwargs=given,
            dynamo=True,
            dynamic_shapes=dynamic(given),
            output_names=["logits"],
            verbose=False,
        )
    assert program is not None
    domains = {node.domain for node in program.model.graph}
    assert domains <= {"", "pkg.torch.ops"}, domains
    file = io.BytesIO()
    program.save(file)
    session = InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])

    def run(**given: Tensor) -> Tensor:
        return torch.from_numpy(
            session.run(["logits"], {k: v.numpy() for k, v in given.items()})[0]
        )

    check_module(run, model, masked=masked)


def assert_equal_where_real(found: Tensor, expected: Tensor, given: dict[str, Tensor]) -> None:
    real = given.get("attention_mask", torch.ones(given["input_ids"].shape)) == 1
    assert_close(found[real], expected[real], terms=256)


def check_graphs(model: Any, *, training: bool, masked: bool, backend: str = "aot_eager") -> None:
    """Eight lengths and three batch sizes make two graphs: of the first shape, and of any."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model.train(training), backend=counter, fullgraph=True)
    for batch, tokens in ((2, 5), (3, 6), (3, 7), (2, 8), (4, 9), (4, 10), (3, 12), (2, 70)):
        given: dict[str, Any] = inputs(batch, tokens, masked=masked)
        if training:
            given["labels"] = given["input_ids"]
        if training and isinstance(model, MiniLLaDA):
            mask = given.get("attention_mask")
            given["noise"] = model.diffusion.noise(given["input_ids"], mask)
        with torch.set_grad_enabled(training):
            found, expected = compiled(**given), model(**given)
        if not training:
            assert_equal_where_real(found.logits, expected.logits, given)
            continue
        names, parameters = zip(*model.named_parameters())
        grads = (torch.autograd.grad(out.loss, parameters) for out in (found, expected))
        assert_close(found.loss, expected.loss, terms=256)
        for name, a, b in zip(names, *grads):
            assert_close(a, b, terms=4096, name=name)
    assert counter.frame_count <= 2
    torch._dynamo.reset()
