"""Numbers that stand for symbolic sizes inside of libraries that compute with plain integers.

einx turns `b (g k)` and the shapes of tensors into Python code: it hashes shapes, solves equations
over them and writes sizes into that code as literals. A symbol can do none of this. While such a
model is exported, each symbol is a large prime for these libraries, and what they compute from
sizes (`6 * b` as `6 * 1000003`) is turned back when torch gets it:

    size -> expression at the primes          `number_of`, instead of `int(size)` in their files
    number -> the size that was given out,    `torch.reshape(x, (6 * 1000003, 2))` reshapes to
    or a multiple of one                      `(6 * b, 2)`
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from whale.compat import at_numbers

PRIMES = (1_000_003, 1_000_033, 1_000_037, 1_000_039, 1_000_081, 1_000_099, 1_000_117, 1_000_121)
"""one for each symbol: the samples, and lengths that vary; no size or seed is a multiple of one"""


class SizeNumbers(TorchFunctionMode):
    """Gives out numbers for sizes, and turns them back in the arguments of every call of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.primes: dict[str, int] = {}
        self.sizes: dict[int, torch.SymInt] = {}
        """number that was given out -> its size"""

    def number_of(self, value: Any = 0, *args: Any) -> int:
        """`int` for the files of a library."""
        if not isinstance(value, torch.SymInt):
            return builtins.int(value, *args)
        number = at_numbers(value, self._prime)
        self.sizes[number] = value
        return number

    def _prime(self, symbol: str) -> int:
        if symbol not in self.primes:
            self.primes[symbol] = PRIMES[len(self.primes)]
        return self.primes[symbol]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not self.sizes:
            return func(*args, **(kwargs or {}))
        given = {name: self._sized(value) for name, value in (kwargs or {}).items()}
        return func(*(self._sized(each) for each in args), **given)

    def _sized(self, value: Any) -> Any:
        """An argument with sizes in place of their numbers."""
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            return type(value)(map(self._sized, value))
        if type(value) is not builtins.int or value < PRIMES[0]:
            return value
        for number, size in self.sizes.items():
            if value % number == 0 and number >= PRIMES[0]:
                return size * self._sized(value // number)
        return value
