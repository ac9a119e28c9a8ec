"""The file in which a rank writes down for torch's elastic launcher why it ends.

Torch's own record has seconds, too coarse to distinguish the rank that failed from those that
noticed; ours has nanoseconds besides.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "TORCHELASTIC_ERROR_FILE"


def error_file() -> Path | None:
    """This rank's error file; None where no launcher asked for one."""
    path = os.environ.get(VARIABLE)
    return None if path is None else Path(path)


def write_error(file: Path, text: str, more: Mapping[str, Any] | None = None) -> None:
    """Writes an error in the form that torch's launcher reads. `more`: for our own launcher."""
    now = time.time_ns()
    record = {
        "message": {"message": text, "extraInfo": {"timestamp": str(now // 10**9)}},
        "time_ns": now,
        **(more or {}),
    }
    file.write_text(json.dumps(record))
