"""What the error of a rank says about its cause: in a line for the others, and whether another
rank is to blame.
"""

from __future__ import annotations

from whale.devices import BACKENDS

LONGEST_TEXT = 500

FOLLOWING = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    *BACKENDS,
    "is gone or stuck",
)
"""words in the messages of failed communication: the other side is the one to look at"""


def first_line(error: BaseException) -> str:
    """`ValueError: what was wrong`, without the pages that torch's C++ errors add."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "..."


def follows_from_another(error: BaseException) -> bool:
    """Whether communication failed, which is some other rank's fault."""
    import torch.distributed as dist

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError | ConnectionError):
            return True
        if isinstance(seen, RuntimeError) and any(word in str(seen).lower() for word in FOLLOWING):
            return True
        seen = seen.__cause__
    return False
