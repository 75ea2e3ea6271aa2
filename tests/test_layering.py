"""The layer table of docs/architecture.md holds: every import in the package points down."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "vllm_metal"
MODULES = sorted(PACKAGE.rglob("*.py"))


def _table() -> list[tuple[list[str], set[str]]]:
    """Rows of the table, top first: the layers of a row, and the third-party packages it may import."""
    rows = re.findall(
        r"^\| (`.*?) \|.*\| (.*?) ?\|$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE
    )
    table = [
        (re.findall(r"`(\S+?)`", layers), set(re.findall(r"\w+", packages))) for layers, packages in rows
    ]
    return [row for row in table if (PACKAGE / row[0][0].replace(".", "/")).exists()
            or (PACKAGE / f"{row[0][0]}.py").exists()]  # fmt: skip


TABLE = _table()
RANKS = {layer: rank for rank, (layers, _) in enumerate(TABLE) for layer in layers}


def _layer(module: str) -> str | None:
    """`engine.mlx.sampler` belongs to `engine.mlx`; the package itself to no layer."""
    parts = module.split(".")
    for size in (2, 1):
        if (name := ".".join(parts[:size])) in RANKS:
            return name
    return None


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    mine = _layer(_module(path))
    if mine is None:
        assert path == PACKAGE / "__init__.py", f"`{_module(path)}` stands in no row of the layer table"
        return
    for name in _imports(path):
        if name.startswith("vllm_metal."):
            other = _layer(name.removeprefix("vllm_metal."))
            if other is not None and other != mine:
                assert RANKS[other] > RANKS[mine], f"`{mine}` imports `{name}`, which is not below it"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_third_party_imports_are_those_of_the_table(path):
    mine = _layer(_module(path))
    allowed = TABLE[RANKS[mine]][1] if mine else set()
    third_party = (
        {name.split(".")[0] for name in _imports(path)} - set(sys.stdlib_module_names) - {"vllm_metal"}
    )
    assert third_party <= allowed, f"`{mine}` imports {sorted(third_party - allowed)}"


def test_the_table_was_read():
    assert len(TABLE) == 20
    assert RANKS["cli"] < RANKS["engine.mlx"] < RANKS["engine"] < RANKS["errors"]
    assert "mlx" in TABLE[RANKS["engine.mlx"]][1]
