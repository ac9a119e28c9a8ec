"""What the user's optimizer factory chose for the parameters of a rank, checked against what it
chooses with all of them.

Every rank calls the factory with the parameters that it updates, some of the model's or parts of
them. A choice by name is the same then. A choice by place (the first ten), by number or by size is
another one, and so are parameters from elsewhere: such weights would train with other settings than
locally, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from whale.capture.graph import StateTensor
from whale.costs.optimizer_factory import NAMES, MakeOptimizer, make_optimizer

NamedParameters = Sequence[tuple[str, torch.nn.Parameter]]
Settings = dict[str, Any]

LEFT_OUT = "left out"
_NO_SETTINGS = ("params", NAMES)
_PLAIN = (bool, int, float, complex, str, type(None))


def settings_of_whole(
    factory: MakeOptimizer, given: NamedParameters, whole: Iterable[StateTensor]
) -> dict[str, Settings] | None:
    """Settings of every parameter, made for all of them without data; None where this rank was
    given all of them anyway, or where the factory asks for values.
    """
    own = {name: torch.empty_like(parameter, device="meta") for name, parameter in given}
    trained: dict[str, Tensor] = {}
    for state in whole:
        if state.trainable or state.name in own:
            trained[state.name] = torch.empty(state.shape, dtype=state.dtype, device="meta")
    trained = {**own, **trained} if own.keys() - trained.keys() else trained
    if [(n, t.shape) for n, t in own.items()] == [(n, t.shape) for n, t in trained.items()]:
        return None
    pairs = [(name, torch.nn.Parameter(empty)) for name, empty in trained.items()]
    try:
        return settings_by_name(make_optimizer(factory, pairs), pairs)
    except Exception:  # whatever it needs that is not here: only its choice was asked for
        return None


def settings_by_name(
    optimizer: torch.optim.Optimizer | None, given: NamedParameters
) -> dict[str, Settings]:
    """Settings of the group of each parameter that the optimizer trains."""
    names = {id(parameter): name for name, parameter in given}
    found = {}
    for group in optimizer.param_groups if optimizer is not None else ():
        settings = {key: value for key, value in group.items() if key not in _NO_SETTINGS}
        for parameter in group["params"]:
            if id(parameter) in names:
                found[names[id(parameter)]] = settings
    return found


def check_groups(
    made: torch.optim.Optimizer | None,
    given: NamedParameters,
    of_whole: dict[str, Settings] | None,
) -> None:
    """Refuses an optimizer of other parameters than those that its factory was given, and one that
    treats them in another way than one of all parameters does (`of_whole`).
    """
    if made is not None:
        _refuse_others(made, given)
    if of_whole is None:
        return
    own = settings_by_name(made, given)
    for name, _ in given:
        difference = other_settings(of_whole.get(name), own.get(name))
        if difference is not None:
            raise ValueError(
                f"the function given as optimizer= treats {name} in another way when it gets the "
                f"parameters of one rank than when it gets all of them: {difference}. Ranks hold "
                "some of the parameters, or parts of them. Try: choose groups by name, not by "
                "place, number or size: [(name, p) for name, p in params if name.endswith('bias')]"
            )


def other_settings(whole: Settings | None, own: Settings | None) -> str | None:
    """The first difference of the settings of a parameter, in words; None: they are alike."""
    if whole is None or own is None:
        if whole is own:
            return None
        return f"{_named(own)} instead of {_named(whole)}"
    for key, value in whole.items():
        if key not in own or not _is_alike(value, own[key]):
            return f"{key} {own.get(key, LEFT_OUT)} instead of {value}"
    return None


def _named(settings: Settings | None) -> str:
    return LEFT_OUT if settings is None else "trained"


def _is_alike(one: Any, other: Any) -> bool:
    """Whether two values of a setting are the same; objects of other kinds count as such."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.device != other.device or torch.equal(one, other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_alike, one, other))
    if isinstance(one, _PLAIN) and isinstance(other, _PLAIN):
        return bool(one == other)
    return True


def _refuse_others(made: torch.optim.Optimizer, given: NamedParameters) -> None:
    known = {id(parameter) for _, parameter in given}
    for group in made.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                kind = type(made).__name__
                raise ValueError(
                    f"the function given as optimizer= made a {kind} with a parameter of shape "
                    f"{list(parameter.shape)} that it was not given: such weights would never "
                    "change, since a rank trains tensors of its own in place of those of the "
                    "model. Try: pass on what the function gets: optimizer=lambda params: "
                    f"torch.optim.{kind}(params, lr=...)"
                )
