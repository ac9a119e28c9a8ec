"""The two words of the API, `replicate` and `split`, and the marks that they leave on a model."""

from whale.annotation.scopes import (
    FORWARD_TAG,
    Mark,
    Scope,
    Strategy,
    annotate,
    collect_forward_marks,
    default_strategy,
    marks_by_module,
    replicate,
    set_default_strategy,
    split,
)

__all__ = [
    "FORWARD_TAG",
    "Mark",
    "Scope",
    "Strategy",
    "annotate",
    "collect_forward_marks",
    "default_strategy",
    "marks_by_module",
    "replicate",
    "set_default_strategy",
    "split",
]
