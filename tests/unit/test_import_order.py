"""Packages import in one direction, from low to high as listed here; types count like everything
else. docs/architecture.md and the README tell the same order to people.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import whale as wh

ROOT = Path(wh.__file__).parent
ORDER = (
    (
        *("names", "units", "dtypes", "compat", "devices"),
        *("metric_files", "error_file", "error_reports", "progress", "config"),
        "config_values",
    ),
    ("annotation",),
    ("cluster",),
    ("scheduling",),
    ("operations",),
    ("capture",),
    ("costs",),
    ("plans",),
    ("sharding",),
    ("simulation",),
    ("planning",),
    ("search",),
    ("checkpoint",),
    ("distributed",),
    ("lowering",),
    ("runtime",),
    ("emulation",),
    ("calibration",),
    ("report",),
    ("notebook",),
    ("session", "model_planner", "api"),
    ("integrations",),
    ("launcher", "doctor", "cli", "__main__"),
)
"""packages and modules of `whale`, the lowest first: each imports its own row and rows before it"""
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
ENTRY = "__init__"
"""`whale/__init__.py` loads every name of the API when it is first used, so it stands above all"""


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, package or module of `whale`) of every import of a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            names = [node.module or ""]
            if node.module == "whale":
                names = [f"whale.{alias.name}" for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            if top == "whale" and rest:
                yield node.lineno, rest.partition(".")[0]


def edges() -> Iterator[tuple[str, str, str]]:
    """(from, to, where) between packages and modules of `whale`."""
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        source = relative.parts[0].removesuffix(".py")
        for line, target in imported(path):
            if target != source and source != ENTRY:
                yield source, target, f"whale/{relative}:{line}"


def test_every_package_has_its_place() -> None:
    there = {
        path.stem
        for path in ROOT.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert there - {ENTRY} <= set(LEVEL)


def test_imports_go_one_way() -> None:
    wrong = []
    for source, target, where in edges():
        if target in LEVEL and LEVEL[target] > LEVEL[source]:
            wrong.append(f"{where}: {source} imports {target}, which stands above it")
    assert not wrong, "\n".join(wrong)


def test_a_module_of_plans_does_not_replace_the_function_plan() -> None:
    """`wh.plan(...)` is a function, `whale.plans.plan` a module: either import may come first."""
    importlib.import_module("whale.plans.plan")
    assert callable(wh.plan) and wh.plan.__module__ == "whale.api"
    code = (
        "import whale.plans.plan; import whale as wh; "
        "assert wh.plan.__module__ == 'whale.api'; "
        "assert wh.Plan is whale.plans.plan.Plan"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)
