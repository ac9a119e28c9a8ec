"""Whether the user's optimizer treats every number on its own, found by trying: the same steps on a
matrix and on its two halves.

On a grid each device updates its own part of a parameter. SGD, Adam and their like give the same
numbers then. Adafactor, Shampoo, Muon or LAMB look at rows, columns or the norm of a whole tensor:
on parts they are another optimizer, good or bad, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

MakeOptimizer = Callable[[Iterator[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]

SHAPE = (4, 6)
NUM_STEPS = 3
CLOSE = 1e-9
"""relative: far above rounding in float64, far below what a row's mean changes"""


def note_on_parts(make: MakeOptimizer, name: str) -> str | None:
    """What a user should know of an optimizer that gets parts of parameters, if anything. `name`:
    of one that is cut.
    """
    if works_by_element(make, name) is not False:
        return None
    kind = type(make(iter([(name, torch.nn.Parameter(torch.zeros(SHAPE)))]))).__name__
    return (
        f"{kind} looks at more than one number at a time: where a parameter is cut ({name}, say) "
        "it sees the part of each device and gives "
        "other values than on the whole. SGD, Adam, AdamW and others that treat every number "
        "alone are exact on any grid"
    )


def works_by_element(make: MakeOptimizer, name: str) -> bool | None:
    """None where it could not be tried. `name`: of a parameter of the model, since a factory may
    choose by name.
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
    optimizer = make(iter([(name, parameter)]))
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()
