"""What the commands have in common: options that several of them have, words that they do not know,
and how they end.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from whale.names import nearest

FAILED = 1
WRONG_USE = 2
PLAN_OPTIONS_WITH_VALUE = ("-n", "--num-devices", "--save", "--cluster", "--html", "--json")
PLAN_FLAGS = ("--debug",)

OF_A_CLUSTER = "A cluster file stands behind --cluster, or behind --emulate of whale run"
NOT_SCRIPTS = {
    ".yaml": OF_A_CLUSTER,
    ".yml": OF_A_CLUSTER,
    ".json": "A saved plan is for whale show, simulate, diff and compare",
}
"""files that may be meant for something else -> what"""
NAMES_OF_OTHERS = {
    "--nproc-per-node": "-n",  # torchrun
    "--nproc_per_node": "-n",
    "--num-processes": "-n",  # accelerate launch
    "--num_processes": "-n",
    "--num_gpus": "-n",  # deepspeed
}
"""what other launchers call an option -> ours"""

ScriptArgument = Annotated[
    Path, typer.Argument(metavar="SCRIPT", help="a training script that calls wh.parallelize")
]
NumDevicesOption = Annotated[
    int | None,
    typer.Option("-n", "--num-devices", help="How many devices. [default: as for whale run]"),
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]
ClusterOption = Annotated[
    Path | None,
    typer.Option(help="A cluster file: hosts, kinds of devices, links (docs/cluster.md)."),
]
OwnArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGUMENTS", help="the script's own arguments, passed on as they are"),
]
HtmlOption = Annotated[
    Path | None, typer.Option(help="Also write a page with pictures to this file.")
]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Also write all predicted figures and the timeline to this file."),
]


def own_options_first(words: Sequence[str]) -> list[str]:
    """`whale plan train.py -n 8 --lr 3` means `whale plan -n 8 train.py --lr 3`: Whale's options
    may also stand right behind the script.

    From the first other word on, everything is the script's; `--` ends Whale's options where the
    script has some of the same name.
    """
    before = _num_own_words(words)
    if before == len(words) or words[before].startswith("-"):
        return list(words)
    script = words[before]
    rest = list(words[before + 1 :])
    after = _num_own_words(rest)
    own = rest[:after]
    passed_on = rest[after:]
    return [
        *words[:before],
        *own,
        script,
        *(passed_on[1:] if passed_on[:1] == ["--"] else passed_on),
    ]


def _num_own_words(words: Sequence[str]) -> int:
    """How many words at the start are options of `whale plan` and their values."""
    place = 0
    while place < len(words):
        word = words[place]
        if word in PLAN_OPTIONS_WITH_VALUE:
            place += 2
        elif word in PLAN_FLAGS or re.fullmatch(
            r"-n\d+|--(num-devices|save|cluster|html|json)=.*", word
        ):
            place += 1
        else:
            break
    return min(place, len(words))


class Spelled(TyperCommand):
    """A command that says what an option it does not know may have been meant for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_misspelt(args, self)
        return super().parse_args(ctx, args)


class WithScript(Spelled):
    """A command whose first argument is a script. Says so where the script was taken for the value
    of an option.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        last_two = args[-2:]
        with_value = {name for each in self.params if takes_value(each) for name in each.opts}
        if len(last_two) == 2 and last_two[0] in with_value and last_two[1].endswith(".py"):
            before = args[:-2]
            has_script = any(word.endswith(".py") for word in before) or "--" in before
            if not has_script:
                option, script = last_two
                stop(
                    f"whale {self.name}: {script} stands where {option} wants its value, so there "
                    f"is no script. Try: whale {self.name} {option} VALUE {script}"
                )
        return super().parse_args(ctx, args)


class OptionsBeforeScript(WithScript):
    """`whale run`: all behind the script is the script's. Says so where a word there may have been
    meant for Whale.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        own = {name for parameter in self.params for name in parameter.opts}
        words = [word.partition("=")[0] for word in ctx.params.get("arguments") or ()]
        if found := [word for word in dict.fromkeys(words) if word.startswith("-") and word in own]:
            stand, go = ("stands", "goes") if len(found) == 1 else ("stand", "go")
            print(
                f"whale {self.name}: {', '.join(found)} {stand} behind the script and {go} to it; "
                f"options of whale {self.name} stand before it",
                file=sys.stderr,
            )
        return rest


class OptionsAroundScript(WithScript):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, own_options_first(args))


def takes_value(parameter: Any) -> bool:
    """Whether this is an option that a value follows."""
    is_option = getattr(parameter, "param_type_name", "") == "option"
    return is_option and not getattr(parameter, "is_flag", False)


def refuse_misspelt(words: Sequence[str], command: TyperCommand) -> None:
    """Refuses the first option before the script that the command does not have."""
    flags = {"--help"}
    with_value: set[str] = set()
    for parameter in command.params:
        if getattr(parameter, "param_type_name", "") == "option":
            names = flags if getattr(parameter, "is_flag", False) else with_value
            names.update(parameter.opts)
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] != "--":
        name, has_value, _ = words[place].partition("=")
        known = name in flags or name in with_value or re.fullmatch(r"-\w.+", name) is not None
        if not known:
            meant = NAMES_OF_OTHERS.get(name)
            own = flags | with_value
            hint = f" Did you mean {meant!r}?" if meant in own else nearest(name, own)
            stop(f"whale {command.name}: there is no option {name}.{hint}")
        place += 2 if name in with_value and not has_value else 1


def passed_on(arguments: Sequence[str]) -> str:
    """A hint where the script was given an option that is nearly one of `whale plan`'s."""
    for word in arguments:
        if word.startswith("--"):
            hint = nearest(word.partition("=")[0], (*PLAN_OPTIONS_WITH_VALUE, *PLAN_FLAGS))
            if hint:
                return f". {word.partition('=')[0]} was passed on to the script.{hint}"
    return ""


def require_script(script: Path, command: str) -> None:
    if not script.is_file():
        what = "is a folder" if script.is_dir() else "no such file"
        stop(f"whale {command}: {script}: {what}; give a Python script")
    if script.suffix in NOT_SCRIPTS:
        stop(f"whale {command}: {script} is no Python script. {NOT_SCRIPTS[script.suffix]}")


def require_folder(path: Path | None, option: str) -> None:
    """Refuses a file that could not be written, before anything is computed for it."""
    if path is not None and not path.absolute().parent.is_dir():
        stop(f"{option} {path}: there is no folder {path.parent}")
    if path is not None and path.is_dir():
        stop(f"{option} {path}: is a folder; give a file")


def stop(message: str, exit_code: int = WRONG_USE) -> NoReturn:
    """Ends the command with one message on stderr."""
    sys.stdout.flush()
    print(message, file=sys.stderr)
    raise typer.Exit(exit_code)
