"""What a user may set: `wh.Config({"num_micro_batch": 8})`. Every field has its meaning written
under it; docs are made from these.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import math
import operator
import os
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from whale.names import nearest

if TYPE_CHECKING:
    import torch

MIB = 1024**2

CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": ("1f1b", "gpipe", "interleaved", "wave", "zero-bubble", "auto"),
    "device": ("auto", "cpu", "cuda"),
    "precision": ("default", "bf16", "fp16"),
    "on_nonfinite": ("stop", "skip", "continue"),
    "adapt": ("off", "suggest", "on"),
}
"""the values that a field of text may have"""

SMALLEST: dict[str, int] = {
    "num_micro_batch": 1,
    "num_task_graph": 1,
    "num_waves": 1,
    "seed": 0,
    "max_captures": 1,
    "bucket_bytes": 1,
    "num_posted_receives": 1,
    "keep_checkpoints": 1,
    "adapt_steps": 1,
}
"""the smallest value of a field that counts"""

ABOVE_ZERO = ("clip_grad_norm", "timeout_s", "stall_timeout_s", "adapt_threshold")
"""fields that must be more than 0"""

RUN_FOLDER_VARIABLE = "WHALE_RUN_FOLDER"
"""environment variable that `whale run` sets for scripts that name no run folder"""

CLUSTER_VARIABLE = "WHALE_CLUSTER"
"""environment variable with the cluster file of `whale run --cluster`"""

LARGEST_SEED = 2**63 - 1
"""torch generators take a seed of 64 bits"""


@dataclass(frozen=True, init=False)
class Config:
    """Settings of one training job, checked when they are made and never changed afterwards.

    Takes a dict, keyword arguments, or both: `Config({"num_micro_batch": 8}, seed=1)`.
    """

    num_micro_batch: int = 1
    """Into how many micro-batches the mini-batch is cut. More make a pipeline idle less; each holds
    fewer samples.
    """

    num_task_graph: int | None = None
    """Cuts a model without annotations into this many stages of about the same time. None: the
    annotations decide.
    """

    cluster: str | None = None
    """The cluster file: which devices there are, what they can do, and their links. None: what the
    ranks find under themselves.
    """

    colocate: bool = False
    """Lets all TaskGraphs share the same devices, instead of each having its own."""

    schedule: str = "1f1b"
    """Order of forward and backward in a pipeline. `1f1b` holds few micro-batches in memory,
    `gpipe` runs all forwards first, `interleaved` and `wave` (Hanayo) put several chunks on each
    device, `zero-bubble` fills gaps with weight gradients, `auto` takes what is fastest."""

    num_waves: int | None = None
    """Each wave puts two chunks of the model on every device. None: one wave for `wave` and
    `interleaved`, none for `zero-bubble`, and `auto` chooses. Annotations then say how many devices
    there are; where the chunks are cut is decided by time."""

    recompute: bool | str | list[str] = "auto"
    """Activations that are computed again in backward instead of being kept. `auto`: where memory
    asks for it, as little as possible; True: all; False: none; or names of modules
    (`["transformer.h.*"]`), each a region. `torch.utils.checkpoint` in the model counts besides."""

    keep_gathered: bool | str = "auto"
    """On grids (`split`): whether weights and activations that are gathered in forward are kept for
    backward (True), or gathered again there (False), which takes more messages and less memory.
    `auto`: kept, where memory does not ask for the other."""

    adapt: str = "off"
    """Whether samples move between devices when a device is steadily faster or slower than planned:
    `on` moves them between steps (the mini-batch stays the same), `suggest` only says what it would
    do, `off` measures nothing."""

    adapt_threshold: float = 0.15
    """How far from its planned share of the speed a device may be, as a part of it, before samples
    move.
    """

    adapt_steps: int = 10
    """For how many steps in a row a device must be beyond the threshold. Ranks compare their times
    once in so many steps.
    """

    seed: int = 0
    """Start of all random numbers: initial weights made by Whale, and dropout."""

    loss_per_micro_batch: bool = False
    """Takes the mean of the losses of the micro-batches, for a loss that is no sum over samples.
    This is not the loss of local training.
    """

    clip_grad_norm: float | None = None
    """Scales gradients down when their norm over the whole model is larger than this. None: never.
    """

    max_captures: int = 16
    """How many shapes of the batch (sequence lengths, say) are kept as captured graphs; the one
    unused for longest goes first.
    """

    bucket_bytes: int = 25 * MIB
    """Gradients are summed between devices in pieces of about this many bytes, while the backward
    goes on.
    """

    precision: str = "default"
    """`bf16` or `fp16`: the forward runs under autocast and weights stay as they are; fp16 also
    scales the loss. `default`: no autocast.
    """

    on_nonfinite: str = "stop"
    """What to do with a loss or gradient that is not a finite number: `stop` the job, `skip` the
    step on all ranks, or `continue`.
    """

    timeout_s: float = 20.0
    """A rank from which nothing was heard for so many seconds is taken for dead, and the job ends
    on all ranks with its name.
    """

    stall_timeout_s: float = 1800.0
    """A single message or sum between living ranks may take so many seconds (compiling, loading
    data), then the job ends.
    """

    run_folder: str | None = None
    """Where metrics, traces and checkpoints go. None: no metrics are written; `whale run` sets it
    to `runs/<script>`.
    """

    tensorboard: bool = False
    """Writes the metrics for TensorBoard too (needs the extra `tensorboard`)."""

    keep_checkpoints: int = 3
    """How many checkpoints `engine.save` keeps; older ones are removed when a new one is complete.
    """

    check_capture: bool = True
    """Compares the captured graph once with the model itself (loss and gradients on a few samples)
    when there are real weights.
    """

    check_batches: bool = True
    """Compares a hash of the batch between ranks in the first steps and now and then: all must get
    the same mini-batch.
    """

    device: str = "auto"
    """Where to run: `cuda`, `cpu`, or `auto`, which takes CUDA when it is there."""

    num_posted_receives: int = 8
    """How many messages a rank waits for ahead of time. More hide more latency and hold more
    memory.
    """

    compile: bool = False
    """Chunks run as `torch.compile` makes them, in training. The first step takes longer; CPUs need
    a C++ compiler.
    """

    share_memory: bool = True
    """CPU ranks on one host hand tensors of a pipeline over through memory, instead of through
    gloo.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, /, **options: Any) -> None:
        if values is not None and not isinstance(values, Mapping):
            raise ValueError(
                f"Config takes a dict or keyword arguments, not {values!r} of type "
                f"{type(values).__name__}."
            )
        given = dict(values or {})
        twice = sorted(set(given) & set(options))
        if twice:
            raise ValueError(
                f"Config: {twice[0]!r} is given twice, in the dict and as a keyword argument. "
                "Leave one of them out."
            )
        given |= options
        hints = typing.get_type_hints(type(self))
        for key in given:
            if key not in hints:
                raise ValueError(
                    f"Config has no key {key!r}.{nearest(str(key), hints)} It has: "
                    f"{', '.join(sorted(hints))}."
                )
        for item in fields(self):
            value = (
                _checked(item.name, given[item.name], hints[item.name])
                if item.name in given
                else item.default
            )
            object.__setattr__(self, item.name, value)  # the dataclass is frozen for everyone else

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values; `Config(config.to_dict()) == config`, also through JSON."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed, checked like a new one."""
        return Config(
            {key: value for key, value in self.to_dict().items() if key not in changes}, **changes
        )

    @property
    def folder(self) -> str | None:
        """The run folder that the script named, else the one of `whale run`."""
        return self.run_folder or os.environ.get(RUN_FOLDER_VARIABLE) or None

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype to autocast to."""
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)

    @property
    def dtype(self) -> str:
        """In which matrix products are computed, for the rates of devices; float64 is taken for
        fp32.
        """
        return "fp32" if self.precision == "default" else self.precision

    @property
    def needs_all_gradients(self) -> str | None:
        """What makes the update depend on the loss or the gradient norm of the whole model, as the
        user wrote it; None: nothing.
        """
        if self.precision == "fp16":
            return '"precision": "fp16" scales the loss'
        if self.clip_grad_norm is not None:
            return f'"clip_grad_norm": {self.clip_grad_norm:g} needs the norm of all gradients'
        return (
            f'"on_nonfinite": "{self.on_nonfinite}" looks at loss and gradients first'
            if self.on_nonfinite != "continue"
            else None
        )

    def fingerprint(self) -> str:
        """Hash over all fields, the same in every process: ranks compare it before they start."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _checked(key: str, value: Any, hint: Any) -> Any:
    """The value as the type of its field, or a ValueError that names key and value."""
    if key == "recompute":
        return _checked_recompute(value)
    if key == "keep_gathered":
        if isinstance(value, bool) or value == "auto":
            return value
        raise ValueError(f"Config: 'keep_gathered' must be 'auto', True or False, not {value!r}.")
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and types.NoneType in kinds:
        return None
    kind = next(kind for kind in kinds if kind is not types.NoneType)
    wanted = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}[kind]
    if types.NoneType in kinds:
        wanted += " or None"
    result = _as_kind(value, kind)
    if result is None:
        raise ValueError(
            f"Config: {key!r} must be {wanted}, not {value!r} of type {type(value).__name__}."
        )
    _check_range(key, result)
    return result


def _checked_recompute(value: Any) -> bool | str | list[str]:
    if isinstance(value, bool) or value == "auto":
        return value  # type: ignore[no-any-return]
    if (
        isinstance(value, (list, tuple))
        and value
        and all(isinstance(name, str) and name for name in value)
    ):
        return list(value)
    raise ValueError(
        f"Config: 'recompute' must be 'auto', True, False or a list of module names, not {value!r}."
    )


def _as_kind(value: Any, kind: type) -> bool | int | float | str | None:
    """The value as bool, int, float or str, or None when it is something else: True is no number,
    '8' is no number, 8.0 is not whole.
    """
    if kind in (bool, str):
        return value if isinstance(value, kind) else None
    if isinstance(value, bool):
        return None
    if hasattr(value, "__index__"):  # also the whole numbers of numpy
        return kind(operator.index(value))  # type: ignore[no-any-return]
    return float(value) if kind is float and isinstance(value, float) else None


def _check_range(key: str, value: bool | int | float | str) -> None:
    choices = CHOICES.get(key)
    if choices and value not in choices:
        raise ValueError(
            f"Config: {key!r} must be one of {', '.join(map(repr, choices))}, not "
            f"{value!r}.{nearest(str(value), choices)}"
        )
    if isinstance(value, str):
        return
    if key in SMALLEST and value < SMALLEST[key]:
        raise ValueError(f"Config: {key!r} must be at least {SMALLEST[key]}, not {value!r}.")
    if key == "seed" and value > LARGEST_SEED:
        raise ValueError(f"Config: 'seed' must be at most 2**63 - 1, not {value!r}.")
    if key in ABOVE_ZERO and not 0 < value < math.inf:
        raise ValueError(f"Config: {key!r} must be a finite number above 0, not {value!r}.")


def descriptions() -> dict[str, str]:
    """Name of each field -> the text under it in this file."""
    body = ast.parse(textwrap.dedent(inspect.getsource(Config))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, after in zip(body.body, body.body[1:]):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if (
            isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            found[statement.target.id] = inspect.cleandoc(after.value.value)
    return found


def document() -> str:
    """A Markdown table of all fields: name, type, default, meaning."""
    meaning = descriptions()
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for item in fields(Config):
        kind = str(item.type).replace("|", "or")
        text = " ".join(meaning[item.name].split()).replace("|", "\\|")
        lines.append(f"| `{item.name}` | {kind} | `{item.default!r}` | {text} |")
    return "\n".join(lines) + "\n"
