"""`whale profile`: times the devices and links that are here, and the layers of a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from whale.cli.options import OwnArguments, stop


def profile(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The cluster file to write.")
    ] = Path("cluster.yaml"),
    num_ranks: Annotated[
        int | None,
        typer.Option("-n", "--num-ranks", help="How many ranks. [default: as for whale run]"),
    ] = None,
    device: Annotated[
        str, typer.Option(help='What "device" in a config may be: auto, cpu or an accelerator.')
    ] = "auto",
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="A training script: the layers of its model are timed too, and written beside the "
            "cluster file, which is kept if it is there.",
        ),
    ] = None,
    arguments: OwnArguments = None,
) -> None:
    """Measure the devices and links of this machine, or of all ranks of torchrun, and write a
    cluster file. With --model also the layers of a model.

    On several hosts: torchrun ... -m whale profile -o cluster.yaml
    """
    if not output.absolute().parent.is_dir():
        stop(f"whale profile: -o {output}: there is no folder {output.parent}")
    from whale.devices import device_types  # not at the top: torch takes a while

    if device not in device_types():
        *first, last = device_types()
        may_be = f"{', '.join(first)} or {last}"
        stop(f"whale profile: --device {device}: it may be {may_be}")
    if model is not None and not model.is_file():
        stop(f"whale profile: --model {model}: there is no such script")
    if "RANK" in os.environ:  # under a launcher
        from whale.cli.profile_ranks import profile_model, profile_ranks

        if model is not None:
            profile_model(output, device, model, arguments or [])
        else:
            profile_ranks(output, device)
        return
    from whale import launcher

    if num_ranks is not None and num_ranks < 1:
        stop(f"whale profile: -n {num_ranks}: at least 1 rank is needed")
    script = Path(__file__).parent / "profile_ranks.py"
    words = [str(output), device]
    if model is not None:
        words += [str(model), *(arguments or [])]
    failure = launcher.launch(script, words, num_ranks or launcher.default_num_ranks())
    if failure is not None:
        stop(f"whale profile: {failure}", failure.exit_code)
