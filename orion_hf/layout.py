"""A document of headings, paragraphs, tables and pictures, written as text, Markdown, LaTeX or one HTML page.

Everything in it is plain text: class names come from strangers, and each way of writing escapes them for itself.

    blocks = [Heading("Zero-shot"), Table(("task", "top-1"), (("EuroSAT", "51.3"),))]
    write_text("report.html", as_html("Report", blocks))
"""

from __future__ import annotations

import base64
import html
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from io import BytesIO
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, TypeAlias

from .escaping import markdown, printable
from .files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAGE = resources.files("orion_hf") / "assets" / "report.html"
_FIGURE = re.compile(
    r"[+-]?[0-9][0-9.]*( ± [0-9.]+)?( \([0-9]+( pairs?)?\))?( †)?"
)  # stays readable in Markdown's source
_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "†": r"$\dagger$",
    # In the fonts that LaTeX starts with, and with babel, these print as other characters.
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"{\char34}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}  # fmt: skip


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is a section, 2 a part of it."""

    text: str
    level: int = 1


@dataclass(frozen=True)
class Paragraph:
    """Some sentences."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        header: names of the columns; all empty: a list of facts, which has no header where that can be.
        rows: as many cells each; an empty cell is "".
        names: how many columns, from the left, hold names; the others hold numbers and are set to the right.
        strong: numbers of the rows that stand out, such as averages.
        wrapped: whether the names are long texts, which LaTeX would else print past the edge of the page.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1
    strong: frozenset[int] = frozenset()
    wrapped: bool = False


@dataclass(frozen=True)
class Picture:
    """A PNG, shown on the HTML page only."""

    png: bytes
    caption: str


Block: TypeAlias = Heading | Paragraph | Table | Picture


def picture(figure: Figure, caption: str) -> Picture:
    """A figure of :mod:`orion_hf.plots` as a block. Equal figures give equal pictures."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return Picture(buffer.getvalue(), caption)


def as_text(blocks: Sequence[Block]) -> str:
    """For a terminal: columns lined up, nothing that could move the cursor.

    Example:
        >>> print(as_text([Table(("task", "top-1"), (("EuroSAT", "51.3"),))]))
        task     top-1
        EuroSAT   51.3
    """
    parts = []
    for block in blocks:
        if isinstance(block, Heading):
            title = printable(block.text)
            parts.append(f"{title}\n{('=' if block.level == 1 else '-') * len(title)}")
        elif isinstance(block, Paragraph):
            parts.append(printable(block.text))
        elif isinstance(block, Table):
            parts.append(_text_table(block))
    return "\n\n".join(parts)


def aligned_table(rows: Sequence[Sequence[str]]) -> str:
    """A table, the header first, that lines up on a screen and is Markdown as well.

    Example:
        >>> print(aligned_table([["task", "top-1"], ["dtd", "44.3"]]))
        | task | top-1 |
        |------|-------|
        | dtd  | 44.3  |
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def as_markdown(blocks: Sequence[Block]) -> str:
    """For a README or an issue."""
    parts = []
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"{'#' * (block.level + 1)} {_markdown(block.text)}")
        elif isinstance(block, Paragraph):
            parts.append(_markdown(block.text))
        elif isinstance(block, Table):
            parts.append(_markdown_table(block))
    return "\n\n".join(parts) + "\n"


def as_latex(blocks: Sequence[Block]) -> str:
    """For a paper: `tabular`s with the rules of the package booktabs."""
    parts = [r"% \usepackage{booktabs}"]
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"\\{'section' if block.level == 1 else 'subsection'}*{{{_latex(block.text)}}}")
        elif isinstance(block, Paragraph):
            parts.append(_latex(block.text))
        elif isinstance(block, Table):
            parts.append(_latex_table(block))
    return "\n\n".join(parts) + "\n"


def as_html(title: str, blocks: Sequence[Block]) -> str:
    """One page that needs nothing else: style and pictures are in it, and it may load nothing from anywhere."""
    body = "\n".join(_html_block(block) for block in blocks)
    page = Template(_PAGE.read_text(encoding="utf-8"))
    return page.substitute(title=html.escape(printable(title)), body=body)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write a text file whole or not at all; folders are made."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the name of a file in it.")
    for folder in path.parents:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{path} cannot be written, because {folder} is a file: choose another place.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return path


def _text_table(table: Table) -> str:
    header = [table.header] if any(table.header) else []
    lines = [[printable(cell) for cell in row] for row in (*header, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < table.names else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _markdown_table(table: Table) -> str:
    marks = ["---" if column < table.names else "--:" for column in range(len(table.header))]
    lines = [[_markdown(cell) for cell in table.header], marks]
    for number, row in enumerate(table.rows):
        cells = [cell if _FIGURE.fullmatch(cell) else _markdown(cell) for cell in row]
        lines.append([f"**{cell}**" if cell and number in table.strong else cell for cell in cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _markdown(text: str) -> str:
    # No markup begins with these two, and people read the source as well.
    return markdown(text).replace("&#58; ", ": ").replace("&#37;", "%")


def _latex_table(table: Table) -> str:
    name = f"p{{{0.9 / table.names:.2f}\\linewidth}}" if table.wrapped else "l"
    columns = "".join(name if column < table.names else "r" for column in range(len(table.header)))
    lines = [r"\begin{tabular}{" + columns + "}", r"\toprule", _latex_row(table.header), r"\midrule"]
    for number, row in enumerate(table.rows):
        if number in table.strong and number - 1 not in table.strong:
            lines.append(r"\midrule")
        lines.append(_latex_row(row, table.names if table.wrapped else 0))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def _latex_row(cells: Sequence[str], wrapped: int = 0) -> str:
    # Braces, because a row that begins with "[" or "*" would be read as an option of the line before it.
    texts = [f"{{{_latex(cell)}}}" if cell else "" for cell in cells]
    for column in range(wrapped):  # paths and commands have no spaces where a line could end
        text = re.sub(r"(/|=|\.|\\_)(?=.)", r"\1\\allowbreak{}", _latex(cells[column]))
        texts[column] = f"{{\\raggedright {text}\\par}}"
    return " & ".join(texts) + r" \\"


def _latex(text: str) -> str:
    escaped = "".join(_LATEX.get(character, character) for character in printable(text))
    return re.sub("-(?=-)", "-{}", escaped)  # two would be printed as one dash


def _html_block(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level + 1}>{_html(block.text)}</h{block.level + 1}>"
    if isinstance(block, Paragraph):
        return f"<p>{_html(block.text)}</p>"
    if isinstance(block, Picture):
        data = base64.b64encode(block.png).decode("ascii")
        caption = _html(block.caption)
        return (
            f'<figure><div class="picture" tabindex="0"><img alt="{caption}" src="data:image/png;base64,{data}"></div>'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    head = "".join(_html_cell("th", column, cell, table=block) for column, cell in enumerate(block.header))
    head = f"<thead><tr>{head}</tr></thead>\n" if any(block.header) else ""
    rows = []
    for number, row in enumerate(block.rows):
        cells = "".join(_html_cell("td", column, cell, table=block) for column, cell in enumerate(row))
        rows.append(f'<tr class="strong">{cells}</tr>' if number in block.strong else f"<tr>{cells}</tr>")
    # The wrapper scrolls sideways, so that the page does not; the keyboard can scroll it too.
    return f'<div class="table" tabindex="0"><table>{head}<tbody>\n' + "\n".join(rows) + "\n</tbody></table></div>"


def _html_cell(tag: str, column: int, cell: str, table: Table) -> str:
    kind = ' class="name"' if column < table.names else ""
    return f"<{tag}{kind}>{_html(cell)}</{tag}>"


def _html(text: str) -> str:
    return html.escape(printable(text))
