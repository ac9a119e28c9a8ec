"""The two words of the API, `replicate` and `split`, and where they were said."""

from whale.annotation.marks import Mark, annotate, mark_of_module, marks_by_module
from whale.annotation.scopes import (
    Scope,
    Strategy,
    collect_forward_marks,
    default_strategy,
    replicate,
    set_default_strategy,
    split,
)

__all__ = [
    "Mark",
    "Scope",
    "Strategy",
    "annotate",
    "collect_forward_marks",
    "default_strategy",
    "mark_of_module",
    "marks_by_module",
    "replicate",
    "set_default_strategy",
    "split",
]
