"""Text from strangers, made harmless for a terminal and for Markdown.

Class names, task names and settings come from files that anyone can publish. They are data: on a screen they
must not move the cursor, and in a card they must not become HTML, a link, a heading or another table column.
"""

from __future__ import annotations

import re
import unicodedata

# Joiners that emoji and several scripts are written with; other invisible characters are shown by their code.
_INVISIBLE_BUT_NEEDED = "\u200c\u200d"
_PLAIN_IN_MARKDOWN = " .,;'()-/{}"


def printable(text: str, limit: int | None = None) -> str:
    r"""``text`` on one line, with control and direction-changing characters as ``\x1b`` or ``\u202e``.

    Args:
        text: anything.
        limit: cut after so many characters.

    Example:
        >>> printable("red \x1b[31m alert")
        'red \\x1b[31m alert'
    """
    shown = "".join(_visible(character) for character in str(text))
    return shown if limit is None or len(shown) <= limit else f"{shown[: limit - 3]}..."


def markdown(text: str, limit: int | None = None) -> str:
    """``text`` as Markdown that renders to exactly that text, in a paragraph or in a table cell.

    Punctuation becomes character references, which Markdown never reads as markup. It must follow other text
    on its line, because "1." or "-" at the start of a line begin a list.

    Example:
        >>> markdown("<b>cat</b> | dog")
        '&#60;b&#62;cat&#60;/b&#62; &#124; dog'
    """
    escaped = "".join(
        character
        if character in _PLAIN_IN_MARKDOWN or not character.isascii() or character.isalnum()
        else f"&#{ord(character)};"
        for character in printable(text, limit)
    )
    return re.sub(r"(?i)www\.", lambda match: f"{match[0][:-1]}&#46;", escaped)  # would be made a link


def _visible(character: str) -> str:
    category = unicodedata.category(character)
    hidden = category in ("Cc", "Cs", "Zl", "Zp") or (category == "Cf" and character not in _INVISIBLE_BUT_NEEDED)
    return character.encode("unicode_escape").decode("ascii") if hidden else character
