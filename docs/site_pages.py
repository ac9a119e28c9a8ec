"""Pages of the documentation that are made from the code when the site is built, so that they cannot
fall behind it: the config, the commands, and the results.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import typer

from benchmarks.results import BENCHMARKS, Benchmark
from whale.cli import app
from whale.config import document

if TYPE_CHECKING:  # the tests of these pages run without mkdocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

RESULTS = Path(__file__).parent / "results.jsonl"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs after it has read the folder."""
    from mkdocs.structure.files import File

    pages = {
        "reference/config.md": config_page(),
        "reference/commands.md": commands_page(),
        "results.md": results_page(RESULTS),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown; bars and line ends inside of cells do not break it."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


# ---- config


def config_page() -> str:
    """The table that `whale config` writes into a file."""
    return (
        "# Config\n\n`wh.init({...})` and `wh.Config({...})` take these keys, `wh.plan` takes them in `config=`. Any "
        "other key is refused. Made from `whale.config.Config`; `whale config` prints the same.\n\n"
        + document()
    )


# ---- commands


def commands_page() -> str:
    root = typer.main.get_command(app)
    parts = [
        "# Commands\n\nMade from the commands themselves; `whale COMMAND --help` says the same.\n"
    ]
    for path, command in _commands(root, "whale"):
        parts.append(f"\n## `{path}`\n\n{_help(command)}\n")
        options = [_option(parameter) for parameter in command.params]
        shown = [option for option in options if option is not None]
        if shown:
            parts.append("\n" + table(["option", "default", "what it does"], shown))
    return "".join(parts)


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command that is no group, with the words that are typed for it."""
    inside = getattr(command, "commands", None)
    if inside is None:
        yield path, command
        return
    for name, sub in sorted(inside.items()):
        if not sub.hidden:
            yield from _commands(sub, f"{path} {name}")


def _help(command: click.Command) -> str:
    return (command.help or "").replace("\b", "").strip()


def _option(parameter: click.Parameter) -> list[str] | None:
    if getattr(parameter, "hidden", False) or parameter.name == "help":
        return None
    is_argument = parameter.param_type_name == "argument"
    names = [parameter.metavar or parameter.human_readable_name] if is_argument else parameter.opts
    default = parameter.default
    is_plain = isinstance(default, (str, int, float, Path)) and not isinstance(default, bool)
    return [
        ", ".join(f"`{name}`" for name in names),
        f"`{default}`" if is_plain and default != "" else "",
        str(getattr(parameter, "help", None) or ""),
    ]


# ---- results

RESULTS_HEAD = """# Results

`make results` runs the benchmarks, one after the other, and this page shows what they printed. A figure is a ratio
within one run; each section names what it is compared with, its command, commit, date and machine. How a figure was
obtained:

- **measured on CPU**: by the clock, real processes on the machine named;
- **emulated**: real processes on CPUs that take the time which the cost model gives the GPUs named;
- **predicted**: by Whale's simulator; nothing ran.

No figure here was measured on a GPU by us.
"""
MISSING_HEAD = """
## Not taken yet

These benchmarks are in the repository, and no run of them has been kept for this page yet. Each is made to finish within
about five minutes on two cores that do nothing else; its command runs it and adds its figures here. Figures of them on
other pages are of earlier runs; where no commit stands beside them, it was not written down.

"""
LOST_HEAD = """
The commit of {names} is not in the history of this repository, so what was measured cannot be looked at. Take {it} again:

"""
UNITS = {"_s": "s", "_ms": "ms", "_us": "us"}
"""endings of names -> units"""


def results_page(path: Path) -> str:
    """An overview, then one section for each benchmark, from the lines that `make results` wrote."""
    lines = [line for line in path.read_text().splitlines() if line]
    found = {record["name"]: record for record in map(json.loads, lines)}
    known = [benchmark.name for benchmark in BENCHMARKS]
    order = [name for name in known if name in found]
    order += sorted(found.keys() - set(known))
    parts = [RESULTS_HEAD]
    if not found:
        parts.append("\nNo results have been taken at this commit yet.\n")
    else:
        head = ["claim", "how", "worst case", "target", "cases that reach it", "date"]
        parts.append("\n" + table(head, [_overview(found[name]) for name in order]))
    missing = [benchmark for benchmark in BENCHMARKS if benchmark.name not in found]
    if found and missing:
        parts.append(
            f"\n{len(BENCHMARKS) - len(missing)} of {len(BENCHMARKS)} benchmarks stand here; the others "
            "are listed [at the end](#not-taken-yet).\n"
        )
    parts.extend(_result(found[name]) for name in order)
    if missing:
        parts.append(MISSING_HEAD)
        rows = [
            [f"`{each.name}`", each.how, f"{each.claim}, against: {each.against}", _take(each)]
            for each in missing
        ]
        parts.append(table(["name", "how", "claim", "command"], rows))
    lost = [each for each in BENCHMARKS if each.name in found and is_lost(found[each.name])]
    if lost:
        names = ", ".join(f"`{each.name}`" for each in lost)
        parts.append(LOST_HEAD.format(names=names, it="it" if len(lost) == 1 else "them"))
        parts.extend(f"- {_take(each)}\n" for each in lost)
    return "".join(parts)


def _take(benchmark: Benchmark) -> str:
    """What is typed to put its figures on the page."""
    name = f'"{benchmark.name}"' if " " in benchmark.name else benchmark.name
    measurements = " --measurements DIR" if benchmark.needs_measurements else ""
    return f"`python benchmarks/results.py {name}{measurements}`"


def is_lost(record: dict[str, Any]) -> bool:
    """Whether the commit at which a row was taken is not in the history. Without git, or where only
    a part of the history is here, nobody knows.
    """
    if _git("rev-parse", "--is-shallow-repository") != "false":
        return False
    return _git("merge-base", "--is-ancestor", record["commit"], "HEAD") is None


def _git(*words: str) -> str | None:
    """What git prints; None where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=RESULTS.parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _overview(record: dict[str, Any]) -> list[str]:
    """The row of a benchmark: the case that is nearest to its target, or furthest beyond it."""
    claims = list(record["claims"].values())
    worst = min(claims, key=_margin)
    reached = sum(claim["ok"] for claim in claims)
    share = f"{reached} of {len(claims)}"
    return [
        f"[{record['claim']}](#{_anchor(record['name'])})",
        record["how"],
        f"{worst['ratio']:.4g}",
        _target(worst),
        share if reached == len(claims) else f"**{share}**",
        record["date"],
    ]


def _anchor(name: str) -> str:
    """`search-by-hand` for `search --by-hand`: the address of a section has no spaces."""
    return re.sub(r"\W+", "-", name)


def _margin(claim: dict[str, Any]) -> float:
    """How many times better than its target a figure is; below 1 where it is missed."""
    ratio, target = float(claim["ratio"]), float(claim["target"])
    better, worse = (target, ratio) if claim["at_most"] else (ratio, target)
    return better / worse if worse else float("inf")


def _target(claim: dict[str, Any]) -> str:
    return f"{'at most' if claim['at_most'] else 'at least'} {claim['target']}"


def _result(record: dict[str, Any]) -> str:
    rows = []
    for name, figures in record["claims"].items():
        verdict = "yes" if figures["ok"] else "**no**"
        details = ", ".join(_figure(key, value) for key, value in figures["details"].items())
        rows.append([name, f"{figures['ratio']:.4g}", _target(figures), verdict, details])
    lost = " (no longer in the history)" if is_lost(record) else ""
    facts = [
        ["compared with", record["against"]],
        ["how", record["how"]],
        ["command", f"`{record['command']}`"],
        ["commit, date", f"`{record['commit']}`{lost}, {record['date']}"],
        ["machine", record["machine"]],
    ]
    return (
        f"\n## {record['claim']} {{ #{_anchor(record['name'])} }}\n\n"
        + table(["case", "found", "target", "reached", "figures behind it"], rows)
        + "\n"
        + table(["", ""], facts)
    )


def _figure(name: str, value: Any) -> str:
    """`whale 2.126 s` for the value of `whale_s`."""
    text = f"{value:.4g}" if isinstance(value, float) else f"{value}"
    for ending, unit in UNITS.items():
        if name.endswith(ending) and not isinstance(value, str):
            return f"{name.removesuffix(ending).replace('_', ' ')} {text} {unit}"
    return f"{name.replace('_', ' ')} {text}"
