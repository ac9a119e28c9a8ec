"""Calls the function that makes the user's optimizer, and what is known of the classes that it may
give.

It gets (name, parameter) pairs, those that one rank trains. A group by name, of all biases say, may
have no member there. torch takes an empty group for one without names and refuses it beside groups
with names; here it counts as whatever the others are, so that every rank has the same groups and
LR schedulers fit all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from whale.compat import patched

MakeOptimizer = Callable[[Iterator[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]

NAMES = "param_names"
"""key of a group that has the names of its parameters"""
EMPTY_LIST = "empty parameter list"
"""part of what torch says of an optimizer without parameters"""
BY_PARAMETER: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    }
)
"""optimizers whose step for a parameter depends on its own gradient and state only"""


def make_optimizer(
    make: MakeOptimizer, pairs: Iterable[tuple[str, torch.nn.Parameter]]
) -> torch.optim.Optimizer:
    """The user's optimizer for these parameters."""
    add_group = torch.optim.Optimizer.add_param_group

    def add(self: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        if isinstance(group, dict) and "params" in group:
            _name_empty_groups(self.param_groups, group)
        add_group(self, group)

    with patched(torch.optim.Optimizer, "add_param_group", add):
        return make(iter(list(pairs)))


def knowing_attributes(make: MakeOptimizer | None, model: torch.nn.Module) -> MakeOptimizer | None:
    """The same function, for parameters that have what the script has written on those of the model
    (`parameter._no_weight_decay = True`), by which it may choose groups: the tensors that a rank
    trains, and those with which an optimizer is tried, are others.
    """
    attributes = {name: dict(vars(each)) for name, each in model.named_parameters() if vars(each)}
    if make is None or not attributes:
        return make
    return lambda pairs: make(iter(_with_attributes(pairs, attributes)))


def _with_attributes(
    pairs: Iterable[tuple[str, torch.nn.Parameter]], attributes: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, torch.nn.Parameter]]:
    given = list(pairs)
    for name, parameter in given:
        for key, value in attributes.get(name, {}).items():
            vars(parameter).setdefault(key, value)
    return given


def _name_empty_groups(known: list[dict[str, Any]], group: dict[str, Any]) -> None:
    """Gives empty groups names where the others have them: this one, or those before it."""
    if isinstance(group["params"], (torch.Tensor, set)):
        return  # one parameter, or what torch refuses by name
    group["params"] = list(group["params"])
    if not group["params"]:
        if any(NAMES in each for each in known):
            group[NAMES] = []
        return
    if isinstance(group["params"][0], tuple):
        for each in known:
            if not each["params"]:
                each[NAMES] = []
