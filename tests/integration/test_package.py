"""What is installed: names that tab completion shows, types, and a wheel and an sdist that work in
an empty environment.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import whale

ROOT = Path(__file__).parents[2]

ONE_STEP = """
import torch, whale as wh
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.layer(x), y)
wh.init()
model = Model()
batch = {"x": torch.ones(8, 4), "y": torch.ones(8, 1)}
engine = wh.parallelize(model, batch, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
print("loss", float(engine.step(batch).loss))
"""


def test_public_names_are_shown() -> None:
    """Also those whose modules have not been loaded yet, and nothing else."""
    shown = {name for name in dir(whale) if not name.startswith("_")}
    assert shown == set(whale.__all__)
    assert all(getattr(whale, name) is not None for name in shown)


def test_types_are_part_of_the_package() -> None:
    assert (Path(whale.__file__).parent / "py.typed").exists()


def run(*words: str | Path, folder: Path) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """Wheel and sdist, made from a copy of what git has: build leaves no files in the clone."""
    source = folder / "source"
    run("git", "clone", "--quiet", ROOT, source, folder=folder)
    run(
        sys.executable,
        *("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source),
        folder=folder,
    )
    backend = "import setuptools.build_meta as backend; backend.build_sdist('..')"
    tools = folder / "tools"
    run(sys.executable, "-m", "venv", tools, folder=folder)
    run(tools / "bin/python", "-m", "pip", "install", "--quiet", "setuptools>=77", folder=folder)
    run(tools / "bin/python", "-c", backend, folder=source)
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_wheel_and_sdist_work_in_an_empty_environment(tmp_path: Path) -> None:
    wheel, sdist = build(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        (metadata,) = [name for name in inside if name.endswith(".dist-info/METADATA")]
        assert "\n# Whale\n" in archive.read(metadata).decode()  # README is the page of the package
    assert "whale/py.typed" in inside
    assert any(name.startswith("whale/report/templates/") for name in inside)
    assert not any(name.startswith(("tests/", "benchmarks/", "examples/")) for name in inside)
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/whale/py.typed") for name in archive.getnames())
    empty = tmp_path / "empty"
    run(sys.executable, "-m", "venv", empty, folder=tmp_path)
    python = empty / "bin/python"
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", wheel, "-c", constraints, folder=tmp_path)
    assert "profile" in run(empty / "bin/whale", "--help", folder=tmp_path)
    script = tmp_path / "step.py"
    script.write_text(ONE_STEP)
    assert run(python, script, folder=tmp_path).startswith("loss ")
