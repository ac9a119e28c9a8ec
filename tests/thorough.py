"""How many random cases a property test tries: a tenth in `make test`, all of them in `make test-all`."""

from __future__ import annotations

import os


def many(count: int) -> int:
    return count if os.environ.get("WHALE_THOROUGH") else max(100, count // 10)
