"""Captures in a folder of the user's own (`"capture_cache"`), one file each, named by the hash of
all that they depend on (capture/cache_key.py). A file is two lines of JSON: a header with what it
is and a checksum, and the graph (capture/cache_format.py, cache_reader.py).

What is in the folder is data that decides what a job computes. So the folder and every file must
belong to the user and be closed to others; anything else is refused or captured anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from whale.capture.batch import BatchLayout
from whale.capture.cache_format import CannotCache, to_document
from whale.capture.cache_key import CannotDescribe, content_key
from whale.capture.cache_reader import from_document
from whale.capture.clean import Capture
from whale.capture.export import Task

logger = logging.getLogger("whale")

FORMAT = 1
"""of the files; another number is not read"""
ENDING = ".capture.json"
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
MOST_FILES = 64
"""in the folder; those unused for longest go"""
MOST_BYTES = 1 << 30
"""of one file"""


class Unusable(Exception):
    """A file that is not taken, with the reason."""


@dataclass(frozen=True)
class CaptureCache:
    """The folder of cached captures."""

    folder: Path

    def __post_init__(self) -> None:
        _check_folder(self.folder)

    def capture(
        self,
        model: torch.nn.Module,
        layout: BatchLayout,
        task: Task,
        with_outputs: bool,
        make: Callable[[], Capture],
        first: BatchLayout | None = None,
    ) -> Capture:
        """The capture from its file; else `make` makes it, and it is kept. `first`: layout of the
        batches before, where that is another one.
        """
        name = type(model).__name__
        try:
            key = content_key(model, layout, task, with_outputs, first)
        except CannotDescribe as error:
            logger.warning("capture_cache: %s is not cached: %s", name, error)
            return make()
        file = self.folder / f"{key}{ENDING}"
        if os.path.lexists(file):
            try:
                found = from_document(_read(file, key), layout)
                os.utime(file)
                logger.info("capture_cache: the graph of %s is that of %s", name, file)
                return replace(found, cached_in=file)
            except Unusable as error:
                logger.warning("capture_cache: %s %s: %s is captured anew", file, error, name)
            except Exception as error:  # whatever a damaged document makes of itself
                logger.warning(
                    "capture_cache: %s cannot be read (%s: %s): %s is captured anew",
                    *(file, type(error).__name__, error, name),
                )
        made = make()
        self._keep(file, key, name, made)
        return made

    def _keep(self, file: Path, key: str, name: str, capture: Capture) -> None:
        try:
            body = json.dumps(to_document(capture), separators=(",", ":")).encode()
            if len(body) > MOST_BYTES:
                raise CannotCache(f"it has {len(body):,} bytes")
        except Exception as error:  # a graph with something new in it is no reason to stop
            logger.warning("capture_cache: %s is not cached: %s", name, error)
            return
        header = json.dumps(_header(key, body)).encode()
        try:
            _write(file, header + b"\n" + body)
            self._drop_old()
        except OSError as error:
            logger.warning("capture_cache: %s is not cached: %s", name, error)

    def _drop_old(self) -> None:
        files = []
        for file in self.folder.glob(f"*{ENDING}"):
            with contextlib.suppress(OSError):  # another rank may remove it at the same time
                files.append((file.lstat().st_mtime, file))
        for _, file in sorted(files)[:-MOST_FILES]:
            file.unlink(missing_ok=True)


def _header(key: str, body: bytes) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "key": key,
        "checksum": hashlib.blake2b(body, digest_size=16).hexdigest(),
    }


def _check_folder(folder: Path) -> None:
    """Makes the folder, or refuses one that is not the user's own."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise ValueError(
            f'"capture_cache": {folder} belongs to user {found.st_uid}, not to you '
            f"({os.getuid()}): what lies there decides what your job computes. "
            "Try: a folder of your own"
        )
    if found.st_mode & OTHERS_MAY_WRITE:
        raise ValueError(
            f'"capture_cache": others may write to {folder} (mode '
            f"{stat.S_IMODE(found.st_mode):03o}): what lies there decides what your job computes. "
            f"Try: chmod 700 {folder}"
        )


def _read(file: Path, key: str) -> dict[str, Any]:
    """The document of a file; raises `Unusable` for one that is foreign, outdated or torn."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise Unusable(f"cannot be opened ({error.strerror})") from error
    with open(descriptor, "rb") as opened:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise Unusable(f"belongs to user {found.st_uid}, not to you")
        if found.st_mode & OTHERS_MAY_WRITE:
            raise Unusable(f"may be written by others (mode {stat.S_IMODE(found.st_mode):03o})")
        content = opened.read(MOST_BYTES + (1 << 20))
    first, _, body = content.partition(b"\n")
    try:
        header = json.loads(first)
    except ValueError as error:
        raise Unusable("has no header") from error
    expected = _header(key, body)
    for name, what in (
        ("format", "has the format"),
        ("torch", "is of torch"),
        ("key", "is of the capture"),
    ):
        said = header.get(name) if isinstance(header, dict) else None
        if said != expected[name]:
            raise Unusable(f"{what} {said}, not {expected[name]}")
    if header.get("checksum") != expected["checksum"]:
        raise Unusable("is torn: its checksum differs")
    document: dict[str, Any] = json.loads(body)
    return document


def _write(file: Path, content: bytes) -> None:
    """Writes a file that has its name only when it is complete: several ranks may write it."""
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, suffix=".part")  # mode 600
    try:
        with open(descriptor, "wb") as opened:
            opened.write(content)
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
