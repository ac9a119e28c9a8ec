"""Tables of the terminal that stay whole whatever its width.

A table that is too wide folds its columns of words. Where that does not do, it becomes several
tables below each other, each with the first column or columns again: numbers are never cut.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

WIDTH_OF_FILES = 120
"""columns where nobody says how wide the output is: a file, or a pipe"""
NARROWEST = 60
"""columns: a terminal that is narrower breaks long lines itself"""
GAP = 3
NARROW_GAP = 1
"""columns between two columns of a table, and of a table with many"""
FOLDED_WORD = 16
"""a word longer than that may be broken where there is no room for it"""


def wide_console() -> Console:
    """The console for tables, as wide as the terminal."""
    console = Console()
    if console.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return console if console.width >= NARROWEST else Console(width=NARROWEST)
    return Console(width=WIDTH_OF_FILES)


class FitTable(Table):
    """A table that is printed in parts where it is wider than the terminal."""

    num_keys = 1
    """so many first columns stand in every part: they say what a row is about"""
    gap = GAP

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:  # on its own it may be wider than the table
            yield Text(str(self.title), style="bold")
        for number, part in enumerate(self._parts(options.max_width)):
            if number:
                yield Text()
            yield from Table.__rich_console__(part, console, options)

    def _parts(self, width: int) -> Iterator[FitTable]:
        """The table itself where it can be as narrow as that, else parts of it that can; without
        a title.
        """
        longest = max([FOLDED_WORD, *map(_longest_word, self.columns)])
        for word in (longest, FOLDED_WORD):
            if self._least_width(self.columns, word) <= width:
                yield self._with(self.columns, word, width)
                return
        keys = self.columns[: self.num_keys]
        group: list[Column] = []
        for column in self.columns[self.num_keys :]:
            if group and self._least_width([*keys, *group, column], FOLDED_WORD) > width:
                yield self._with([*keys, *group], FOLDED_WORD, width)
                group = []
            group.append(column)
        yield self._with([*keys, *group], FOLDED_WORD, width)

    def _with(self, columns: Sequence[Column], word: int, width: int) -> FitTable:
        """The same rows with these columns; words up to `word` letters are not broken."""
        part = make_table("", (), gap=self.gap)
        widths = _widths(columns, word, width - self.gap * (len(columns) - 1))
        for column, columns_wide in zip(columns, widths, strict=True):
            part.add_column(
                column.header,
                justify=column.justify,
                no_wrap=column.no_wrap,
                overflow=column.overflow,
                width=columns_wide,
            )
        for row in zip(*(column.cells for column in columns), strict=True):
            part.add_row(*row)
        return part

    def _least_width(self, columns: Sequence[Column], word: int) -> int:
        """Width of a table of these columns where words up to `word` letters are not broken."""
        return self.gap * (len(columns) - 1) + sum(_least(column, word) for column in columns)


def make_table(
    title: str,
    words: Sequence[str],
    numbers: Sequence[str] = (),
    num_keys: int = 1,
    gap: int = GAP,
) -> FitTable:
    """An empty table with columns of words, which wrap, and then columns of numbers, which do
    not. The first `num_keys` stand in every part of a table that is too wide. `gap`: `GAP` or
    `NARROW_GAP`.
    """
    table = FitTable(
        title=title,
        header_style="dim",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1 if gap == GAP else 0),
    )
    table.num_keys = num_keys
    table.gap = gap
    for name in words:
        add_words(table, name)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def add_words(table: Table, name: str) -> None:
    table.add_column(name, overflow="fold")


def add_row(table: Table, *cells: str) -> None:
    """Cells as they are: square brackets of globs and code are no markup."""
    table.add_row(*map(Text, cells))


def _lines(column: Column) -> list[str]:
    """All lines of a column, its heading first."""
    texts = [column.header, *column.cells]
    return [line for text in texts for line in str(text).splitlines()]


def _longest_word(column: Column) -> int:
    return max((cell_len(word) for line in _lines(column) for word in line.split()), default=0)


def _longest_line(column: Column) -> int:
    return max((cell_len(line) for line in _lines(column)), default=0)


def _least(column: Column, word: int) -> int:
    """Width that a column needs where words up to `word` letters are not broken."""
    return _longest_line(column) if column.no_wrap else min(word, _longest_word(column))


def _widths(columns: Sequence[Column], word: int, width: int) -> list[int]:
    """Width of each column: what its lines need, and less for the widest where that is more than
    `width` together.
    """
    widths = [_longest_line(column) for column in columns]
    least = [_least(column, word) for column in columns]
    for _ in range(sum(widths) - width):
        places = [place for place, wide in enumerate(widths) if wide > least[place]]
        if places:
            widths[max(places, key=lambda place: widths[place])] -= 1
    return widths
