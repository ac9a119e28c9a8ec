"""What a user may set: `wh.Config({"num_micro_batch": 8})`. Every field has its meaning written
under it: `whale config` prints these texts.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
)

from whale.config_values import (
    LARGEST_SEED,
    AboveZero,
    Compile,
    Count,
    CountOrAuto,
    DeviceType,
    KeepGathered,
    OffloadSetting,
    RecomputeSetting,
    Replicas,
    ScheduleName,
    Seed,
    Switch,
    Values,
    Whole,
    Words,
    ZeroLevel,
)
from whale.names import current_names, nearest

if TYPE_CHECKING:
    import torch
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

MIB = 1024**2

RUN_FOLDER_VARIABLE = "WHALE_RUN_FOLDER"
"""environment variable that `whale run` sets for scripts that name no run folder"""

CLUSTER_VARIABLE = "WHALE_CLUSTER"
"""environment variable with the cluster file of `whale run --cluster`"""

RENAMED_KEYS: dict[str, str] = {}
"""old key -> the key that replaced it; both are taken, and the old one says so once"""


class Config(BaseModel):
    """Settings of one training job, checked when they are made and never changed afterwards.

    Takes a dict, keyword arguments, or both: `Config({"num_micro_batch": 8}, seed=1)`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    strategy: Literal["auto", "data"] | None = None
    """`auto`: Whale chooses what is not set (stages, their devices, micro-batches, schedule) and
    takes the fastest plan that it finds; `data`: plain data parallelism. None: `auto` for a model
    without annotations and without `num_task_graph`, else what these say."""

    num_micro_batch: CountOrAuto = 1
    """Into how many micro-batches the mini-batch is cut. More make a pipeline idle less; each holds
    fewer samples. `auto`: chosen; so is it where no number is given and `strategy` is `auto`, or
    `num_task_graph` is set (but for equal CPUs).
    """

    num_task_graph: CountOrAuto | None = None
    """Cuts a model without annotations into this many stages of about the same time. None: the
    annotations decide. `auto`: chosen.
    """

    replicas: Replicas = None
    """Model replicas one by one, alike or not: `{"stages": [[0]]}` is the whole model on rank 0,
    `{"stages": [[1], [2, 3]], "samples": 8, "num_micro_batch": 4}` a pipeline of two stages for 8
    samples of the mini-batch. Not given: samples by speed, cuts by time. A stage may be
    `{"ranks": [2, 3], "start": "h.6", "split": true}`. None: replicas are alike.
    """

    cluster: Words | None = None
    """The cluster file: which devices there are, what they can do, and their links. None: what the
    ranks find under themselves.
    """

    colocate: Switch = False
    """Lets all TaskGraphs share the same devices, instead of each having its own."""

    schedule: ScheduleName = "1f1b"
    """Order of forward and backward in a pipeline. `1f1b` holds few micro-batches in memory,
    `gpipe` runs all forwards first, `interleaved` and `wave` (Hanayo) put several chunks on each
    device, `zero-bubble` fills gaps with weight gradients, `auto` takes what is fastest."""

    num_waves: Count | None = None
    """Each wave puts two chunks of the model on every device. None: one wave for `wave` and
    `interleaved`, none for `zero-bubble`, and `auto` chooses. Annotations then say how many devices
    there are; where the chunks are cut is decided by time."""

    recompute: RecomputeSetting = "auto"
    """Activations that are recomputed in backward instead of being saved. `auto`: where memory
    asks for it, as little as possible; True: all; False: none; or names of modules
    (`["transformer.h.*"]`), each a region. `torch.utils.checkpoint` in the model counts besides."""

    keep_gathered: KeepGathered = "auto"
    """On grids (`split`): whether weights and activations that are gathered in forward are saved
    for backward (True), or gathered again there (False), which takes more messages and less memory.
    `auto`: saved, where memory does not ask for the other."""

    zero: ZeroLevel = 0
    """What ranks that would hold the same parameters share instead, each a part as large as its
    memory allows: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too, which are then
    gathered layer by layer before they are used. `auto`: the least that fits. Results are the
    same."""

    offload: OffloadSetting = "auto"
    """Where optimizer states, weights, gradients and activations are at home: `{"optimizer":
    "host", "activations": "disk"}`; "device" for what is not named. `auto`: on the device, and
    where nothing fits that way in the memories that the cluster file has beside it. False: on the
    device. Results are the same.
    """

    optimizer_state: Literal["fp32", "bf16", "int8"] = "fp32"
    """How optimizer states of the size of their parameter are held between steps. `fp32`: as the
    optimizer makes them. `bf16` and `int8` (with a scale for each block of 256 numbers) take a half
    and a quarter of that, and round: results are not those of local training."""

    adapt: Literal["off", "suggest", "on"] = "off"
    """Whether samples move between devices when a device is steadily faster or slower than planned:
    `on` moves them between steps (the mini-batch stays the same), `suggest` only says what it would
    do, `off` measures nothing."""

    adapt_threshold: AboveZero = 0.15
    """How far from its planned share of the speed a device may be, as a part of it, before samples
    move.
    """

    adapt_steps: Count = 10
    """For how many steps in a row a device must be beyond the threshold. Ranks compare their times
    once in so many steps.
    """

    seed: Seed = 0
    """Start of all random numbers: initial weights made by Whale, and dropout."""

    loss_per_micro_batch: Switch = False
    """Takes the mean of the losses of the micro-batches, for a loss that is no sum over samples.
    This is not the loss of local training.
    """

    clip_grad_norm: AboveZero | None = None
    """Scales gradients down when their norm over the whole model is larger than this. None: never.
    """

    max_captures: Count = 16
    """How many shapes of the batch (sequence lengths, say) are held as captured graphs; the one
    unused for longest goes first.
    """

    capture_cache: Words | None = None
    """Folder in which captured graphs are kept, so that the same model with the same batch is not
    captured again by the next run. It must belong to you and be closed to others. None: no cache.
    """

    bucket_bytes: Count = 25 * MIB
    """Gradients are all-reduced in buckets of about this many bytes, while the backward continues.
    """

    precision: Literal["default", "bf16", "fp16"] = "default"
    """`bf16` or `fp16`: the forward runs under autocast and weights stay as they are; fp16 also
    scales the loss. `default`: no autocast.
    """

    on_nonfinite: Literal["stop", "skip", "continue"] = "stop"
    """What to do with a loss or gradient that is not a finite number: `stop` the job, `skip` the
    step on all ranks, or `continue`.
    """

    timeout_s: AboveZero = 20.0
    """A rank from which nothing was heard for so many seconds is taken for dead, and the job ends
    on all ranks with its name.
    """

    stall_timeout_s: AboveZero = 1800.0
    """A single message or all-reduce between living ranks may take so many seconds (compiling,
    loading data), then the job ends.
    """

    run_folder: Words | None = None
    """Where metrics, traces and checkpoints go. None: no metrics are written; `whale run` sets it
    to `runs/<script>`.
    """

    num_steps: Count | None = None
    """How many steps the script will make, for the time left in the progress line of `whale run`.
    None: not known. It ends nothing.
    """

    tensorboard: Switch = False
    """Writes the metrics for TensorBoard too (needs the extra `tensorboard`)."""

    keep_checkpoints: Count = 3
    """How many checkpoints `engine.save` keeps; older ones are removed when a new one is complete.
    """

    check_capture: Switch = True
    """Compares the captured graph once with the model itself (loss and gradients on a few samples)
    when there are real weights.
    """

    check_batches: Switch = True
    """Compares a hash of the batch between ranks in the first steps and now and then: all must get
    the same mini-batch.
    """

    check_replicas: Annotated[Whole, Field(ge=0)] = 100
    """Every so many steps, and at the start, holders of the same weights compare a hash of them:
    rounding is made good and logged, more ends the job. 0: never. A check reads all weights once
    (about 9 launches for each parameter on an accelerator), all-reduces a few numbers, and is
    looked at a step later, so that nobody waits for it.
    """

    device: DeviceType = "auto"
    """Where to run: `cpu`, the name that torch has for an accelerator, or `auto`, which takes one
    when it is there.
    """

    num_posted_receives: Count = 8
    """How many messages a rank waits for ahead of time. More hide more latency and hold more
    memory.
    """

    compile: Compile = False
    """Chunks run as `torch.compile` makes them, in training. The first steps take longer; CPUs need
    a C++ compiler. `reduce-overhead`: and a GPU replays the launches of a chunk at once (as a
    graph), for small kernels and batches of one shape; memory of a chunk is then its own. It has
    never run on a GPU here.
    """

    share_memory: Switch = True
    """CPU ranks on one host hand tensors of a pipeline over through memory, instead of through
    gloo.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, /, **options: Any) -> None:
        if values is not None and not isinstance(values, Mapping):
            raise ValueError(
                f"Config takes a dict or keyword arguments, not {values!r} of type "
                f"{type(values).__name__}."
            )
        in_dict = current_names(values or {}, RENAMED_KEYS, "Config")
        as_keywords = current_names(options, RENAMED_KEYS, "Config")
        twice = sorted(set(in_dict) & set(as_keywords))
        if twice:
            raise ValueError(
                f"Config: {twice[0]!r} is given twice, in the dict and as a keyword argument. "
                "Leave one of them out."
            )
        given = in_dict | as_keywords
        known = type(self).model_fields
        for key in given:
            if key not in known:
                raise ValueError(
                    f"Config has no key {key!r}.{nearest(str(key), known)} It has: "
                    f"{', '.join(sorted(known))}."
                )
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise ValueError(_message(error.errors()[0])) from None

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values; `Config(config.to_dict()) == config`, also through JSON."""
        return self.model_dump()

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed, checked like a new one."""
        given = {key: value for key, value in self.to_dict().items() if self.is_given(key)}
        return Config({**given, **current_names(changes, RENAMED_KEYS, "Config")})

    def is_given(self, key: str) -> bool:
        """Whether the user gave this setting, with whatever value: what is not given may be
        chosen.
        """
        return key in self.model_fields_set

    @property
    def folder(self) -> str | None:
        """The run folder that the script named, else the one of `whale run`."""
        return self.run_folder or os.environ.get(RUN_FOLDER_VARIABLE) or None

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype to autocast to; None: no autocast."""
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)

    @property
    def dtype(self) -> str:
        """The dtype whose rate counts for matrix products: a key of `DeviceKind.rate`. float64 is
        taken for fp32.
        """
        return "fp32" if self.precision == "default" else self.precision

    @property
    def needs_all_gradients(self) -> str | None:
        """The setting, as the user wrote it, that makes the update depend on the loss or the
        gradient norm of the whole model; None: there is none.
        """
        if self.precision == "fp16":
            return '"precision": "fp16" scales the loss'
        if self.clip_grad_norm is not None:
            return f'"clip_grad_norm": {self.clip_grad_norm:g} needs the norm of all gradients'
        if self.on_nonfinite != "continue":
            return f'"on_nonfinite": "{self.on_nonfinite}" looks at loss and gradients first'
        return None


def _message(error: ErrorDetails) -> str:
    """What pydantic found, as a sentence with the key and the value that the user typed."""
    key = str(error["loc"][0])
    value = error["input"]
    context = error.get("ctx", {})
    must_be = f"Config: {key!r} must be"
    field = Config.model_fields[key]
    match error["type"]:
        case "literal_error":
            choices = _choices(field.annotation)
            offers = ", ".join(map(repr, choices))
            return f"{must_be} one of {offers}, not {value!r}.{nearest(str(value), choices)}"
        case "greater_than_equal":
            return f"{must_be} at least {context['ge']}, not {value!r}."
        case "less_than_equal":
            limit = "2**63 - 1" if context["le"] == LARGEST_SEED else context["le"]
            return f"{must_be} at most {limit}, not {value!r}."
        case "greater_than" | "finite_number":
            return f"{must_be} a finite number above 0, not {value!r}."
        case "value_error":  # `config_values.py` says what the value may be
            return f"{must_be} {context['error']}, not {value!r}."
    wanted = {
        "bool_type": "True or False",
        "int_type": "a whole number",
        "float_type": "a number",
        "string_type": "text",
    }[error["type"]]
    if types.NoneType in get_args(field.annotation):
        wanted += " or None"
    return f"{must_be} {wanted}, not {value!r} of type {type(value).__name__}."


def _choices(annotation: Any) -> tuple[str, ...]:
    """The words that a field may be, also where it may be something else besides."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    found: list[str] = []
    for part in get_args(annotation):
        found.extend(_choices(part))
    return tuple(found)


def value_words(field: FieldInfo) -> str:
    """What a field may be, as a user reads it: `int, "auto" or None`, without limits."""
    *others, last = _words_of(field.annotation, field.metadata)
    return f"{', '.join(others)} or {last}" if others else last


def _words_of(annotation: Any, metadata: Iterable[Any] = ()) -> list[str]:
    for each in metadata:
        if isinstance(each, Values):
            return list(each.words)
    if annotation is types.NoneType:
        return ["None"]
    inside = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _words_of(inside[0], inside[1:])
    if get_origin(annotation) is Literal:
        return [f'"{word}"' for word in inside]
    if not inside:
        return [annotation.__name__]
    return [word for part in inside for word in _words_of(part)]  # of a union


def rows() -> list[tuple[str, str, str, str]]:
    """(key, values, default, meaning) of every field, as text."""
    return [
        (
            key,
            value_words(field),
            repr(field.default),
            " ".join((field.description or "").split()),
        )
        for key, field in Config.model_fields.items()
    ]


def document() -> str:
    """A Markdown table of all fields: key, values, default, meaning."""
    lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for key, values, default, meaning in rows():
        meaning = meaning.replace("|", "\\|")
        lines.append(f"| `{key}` | {values} | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"
