"""How many random cases a property test tries: a part in `make test`, all of them in `make
test-all`.
"""

from __future__ import annotations

import os

IS_THOROUGH = bool(os.environ.get("WHALE_THOROUGH"))


def many(count: int) -> int:
    """The number of cases that take no time: a tenth, and at least 100."""
    return count if IS_THOROUGH else max(100, count // 10)


def slow_cases(count: int) -> int:
    """The number of cases that take a good part of a second each, such as a capture: a third."""
    return count if IS_THOROUGH else count // 3
