"""The rules of docs/architecture.md that a program can check."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from brickwork.kernels.backend import BACKENDS, OPS

ROOT = Path(__file__).parent.parent
ROOMS = ("blocks", "kernels", "assemblies")
ASSEMBLIES = ("mini_llada", "rish", "lc_plm")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).glob("*.py"))
MODULES = [f"brickwork.{p.parent.name}.{p.stem}" for p in SOURCES if p.stem != "__init__"]
OPTIONAL = (
    "triton",
    "transformers",
    "mamba_ssm",
    "causal_conv1d",
    "safetensors",
    "matplotlib",
    "tqdm",
)
BLOCK_FILES = (
    *("norm", "rope", "attention", "kv_cache", "swiglu", "moe", "mamba1", "mamba2", "bimamba"),
    *("residual", "masked_diffusion"),
)

PUBLIC_BLOCKS = [
    *("AddNorm", "Attention", "BiMamba", "KVCache", "Mamba1", "Mamba2", "MaskedDiffusion", "MoE"),
    *("RMSNorm", "Residual", "RoPE", "StaticKVCache", "SwiGLU"),
    *("load_balancing_loss", "router_z_loss"),
]


def ids(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_classes(name: str) -> list[type[nn.Module]]:
    """The public nn.Module classes that a module defines itself."""
    members = vars(importlib.import_module(name)).items()
    return [
        member
        for key, member in members
        if inspect.isclass(member)
        and issubclass(member, nn.Module)
        and member.__module__ == name
        and not key.startswith("_")
    ]


def catalogue() -> list[type[nn.Module]]:
    """The modules that people use: the blocks and the models, without the parts of either."""
    rooms = [importlib.import_module(f"brickwork.{room}") for room in ("blocks", "assemblies")]
    members = [member for room in rooms for member in vars(room).values()]
    return [m for m in members if inspect.isclass(m) and issubclass(m, nn.Module)]


def test_kernels_is_a_namespace_and_the_others_are_packages():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "blocks" / "__init__.py").exists()
    assert (ROOT / "assemblies" / "__init__.py").exists()


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_hold_no_folders(room):
    folders = [p.name for p in (ROOT / room).iterdir() if p.is_dir() and p.name != "__pycache__"]
    assert folders == []


@pytest.mark.parametrize("room", ROOMS)
def test_import_names_lead_to_the_rooms(room):
    package = importlib.import_module(f"brickwork.{room}")
    assert [Path(p).resolve() for p in package.__path__ if Path(p).exists()] == [ROOT / room]
    assert (ROOT / "typings" / "brickwork" / room).resolve() == ROOT / room
    assert (ROOT / room / "py.typed").exists()


def test_kernels_does_not_shadow_another_package_of_that_name(tmp_path):
    stub = tmp_path / "kernels"
    stub.mkdir()
    (stub / "__init__.py").write_text("origin = 'the other package'\n")
    seen = subprocess.run(
        [sys.executable, "-c", "import kernels; print(kernels.origin)"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert seen.stdout.strip() == "the other package", seen.stderr


@pytest.mark.parametrize("name", ASSEMBLIES)
def test_assemblies_are_short(name):
    lines = (ROOT / "assemblies" / f"{name}.py").read_text(encoding="utf-8").count("\n")
    assert lines < 150


@pytest.mark.parametrize("op", OPS)
def test_an_op_is_a_module_with_its_function_and_reference(op):
    module = importlib.import_module(f"brickwork.kernels.{op}")
    parameters = inspect.signature(getattr(module, op)).parameters
    backend = parameters["backend"]
    assert backend.kind is backend.KEYWORD_ONLY
    assert backend.default == "auto"
    assert inspect.Parameter.VAR_KEYWORD not in {p.kind for p in parameters.values()}
    assert any(re.fullmatch(rf"{op}(_\w+)?_reference", name) for name in vars(module))


def test_a_backend_that_an_op_names_is_a_module_beside_it():
    for op in OPS:
        for node in ast.walk(tree(ROOT / "kernels" / f"{op}.py")):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "choose":
                assert ast.literal_eval(node.args[0]) == op
                for keyword in node.keywords:
                    assert keyword.arg in BACKENDS
                    if keyword.arg == "torch":  # the reference, where it is the fastest
                        continue
                    assert (ROOT / "kernels" / f"{op}_{keyword.arg}.py").exists(), keyword.arg


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_optional_packages_are_imported_inside_functions(path):
    if "_triton" in path.name or path.name.startswith("hf"):
        pytest.skip("imported only by who has the package")
    for node in imports_when_loaded(tree(path)):
        names = (
            [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        )
        assert not {n.split(".")[0] for n in names} & set(OPTIONAL), ast.unparse(node)


def imports_when_loaded(node: ast.AST):
    """Import statements that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (n for part in child.orelse for n in imports_when_loaded(part))
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_when_loaded(child)


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_imports_point_downwards(path):
    above = {"kernels": ("blocks", "assemblies"), "blocks": ("assemblies",), "assemblies": ()}
    text = path.read_text(encoding="utf-8")
    for room in above[path.parent.name]:
        assert f"brickwork.{room}" not in text


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_no_buffer_is_registered(path):
    """Casts damage buffers and meta-loading leaves them empty; what is derived is computed."""
    assert "register_buffer" not in path.read_text(encoding="utf-8")


def test_the_catalogue_of_blocks_is_imports_and_nothing_else():
    docstring, *statements = tree(ROOT / "blocks" / "__init__.py").body
    assert isinstance(docstring, ast.Expr)
    for statement in statements:
        assert isinstance(statement, ast.ImportFrom), ast.unparse(statement)
        assert (statement.module or "").startswith("brickwork.blocks.")
        assert [a.name for a in statement.names] == [a.asname for a in statement.names]


@pytest.mark.parametrize("name", PUBLIC_BLOCKS)
def test_public_blocks_are_in_the_catalogue(name):
    assert hasattr(importlib.import_module("brickwork.blocks"), name)


@pytest.mark.parametrize("name", [n for n in MODULES if ".blocks." in n])
def test_every_module_can_reset_its_parameters(name):
    for cls in module_classes(name):
        assert callable(getattr(cls, "reset_parameters", None)), cls.__name__


def test_blocks_and_models_follow_the_conventions():
    for cls in catalogue():
        label = cls.__name__
        _, *arguments = inspect.signature(cls.__init__).parameters.values()
        positional = [p.name for p in arguments if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert len(positional) <= 1, f"{label}: keyword-only from the second argument on"
        assert not any(p.kind is p.VAR_POSITIONAL for p in arguments), label
        assert ">>> " in (cls.__doc__ or ""), f"{label}: no example in the docstring"
        if label != "Residual":  # hands every keyword argument to its branch
            _, *arguments = inspect.signature(cls.forward).parameters.values()
            swallowed = [p.name for p in arguments if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
            assert swallowed == [], f"{label}: an unknown argument must be an error"


@pytest.mark.parametrize("name", [*PUBLIC_BLOCKS, *OPS])
def test_public_names_have_an_example_that_the_doctests_run(name):
    room = f"brickwork.kernels.{name}" if name in OPS else "brickwork.blocks"
    assert ">>> " in inspect.getdoc(getattr(importlib.import_module(room), name))


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_every_file_opens_with_what_it_is(path):
    assert ast.get_docstring(tree(path))


@pytest.mark.parametrize(
    ("room", "names"), [("kernels", (*OPS, "backend", "checks")), ("blocks", BLOCK_FILES)]
)
def test_tests_mirror_the_rooms(room, names):
    for name in names:
        assert (ROOT / room / f"{name}.py").exists()
        assert (ROOT / "tests" / room / f"test_{name}.py").exists()
