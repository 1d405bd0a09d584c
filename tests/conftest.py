"""Settings of every test: seeds, threads, hypothesis, and poisoned uninitialised memory."""

from __future__ import annotations

import os
import sys

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not _only_hands_out_tests(config):
        _prepare()


def _only_hands_out_tests(config: pytest.Config) -> bool:
    """Whether this is the process of pytest-xdist that runs no test: it need not import PyTorch."""
    workers = getattr(config.option, "numprocesses", None)
    return bool(workers) and "PYTEST_XDIST_WORKER" not in os.environ


def _prepare() -> None:
    # A compiled program kept on the disk knows an op by its name, not by what its results are like.
    for cache in ("FX_GRAPH_CACHE", "AUTOGRAD_CACHE"):
        os.environ[f"TORCHINDUCTOR_{cache}"] = "0"
    import hypothesis
    import torch
    from torch._dynamo import trace_rules

    hypothesis.settings.register_profile(
        "brickwork", deadline=None, derandomize=True, max_examples=25, database=None
    )
    hypothesis.settings.load_profile("brickwork")
    hypothesis.register_random(_torch_random)
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    # PyTorch remembers its constructors on first use: make that be before any is wrapped below.
    with torch.device("meta"):
        torch.empty(0)
    trace_rules.get_torch_obj_rule_map()


class _TorchRandom:
    """PyTorch's generator as hypothesis wants it, which seeds it anew for every example."""

    def seed(self, value):
        import torch

        torch.manual_seed(value)

    def getstate(self):
        import torch

        return torch.get_rng_state()

    def setstate(self, state):
        import torch

        torch.set_rng_state(state)


_torch_random = _TorchRandom()  # hypothesis keeps a weak reference


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poison_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill `torch.empty*` with NaN when the library calls it, so that unwritten entries show."""
    import torch

    def poisoned(original):
        def make(*args, **kwargs):
            out = original(*args, **kwargs)
            if torch.compiler.is_compiling():
                return out
            caller = sys._getframe(1).f_globals.get("__name__", "")
            on_cpu = out.is_floating_point() and out.device.type == "cpu"
            if on_cpu and caller.startswith("brickwork."):
                out.fill_(float("nan"))
            return out

        return make

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
