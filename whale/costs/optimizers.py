"""What is known of the user's own optimizer, found by trying it without the user's weights: how
much memory its state needs, and whether it treats every number on its own.

Its state is measured on parameters without data (`meta`). Optimizers that look at values cannot do
that; they get small parameters instead, each dim of a length that no other dim has, so that the
shape of a state tells which dims of its parameter it has:

    parameter [960, 1024, 21248] -> [2, 3, 5]         state [2, 3, 1] -> [960, 1024, 1]        (1)

On a grid each device updates its own part of a parameter. SGD, Adam and their like give the same
numbers then. Adafactor, Shampoo, Muon or LAMB look at rows, columns or the norm of a whole tensor:
on parts they are another optimizer, good or bad, and the plan says so. This is found by the same
steps on a matrix and on its two halves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch

from whale.capture.graph import CapturedGraph, StateTensor
from whale.compat import OperationCounter, has_step_hooks
from whale.costs.optimizer_factory import (
    BY_PARAMETER,
    EMPTY_LIST,
    NAMES,
    MakeOptimizer,
    make_optimizer,
)
from whale.costs.update_work import UpdateWork

LENGTHS = (2, 3, 5, 7, 11, 13, 17, 19)
"""lengths of the dims of a small parameter"""

SHAPE = (4, 6)
"""shape of the matrix on which the optimizer makes NUM_STEPS steps"""
NUM_STEPS = 3
COUNTED_PARAMETERS = 3
"""parameters whose update is counted, against that of one"""
GRADIENT_SCALES = (1.0, 1e6, 1e-3)
"""of the gradients of steps in which parameters are looked at together"""
MOST_TOGETHER = 24
"""parameters that are looked at together, or somewhat more"""
CLOSE = 1e-9
"""relative: far above rounding in float64, far below what a row's mean changes"""


def state_ratio(captured: CapturedGraph, make: MakeOptimizer) -> float | None:
    """Bytes of optimizer state for each byte of trainable parameters; None where the optimizer runs
    in neither way.
    """
    trained = [state for state in captured.state.values() if state.trainable]
    total = sum(state.num_bytes for state in trained)
    if not total:
        return 0.0
    for device in ("meta", "cpu"):
        try:
            return _state_bytes(trained, make, device) / total
        except Exception:
            # whatever it does with values: only its size was asked for, planning continues without
            continue
    return None


def _state_bytes(trained: Sequence[StateTensor], make: MakeOptimizer, device: str) -> int:
    """Bytes of state after one step: on `meta` with the real shapes, elsewhere with small ones,
    line (1).
    """
    parameters = []
    for state in trained:
        shape = state.shape if device == "meta" else LENGTHS[: len(state.shape)]
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=state.dtype, device=device))
        parameter.grad = torch.ones_like(parameter)
        parameters.append(parameter)
    names = [state.name for state in trained]
    optimizer = make_optimizer(make, zip(names, parameters, strict=True))
    optimizer.step()
    held = 0
    for state, parameter in zip(trained, parameters, strict=True):
        sizes = dict(zip(parameter.shape, state.shape, strict=True))
        for value in optimizer.state.get(parameter, {}).values():
            held += _num_bytes(value, sizes)
    return held


def _num_bytes(value: Any, sizes: dict[int, int]) -> int:
    """Bytes of one entry of the state at real lengths; scalars (the step count) are not worth
    counting. `sizes`: length of a dim -> its real length.
    """
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return 0
    return math.prod(sizes.get(size, size) for size in value.shape) * value.element_size()


def update_work(
    make: MakeOptimizer, names: Sequence[str], is_masked: bool = False
) -> UpdateWork | None:
    """What an update of the user's optimizer launches: its operations are counted in a step on
    small parameters. None where it cannot be tried so.

    torch takes its `foreach` form on an accelerator where the user chose neither, and Whale the
    fused one where an update may be left out (`is_masked`, `runtime/masked_update.py`). `names`: of
    parameters of the model, since a factory may choose by name.
    """
    try:
        one = _counted(make, names[:1], is_masked)
        many = _counted(make, _some(names), is_masked)
    except Exception:  # whatever it needs that is not here: planning continues without
        return None
    one_bytes, one_number, how = one
    many_bytes, many_number, _ = many
    more = COUNTED_PARAMETERS - 1
    operations = (many_number - one_number) / more
    parameter_bytes = 4 * math.prod(SHAPE)
    return UpdateWork(
        passes=(many_bytes - one_bytes) / more / parameter_bytes,
        operations=operations,
        fixed_operations=one_number - operations,
        how=how,
    )


def _some(names: Sequence[str]) -> list[str]:
    """Names for all parameters that are counted; a small model has fewer."""
    return [names[place % len(names)] for place in range(COUNTED_PARAMETERS)]


def _counted(make: MakeOptimizer, names: Sequence[str], is_masked: bool) -> tuple[float, int, str]:
    """(bytes moved, operations, form) of the second step with so many parameters: the first one
    makes the state.
    """
    parameters = [torch.nn.Parameter(torch.ones(SHAPE)) for _ in names]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make_optimizer(make, zip(names, parameters, strict=True))
    how = "for-loop"
    for group in optimizer.param_groups:
        is_open = group.get("foreach") is None and group.get("fused") is None
        if is_open and is_masked and "fused" in group and not group.get("dampening"):
            group["fused"] = True
        elif is_open and "foreach" in group:
            group["foreach"] = True
        if group.get("fused"):
            how = "fused"
        elif group.get("foreach"):
            how = "foreach"
    optimizer.step()
    counter = OperationCounter()
    with counter:
        optimizer.step()
    return counter.moved_bytes, counter.number, how


def note_on_parts(make: MakeOptimizer, name: str) -> str | None:
    """What a user should know of an optimizer that gets parts of parameters; None for one that is
    exact on them. `name`: of a parameter that is cut.
    """
    if works_by_element(make, name) is not False:
        return None
    kind = type(make_optimizer(make, [(name, torch.nn.Parameter(torch.zeros(SHAPE)))])).__name__
    return (
        f"{kind} looks at more than one number at a time: where a parameter is cut ({name}, say) "
        "it sees the part of each device and gives other values than on the whole. SGD, Adam, "
        "AdamW and others that treat every number alone are exact on any grid"
    )


MATRIX_DIMS = 2
"""last dims of a stack of matrices, which are one of them"""


def takes_norms_of_the_whole(make: MakeOptimizer, name: str) -> bool:
    """Whether the optimizer updates a stack of matrices matrix by matrix, but for norms of the
    whole, which holders of parts can sum: torch's Adafactor, one parameter after the other.
    """
    try:
        made = make_optimizer(make, [(name, torch.nn.Parameter(torch.zeros(SHAPE)))])
    except Exception:  # whatever it needs that is not here: it was asked out of curiosity only
        return False
    is_plain = not any(group.get("foreach") for group in made.param_groups)
    return type(made) is torch.optim.Adafactor and is_plain


MOST_TRIED = 100
"""parameters with which an optimizer is tried: a factory may choose by their names"""


def keeps_whole(make: MakeOptimizer, names: Sequence[str]) -> bool:
    """Whether some of these parameters must be updated whole: the optimizer looks at more than one
    number of them at a time, or could not be tried.
    """
    step = max(1, len(names) // MOST_TRIED)
    return any(not works_by_element(make, name) for name in names[::step])


def looks_at_others(make: MakeOptimizer, names: Sequence[str]) -> str | None:
    """What the update of a parameter depends on beside its own values, as the beginning of a
    message; None for an optimizer that treats every parameter by itself, or that could not be
    tried.
    """
    if len(names) < 2:
        return None
    step = max(1, len(names) // MOST_TOGETHER) | 1  # odd: weights and biases take turns
    tried = names[::step]
    try:
        with torch.random.fork_rng(devices=[]):
            together = _Trial(make, tried)
            for part in _parts(tried):
                other = _other_beside(together, _Trial(make, part))
                if other is not None:
                    return other
    except Exception:  # whatever it needs that is not here: it was asked out of curiosity only
        return None
    return None


def _parts(names: Sequence[str]) -> list[list[str]]:
    """Some of these parameters each, as ranks hold them. A group of parameters by name (biases) or
    by layer has members inside and outside of one of them.
    """
    half = len(names) // 2
    thirds = [name for place, name in enumerate(names) if place % 3 == 0]
    return [list(names[:half]), list(names[half:]), thirds]


def _other_beside(whole: _Trial, part: _Trial) -> str | None:
    """How an optimizer of some parameters differs from one of all, in what it does to these."""
    kind = type(whole.optimizer).__name__
    for name in part.names:
        if whole.settings(name) != part.settings(name):
            return (
                f"{kind} looks at other parameters when it is made ({name} has other settings "
                "without those, say: groups by place instead of by name)"
            )
    if whole.is_by_parameter and part.is_by_parameter:
        return None
    for name in part.names:
        together = whole.trained[name]
        if not torch.allclose(together, part.trained[name], CLOSE, CLOSE, equal_nan=True):
            others = [each for each in whole.names if each not in part.names]
            return (
                f"{kind} looks at other parameters when it updates one ({name} beside "
                f"{others[0]}, say)"
            )
    return None


class _Trial:
    """An optimizer of small matrices under names of the model's parameters."""

    def __init__(self, make: MakeOptimizer, names: Sequence[str]) -> None:
        self.names = names
        self._parameters = {
            name: torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64)) for name in names
        }
        self.optimizer: torch.optim.Optimizer | None = None
        try:
            self.optimizer = make_optimizer(make, self._parameters.items())
        except ValueError as error:
            if EMPTY_LIST not in str(error):  # it picks by name, and none of these
                raise

    @property
    def is_by_parameter(self) -> bool:
        """Whether it is known to treat every parameter by itself."""
        made = self.optimizer
        if made is None:
            return True
        return type(made) in BY_PARAMETER and not has_step_hooks(made) and "step" not in vars(made)

    def settings(self, name: str) -> dict[str, str] | None:
        """Settings of the group of a parameter, those that are plain values; None: it has none."""
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            if any(each is self._parameters[name] for each in group["params"]):
                plain = {key: repr(value) for key, value in group.items() if _is_plain(value)}
                plain.pop(NAMES, None)
                return plain
        return None

    @functools.cached_property
    def trained(self) -> dict[str, torch.Tensor]:
        """Values of the parameters after steps with large and small gradients: what clips does so
        from some norm on.
        """
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(_drawn_for(name))
        for scale in GRADIENT_SCALES:
            for name, parameter in self._parameters.items():
                parameter.grad = _drawn_for(f"gradient of {name}").mul_(scale)
            if self.optimizer is not None:
                self.optimizer.step()
        return {name: parameter.detach() for name, parameter in self._parameters.items()}


def _drawn_for(name: str) -> torch.Tensor:
    """Random numbers that are the same in every trial."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str, type(None)))


def works_by_element(make: MakeOptimizer, name: str) -> bool | None:
    """Whether the optimizer treats every number on its own; None where it could not be tried.
    `name`: of a parameter of the model, since a factory may choose by name.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    gradients = [
        torch.randn(SHAPE, generator=generator, dtype=torch.float64) * (1 + step)
        for step in range(NUM_STEPS)
    ]
    try:
        with torch.random.fork_rng(devices=[]):
            whole = _trained(make, name, start, gradients)
            half = SHAPE[0] // 2
            parts = [
                _trained(make, name, start[rows], [g[rows] for g in gradients])
                for rows in (slice(0, half), slice(half, None))
            ]
    except Exception:  # whatever it needs that is not here: it was asked out of curiosity only
        return None
    return bool(torch.allclose(whole, torch.cat(parts), rtol=CLOSE, atol=CLOSE))


def _trained(
    make: MakeOptimizer, name: str, start: torch.Tensor, gradients: list[torch.Tensor]
) -> torch.Tensor:
    parameter = torch.nn.Parameter(start.clone())
    optimizer = make_optimizer(make, [(name, parameter)])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()
