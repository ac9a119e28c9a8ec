"""Pages of the documentation that are made from the code when the site is built, so that they cannot
fall behind it: the config, the commands, and the results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from whale.cli import app
from whale.config import Config

RESULTS = Path(__file__).parent / "results.jsonl"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs after it has read the folder."""
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
    rows = []
    for name, field in Config.model_fields.items():
        kind = getattr(field.annotation, "__name__", None) or str(field.annotation)
        if field.annotation is not None and "[" in str(field.annotation):
            kind = str(field.annotation).replace("typing.", "")
        default = field.get_default(call_default_factory=True)
        rows.append(
            [f"`{name}`", f"`{kind}`", f"`{json.dumps(default, default=str)}`", _text(field)]
        )
    return (
        "# Config\n\n`wh.init({...})`, `whale run --set KEY=VALUE`, or a file. Every key, made from "
        "`whale.config.Config`:\n\n" + table(["key", "values", "default", "what it does"], rows)
    )


def _text(field: Any) -> str:
    return str(field.description or "")


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
    names = [str(parameter.name).upper()] if is_argument else list(parameter.opts)
    default = parameter.default
    is_plain = isinstance(default, (str, int, float)) and not isinstance(default, bool)
    return [
        ", ".join(f"`{name}`" for name in names),
        f"`{default}`" if is_plain and default != "" else "",
        str(getattr(parameter, "help", None) or ""),
    ]


# ---- results


def results_page(path: Path) -> str:
    """One table for each benchmark, from the lines that `make results` wrote."""
    records = [json.loads(line) for line in path.read_text().splitlines() if line]
    parts = [
        "# Results\n\nMade by `make results`: each benchmark prints one JSON line, and this page shows "
        "them. **measured**: real processes on the CPU of the machine named. **emulated**: real "
        "processes that take the times of the GPUs named. **predicted**: by Whale's simulator, no "
        "process at all. No figure here was measured on a GPU by us.\n"
    ]
    if not records:
        parts.append("\nNo results have been taken at this commit yet.\n")
    for record in sorted(records, key=lambda record: record["name"]):
        parts.append(_result(record))
    return "".join(parts)


def _result(record: dict[str, Any]) -> str:
    rows = []
    for name, figures in record["claims"].items():
        target = f"{'at most' if figures['at_most'] else 'at least'} {figures['target']}"
        verdict = "yes" if figures["ok"] else "**no**"
        details = ", ".join(_figure(key, value) for key, value in figures["details"].items())
        rows.append([name, f"{figures['ratio']}", target, verdict, details])
    return (
        f"\n## {record['name']}\n\n{record['claim']} ({record['how']})\n\n"
        + table(["case", "found", "target", "reached", "figures behind it"], rows)
        + f"\nAgainst: {record['against']}. Made by `{record['command']}` at commit "
        f"`{record['commit']}`, {record['date']}, {record['machine']}.\n"
    )


def _figure(name: str, value: Any) -> str:
    """`whale_s 2.126`."""
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
