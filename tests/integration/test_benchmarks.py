"""Benchmarks can be started both ways, from anywhere. What they measure is no test: times belong to
the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()
)

# as `python benchmarks/x.py` does it: the folder of the script comes first, that of the repository
# is not on the path
AS_SCRIPT = f"""
import importlib, os, runpy, sys
for name in {SCRIPTS!r}:
    path = list(sys.path)
    sys.path[0] = {str(ROOT / "benchmarks")!r}
    found = runpy.run_path(os.path.join({str(ROOT / "benchmarks")!r}, name + ".py"))
    print(name, callable(found["main"]))
    sys.path[:] = path
    for module in [module for module in sys.modules if module.split(".")[0] == "benchmarks"]:
        del sys.modules[module]
"""
# as `python -m benchmarks.x` does it; in the same process, since torch takes long to import
AS_MODULE = f"""
sys.path.insert(0, {str(ROOT)!r})
for name in {SCRIPTS!r}:
    print(name, callable(importlib.import_module("benchmarks." + name).main))
"""


def printed(program: str, folder: Path) -> list[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_benchmark_starts_as_a_script_and_as_a_module(tmp_path: Path) -> None:
    assert len(SCRIPTS) >= 5
    expected = [f"{name} True" for name in SCRIPTS]
    assert printed(AS_SCRIPT + AS_MODULE, tmp_path) == expected + expected
