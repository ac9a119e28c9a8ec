"""What Python code is made of, for the hash of a capture (capture/cache_key.py): the names that it
reads, and whose file it stands in.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import site
import sys
import sysconfig
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


class CannotDescribe(Exception):
    """Something that the capture may depend on, and that has no form which could be compared."""


def slots(kind: type) -> tuple[str, ...]:
    """Names of attributes that objects of this class hold without a dict."""
    found: list[str] = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def cell_content(cell: Any) -> Any:
    """What a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def global_names(code: types.CodeType) -> set[str]:
    """Names that a function, or one inside it, reads from its module."""
    found = {
        str(each.argval) for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= global_names(constant)
    return found


def attribute_names(code: types.CodeType) -> Iterator[str]:
    """Names that a function, or one inside it, looks up anywhere."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from attribute_names(constant)


@functools.lru_cache(maxsize=4096)
def kind_of(file: str) -> str:
    """`own`, `installed` or `standard`: whose code a file holds. Torch counts as standard: its
    version is part of every key."""
    path = str(Path(file).resolve())
    torch_folder = str(Path(torch.__file__).resolve().parent)
    whale_folder = str(Path(__file__).resolve().parents[1])
    if path.startswith((torch_folder, whale_folder)):
        return "standard"
    paths = [*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("purelib")]
    if path.startswith(tuple(str(Path(each).resolve()) for each in paths)):
        return "installed"
    if path.startswith(str(Path(sysconfig.get_path("stdlib")).resolve())):
        return "standard"
    return "own"


def file_hash(file: str) -> str:
    """Hash of what stands in a file of code."""
    try:
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise CannotDescribe(f"the file {file} of the model's code cannot be read") from error


@functools.lru_cache(maxsize=256)
def version_of(package: str) -> str:
    """Version of an installed package; empty where it says none."""
    said = getattr(sys.modules.get(package), "__version__", None)
    if said is not None:
        return str(said)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
