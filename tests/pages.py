"""Console blocks of README and of the site: read, run as a reader would run them, and compared with
what the page shows.

    ```console
    $ whale plan -n 2 train.py          a command; the lines below it are what it prints
    2 devices (2 x CPU): ...
    ...                                 any number of lines, also none
    ```

All commands of a page run in one folder, one after the other, as in a clone: `examples`, `models`
and so on are there, and a `train.py` and a `cluster.yaml` for pages that mean a script and a cluster
of the reader's own. Output is compared word by word up to numbers and their units. A comment above
a fence says what is special about the block:

    <!-- file: bert.py -->              the block is a file, which later commands use
    <!-- files of: emulation.md -->     so are those of another page
    <!-- exits with 2 -->               its commands fail, and that is what the page shows
    <!-- not run: it needs two hosts -->

`python -m tests.pages docs/waves.md` runs one page and writes what its commands print into it, where
that differs from what is there and no `...` leaves lines out.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
IN_A_CLONE = ("benchmarks", "deploy", "docs", "examples", "models", "README.md", "Makefile")
OF_THE_READER = {
    "train.py": ROOT / "tests/data/train.py",
    "cluster.yaml": ROOT / "examples/mixed_gpus.yaml",
}
COLUMNS = "120"
"""width of the terminal that pages show"""
TIMEOUT_S = 900.0
"""of one command on a busy machine"""
ANY_LINES = "..."
PROMPT = "$ "

_REMARK = re.compile(r"^<!-- ?(.*?) ?-->$")
_CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\r")
_ASIDE = re.compile(
    r"^(capturing .* operations *|(\[transformers\]|Writing model|Loading).*)$", re.M
)
"""lines that are printed only where something takes long, and what transformers says"""
_RULE = re.compile(r"[─━┏┳┓┡╇┩└┴┘│┃]+")
_NUMBER = re.compile(
    r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
    r"(?:\s?(?:ns|us|ms|s|min|h|[KMGTP]?B|[KMGTP]?FLOP)\b(?:/s)?|\s?%|x\b)?"
)


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    page: Path
    line: int
    """number of its opening fence, from 1"""
    language: str
    lines: tuple[str, ...]
    remark: str
    """text of the comment above it, or empty"""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def reason_not_run(self) -> str | None:
        is_named = self.remark.startswith("not run:")
        return self.remark.removeprefix("not run:").strip() if is_named else None

    @property
    def exit_code(self) -> int:
        found = re.fullmatch(r"exits with (\d+)", self.remark)
        return int(found[1]) if found else 0


@dataclass(frozen=True)
class Command:
    """One command of a block, and the lines that the page shows below it."""

    block: Block
    text: str
    shown: tuple[str, ...]


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page, in order."""
    lines = page.read_text().splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        remark = _REMARK.match(lines[start - 1]) if start else None
        inside = tuple(lines[start + 1 : number])
        language = lines[start].removeprefix("```").strip()
        yield Block(page, start + 1, language, inside, remark[1] if remark else "")
        start = None
    assert start is None, f"{page}: a fence is not closed"


def commands(block: Block) -> list[Command]:
    found: list[Command] = []
    text = ""
    shown: list[str] = []
    for line in block.lines:
        if text.endswith("\\"):
            text = f"{text}\n{line}"
        elif line.startswith(PROMPT):
            if text:
                found.append(Command(block, text, tuple(shown)))
            text = line.removeprefix(PROMPT)
            shown = []
        else:
            assert text, f"{block.place}: a console block begins with a command, {PROMPT!r}"
            shown.append(line)
    if text:
        found.append(Command(block, text, tuple(shown)))
    return found


# ---- comparing


def up_to_numbers(text: str) -> list[str]:
    """The words of a text without its numbers: where lines end is the terminal's affair."""
    words = _RULE.sub(" ", _CONTROL.sub("", text)).split()
    return _NUMBER.sub("#", " ".join(words)).split()


def difference(shown: tuple[str, ...], printed: str) -> str:
    """Empty where the page shows what was printed; else both, line by line."""
    parts: list[list[str]] = [[]]
    for line in shown:
        if line.strip() == ANY_LINES:
            parts.append([])
        else:
            parts[-1] += up_to_numbers(line)
    if not any(parts) or _matches(parts, up_to_numbers(printed)):
        return ""
    wanted = [" ".join(up_to_numbers(line)) for line in shown]
    found = [" ".join(up_to_numbers(line)) for line in printed.splitlines()]
    return "\n".join(difflib.unified_diff(wanted, found, "the page", "printed", lineterm=""))


def _matches(parts: list[list[str]], found: list[str]) -> bool:
    """Whether the parts stand in `found` in their order, with anything between them and nothing
    before the first or behind the last.
    """
    first = parts[0]
    if len(parts) == 1:
        return first == found
    last = parts[-1]
    if found[: len(first)] != first or (last and found[-len(last) :] != last):
        return False
    place = len(first)
    end = len(found) - len(last)
    for part in parts[1:-1]:
        starts = range(place, end - len(part) + 1)
        start = next((at for at in starts if found[at : at + len(part)] == part), None)
        if start is None:
            return False
        place = start + len(part)
    return place <= end


# ---- running


def prepare(folder: Path) -> None:
    """What a reader has in the folder in which the commands are typed."""
    for name in IN_A_CLONE:
        (folder / name).symlink_to(ROOT / name)
    for name, source in OF_THE_READER.items():
        shutil.copyfile(source, folder / name)


def run(command: str, folder: Path) -> tuple[int, str]:
    """The exit code of a command and what it printed; it is killed after TIMEOUT_S."""
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    settings = {
        "PATH": paths,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": COLUMNS,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        return -1, f"{printed}\nnot done within {TIMEOUT_S:.0f} s"
    return process.returncode, _ASIDE.sub("", printed.replace("\r", "\n"))


@dataclass(frozen=True)
class Outcome:
    command: Command
    exit_code: int
    printed: str

    @property
    def complaint(self) -> str:
        """Empty where it ended and printed as the page says."""
        head = f"{self.command.block.place}: $ {self.command.text}\n"
        wanted = self.command.block.exit_code
        # a rehearsal on a busy machine ends with 1 and says so: times are off, the rest is as shown
        is_busy = self.exit_code == 1 and "\nINVALID: " in self.printed
        if self.exit_code != wanted and not is_busy:
            return f"{head}exit code {self.exit_code} instead of {wanted}\n{self.printed[-3000:]}"
        found = difference(self.command.shown, self.printed)
        return f"{head}{found}" if found else ""


def write_file(block: Block, folder: Path) -> None:
    """Writes a block that is a file; does nothing with others."""
    if block.remark.startswith("file:"):
        path = folder / block.remark.removeprefix("file:").strip()
        path.write_text("\n".join(block.lines) + "\n")


def outcomes(page: Path, folder: Path) -> Iterator[Outcome]:
    """Runs a page: writes its files, runs its commands."""
    prepare(folder)
    for block in blocks(page):
        if block.remark.startswith("files of:"):
            other = page.parent / block.remark.removeprefix("files of:").strip()
            for found in blocks(other):
                write_file(found, folder)
        write_file(block, folder)
        if block.language != "console" or block.reason_not_run is not None:
            continue
        for command in commands(block):
            yield Outcome(command, *run(command.text, folder))


def write(page: Path) -> None:
    """Puts what commands print now into the place of what the page shows, and says what it leaves."""
    text = page.read_text()
    with tempfile.TemporaryDirectory() as folder:
        for outcome in outcomes(page, Path(folder)):
            complaint = outcome.complaint
            print(complaint or f"{outcome.command.block.place}: as shown", flush=True)
            shown = outcome.command.shown
            if not complaint or not shown or ANY_LINES in map(str.strip, shown):
                continue
            head = PROMPT + outcome.command.text + "\n"
            lines = [line.rstrip() for line in _CONTROL.sub("", outcome.printed).splitlines()]
            old = head + "\n".join(shown) + "\n"
            assert text.count(old) == 1, outcome.command.block.place
            text = text.replace(old, head + "\n".join(lines).strip("\n") + "\n")
    page.write_text(text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name).resolve())
