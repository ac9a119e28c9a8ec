"""What training needs besides weights: optimizer and LR scheduler by parameter name, so that any
plan can load what any other plan saved, and the random number generators of this process.

A torch optimizer numbers its parameters; here every state tensor has a name of its own,
`optimizer/<parameter>/<key>`, and everything that is not a tensor goes to the values:

    {"groups": [{"position": 0, "names": ["wte.weight", ...], "options": {"lr": 0.1, ...}}],
     "state": {"wte.weight": {"tensors": ["step", "exp_avg", "exp_avg_sq"], "values": {}}},
     "extra": {}}

Each rank packs what it writes; `merge_values` unites the ranks' values. When loading, a group takes
its options from the saved group that held its parameters. The generators of torch (CPU and GPU),
numpy and Python are tensors and numbers too: nothing is ever pickled.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whale.checkpoint.errors import CheckpointError
from whale.checkpoint.format import encode
from whale.devices import ACCELERATORS, find_device, used_accelerator

PREFIX = "optimizer/"
NOT_OPTIONS = ("params", "param_names")
GROUP_LISTS = {"base_lrs": "initial_lr", "_last_lr": "lr"}
"""lists of a scheduler with one number for each group, and where the group itself has that number
"""

Parameter = torch.nn.Parameter | Tensor


def state_name(parameter: str, key: str) -> str:
    return f"{PREFIX}{parameter}/{key}"


def parameter_name(name: str) -> str:
    """Name of the parameter that a state tensor belongs to."""
    return name.removeprefix(PREFIX).rpartition("/")[0]


def pack_optimizer(
    optimizer: torch.optim.Optimizer,
    names_of: Mapping[Parameter, str],
    only: Collection[str] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, values) of the optimizer. `only`: names of the parameters that this rank writes,
    when other ranks hold some of them too.
    """
    packed = optimizer.state_dict()
    kind = type(optimizer).__name__
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {"kind": kind, "groups": [], "state": {}, "extra": {}}
    for position, group in enumerate(packed["param_groups"]):
        options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        encode(options, f"group {position} of {kind}")  # refuses what cannot be saved, by its name
        names = []
        for number, parameter in zip(
            group["params"], optimizer.param_groups[position]["params"], strict=True
        ):
            name = _name_of(parameter, names_of, kind)
            if only is not None and name not in only:
                continue
            names.append(name)
            if number in packed["state"]:
                values["state"][name] = _pack_state(name, packed["state"][number], kind, tensors)
        if names:
            values["groups"].append({"position": position, "names": names, "options": options})
    shared = {key: value for key, value in packed["state"].items() if not isinstance(key, int)}
    values["extra"] = {
        key: value for key, value in packed.items() if key not in ("state", "param_groups")
    }
    encode({"state": shared, **values["extra"]}, f"the state of {kind}")
    values["shared"] = shared
    return tensors, values


def merge_values(values: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    """The values of all ranks' optimizers as one. None: a rank without parameters."""
    merged: dict[str, Any] = {}
    for one in values:
        if not one:
            continue
        if not merged:
            merged = {
                "kind": one["kind"],
                "groups": [],
                "state": {},
                "extra": one["extra"],
                "shared": one["shared"],
            }
        if one["kind"] != merged["kind"]:
            raise CheckpointError(
                f"one rank saved the optimizer {merged['kind']}, another {one['kind']}"
            )
        merged["groups"].extend(one["groups"])
        merged["state"].update(one["state"])
    return merged


def unpack_optimizer(
    optimizer: torch.optim.Optimizer,
    names_of: Mapping[Parameter, str],
    read: Callable[[str], Tensor],
    values: Mapping[str, Any],
    portions: Iterable[Collection[Parameter]] = (),
) -> None:
    """Loads merged values and the tensors that `read(name)` gives.

    `portions`: parameters whose states do not stay with the optimizer. It has those of a portion
    when the next one is asked for, and never those of two. Of all others everything is read before
    the optimizer changes.
    """
    kind = type(optimizer).__name__
    if values.get("kind") != kind:
        raise CheckpointError(
            f"the checkpoint holds the state of {values.get('kind') or 'no optimizer'}, this job "
            f"uses {kind}"
        )
    packed = optimizer.state_dict()
    del packed["state"]  # or the old states would stay until the new ones are there
    options_of: dict[str, dict[str, Any]] = {}
    for saved_group in values["groups"]:
        options_of |= dict.fromkeys(saved_group["names"], saved_group["options"])
    by_position = {group["position"]: group["options"] for group in reversed(values["groups"])}
    groups = []
    numbers: dict[Parameter, int] = {}
    for position, group in enumerate(packed["param_groups"]):
        parameters = optimizer.param_groups[position]["params"]
        names = [_name_of(parameter, names_of, kind) for parameter in parameters]
        saved = _options(names, options_of, position) if names else by_position.get(position, {})
        groups.append({**group, **saved})
        numbers |= zip(parameters, group["params"], strict=True)

    def load(parameters: Iterable[Parameter]) -> None:
        state: dict[Any, dict[str, Any]] = dict(values["shared"])
        for parameter in parameters:
            name = names_of[parameter]
            if name in values["state"]:
                found = values["state"][name]
                tensors = {key: read(state_name(name, key)) for key in found["tensors"]}
                state[numbers[parameter]] = {**tensors, **found["values"]}
        optimizer.state.clear()
        optimizer.load_state_dict(
            {**packed, **values["extra"], "state": state, "param_groups": groups}
        )

    left: dict[Parameter, dict[str, Any]] = {}
    """what the optimizer keeps of the portions: its counters"""
    for portion in portions:
        load(portion)
        left |= optimizer.state
    load(parameter for parameter in numbers if parameter not in left)
    optimizer.state.update(left)


def pack_scheduler(scheduler: Any) -> dict[str, Any]:
    """The scheduler's state; what a checkpoint cannot hold is refused by its name."""
    state: dict[str, Any] = scheduler.state_dict()
    encode(state, f"the state of {type(scheduler).__name__}")
    return {"kind": type(scheduler).__name__, "state": state}


def unpack_scheduler(
    scheduler: Any, values: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> None:
    """Loads the scheduler's state, after `unpack_optimizer`: this rank's optimizer may have another
    number of groups than the one that was saved.
    """
    kind = type(scheduler).__name__
    if values.get("kind") != kind:
        raise CheckpointError(
            f"the checkpoint holds the state of {values.get('kind') or 'no scheduler'}, this job "
            f"uses {kind}"
        )
    scheduler.load_state_dict(_fit(values["state"], scheduler.state_dict(), optimizer, kind))


def _fit(saved: Any, current: Any, optimizer: torch.optim.Optimizer, where: str) -> Any:
    """`saved` with its lists that have one number for each group made for this optimizer's
    groups.
    """
    if isinstance(saved, dict) and isinstance(current, dict):
        num_groups = len(optimizer.param_groups)
        fitted = {}
        for key, value in saved.items():
            other = current.get(key)
            if key in GROUP_LISTS and isinstance(value, list) and len(value) != num_groups:
                fitted[key] = [
                    group.get(GROUP_LISTS[key], group["lr"]) for group in optimizer.param_groups
                ]
            elif (
                isinstance(value, list)
                and isinstance(other, list)
                and len(value) != len(other) == num_groups
            ):
                raise CheckpointError(
                    f"{where}.{key} has {len(value)} numbers, one for each group, but here are "
                    f"{num_groups} groups"
                )
            else:
                fitted[key] = _fit(value, other, optimizer, f"{where}.{key}")
        return fitted
    if isinstance(saved, list) and isinstance(current, list) and len(saved) == len(current):
        return [
            _fit(*pair, optimizer, f"{where}[{place}]")
            for place, pair in enumerate(zip(saved, current, strict=True))
        ]
    return saved


def _pack_state(
    name: str, state: Mapping[str, Any], kind: str, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    own = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    rest = {key: value for key, value in state.items() if key not in own}
    encode(rest, f"the state of {kind} for {name}")
    tensors.update({state_name(name, key): value for key, value in own.items()})
    return {"tensors": list(own), "values": rest}


def _options(
    names: list[str], options_of: Mapping[str, dict[str, Any]], position: int
) -> dict[str, Any]:
    missing = [name for name in names if name not in options_of]
    if missing:
        raise CheckpointError(
            f"the checkpoint has no optimizer state for {len(missing)} parameters, the first are "
            f"{', '.join(missing[:3])}: it was saved from another model, or these were frozen then"
        )
    chosen = options_of[names[0]]
    for name in names:
        if options_of[name] != chosen:
            different = [key for key in chosen if options_of[name].get(key) != chosen[key]]
            raise CheckpointError(
                f"{names[0]} and {name} are both in group {position} now, but were saved in groups "
                f"with different {', '.join(different)}. Make the same groups as when it was saved"
            )
    return chosen


def _name_of(parameter: Parameter, names_of: Mapping[Parameter, str], kind: str) -> str:
    if parameter not in names_of:
        raise CheckpointError(
            f"{kind} holds a parameter of shape {list(parameter.shape)} that is not one of the "
            "model's: give it the model's own"
        )
    return names_of[parameter]


# ---- random number generators

NUMPY_GENERATOR = "MT19937"  # the only one behind `np.random.seed`
NUM_WORDS = 624  # of its state


def pack_rng(prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, values). Their names start with `prefix`, for example `rng/3/`."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    if name != NUMPY_GENERATOR:
        raise CheckpointError(
            f"numpy's global generator is {name}, only {NUMPY_GENERATOR} can be saved: do not "
            "call np.random.set_bit_generator"
        )
    tensors = {
        f"{prefix}torch": torch.get_rng_state(),
        f"{prefix}python": torch.tensor(words, dtype=torch.int64),
        f"{prefix}numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
    }
    accelerator = used_accelerator()
    if accelerator is not None:  # a rank uses one device, the current one
        tensors[prefix + accelerator.type] = accelerator.random_states()[1]
    values: dict[str, Any] = {
        "python": {"version": version, "gauss": gauss},
        "numpy": {"position": int(position), "has_gauss": int(has_gauss), "cached": float(cached)},
        **{kind.type: False for kind in ACCELERATORS},
    }
    if accelerator is not None:
        values[accelerator.type] = True
    return tensors, values


def unpack_rng(prefix: str, read: Callable[[str], Tensor], values: Mapping[str, Any]) -> None:
    """Sets all generators to the saved state. Everything is read and checked before the first one
    changes.
    """
    try:
        python = (
            int(values["python"]["version"]),
            tuple(_words(read(f"{prefix}python"), NUM_WORDS + 1)),
            values["python"]["gauss"],
        )
        saved = values["numpy"]
        words = np.array(_words(read(f"{prefix}numpy"), NUM_WORDS), dtype=np.uint32)
        # numpy does not look, and would read beyond the end of its memory
        if not 0 <= int(saved["position"]) <= NUM_WORDS:
            raise ValueError(f"numpy's position is {saved['position']}, not 0 to {NUM_WORDS}")
        numpy = (
            NUMPY_GENERATOR,
            words,
            int(saved["position"]),
            int(saved["has_gauss"]),
            float(saved["cached"]),
        )
        own = read(f"{prefix}torch")
        accelerator = used_accelerator() or find_device()
        has_state = accelerator.is_accelerator and values.get(accelerator.type, False)
        of_accelerator = read(prefix + accelerator.type) if has_state else None
        torch.Generator().set_state(own)  # each of these refuses a state that is none
        random.Random().setstate(python)
        np.random.RandomState(0).set_state(numpy)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"the random number state {prefix}* of the checkpoint is not one: {error}"
        ) from None
    random.setstate(python)
    np.random.set_state(numpy)
    if of_accelerator is not None:
        accelerator.set_random_states([own, of_accelerator])
    else:
        torch.set_rng_state(own)


def _words(tensor: Tensor, count: int) -> list[int]:
    words: list[int] = tensor.tolist()
    if tensor.dim() != 1 or len(words) != count or any(not 0 <= word < 1 << 32 for word in words):
        raise ValueError(
            f"{count} numbers of 32 bits were expected, got a tensor of shape {list(tensor.shape)}"
        )
    return words
