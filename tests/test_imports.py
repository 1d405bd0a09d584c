"""What importing costs and needs, seen in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OPTIONAL = (
    *("triton", "transformers", "mamba_ssm", "causal_conv1d"),
    *("safetensors", "tqdm", "matplotlib", "numpy"),
)
BLOCK = f"""
import sys, warnings
sys.modules.update(dict.fromkeys({OPTIONAL!r}))  # None stands for a module that is not there
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, about a missing numpy
    import torch
"""


def run(code: str, folder: Path) -> str:
    """What a fresh Python prints in `folder`; its warnings are errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("room", ["blocks", "kernels", "assemblies"])
def test_every_module_imports_without_the_optional_packages(room, tmp_path):
    without = ("_mamba_ssm", "_causal_conv1d")
    names = [
        p.stem
        for p in sorted((ROOT / room).glob("*.py"))
        if p.stem != "__init__"
        and not p.stem.startswith("hf")
        and "_triton" not in p.stem
        and not p.stem.endswith(without)
    ]
    run(
        BLOCK
        + f"import importlib\nfor n in {names!r}: importlib.import_module('brickwork.{room}.' + n)",
        tmp_path,
    )


def test_importing_blocks_imports_nothing_heavy(tmp_path):
    code = """
import sys, json, torch
before = set(sys.modules)
import brickwork.blocks
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    new = json.loads(run(code, tmp_path))
    assert {name.split(".")[0] for name in new} <= {"brickwork", "einops"}


def test_on_a_cpu_choosing_a_backend_imports_no_kernels_for_gpus(tmp_path):
    """Where there is no compiler either, every backend is asked why it cannot run."""
    code = """
import os, sys
os.environ.update(BRICKWORK_BUILD="0", BRICKWORK_CACHE="nothing")
import torch
from brickwork.blocks import BiMamba, Mamba2
x = torch.randn(1, 5, 16)
for block in (BiMamba(16), Mamba2(16, d_state=4, head_dim=8)):
    block(x).sum().backward()
print([name for name in sys.modules if name.startswith("brickwork") and "_triton" in name])
"""
    assert run(code, tmp_path).strip() == "[]"


def test_importing_changes_no_setting(tmp_path):
    code = """
import os, random, sys, warnings
import torch

def settings():
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "sdp": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "random": random.getstate(),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "paths": list(sys.path),
        "hook": sys.excepthook,
    }

before, state = settings(), torch.get_rng_state()
import brickwork.blocks
after = settings()
assert before == after, [k for k in before if before[k] != after[k]]
assert torch.equal(state, torch.get_rng_state())
"""
    run(code, tmp_path)


def test_a_model_runs_without_the_optional_packages(tmp_path):
    code = """
from brickwork.blocks import Attention, Residual, RMSNorm, RoPE, SwiGLU
model = torch.nn.Sequential(
    Residual(Attention(16, num_heads=2, rope=RoPE(8), causal=True), norm=RMSNorm(16)),
    Residual(SwiGLU(16, hidden_dim=32), norm=RMSNorm(16)),
)
model(torch.randn(2, 5, 16)).square().mean().backward()
assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
"""
    run(BLOCK + code, tmp_path)


@pytest.mark.parametrize("call", ["model.save_pretrained('x')", "MiniLLaDA.from_pretrained('.')"])
def test_checkpoints_without_safetensors_say_what_to_install(call, tmp_path):
    code = f"""
import pathlib
from brickwork.assemblies import MiniLLaDA, MiniLLaDAConfig
config = MiniLLaDAConfig(vocab_size=8, dim=16, depth=1, head=2, intermediate_size=32, max_seq_len=8)
model = MiniLLaDA(config)
pathlib.Path("config.json").write_text("{{}}")
pathlib.Path("model.safetensors").touch()
try:
    {call}
except ImportError as error:
    print(error)
else:
    print("no error")
"""
    assert "pip install 'brickwork[train]'" in run(BLOCK + code, tmp_path)
