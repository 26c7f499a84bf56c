"""The errors of the core, and the base of every error that foreroute raises on purpose.

A message says what was seen, what was expected, and what to do. It may quote a file, a model or a path, so it is
`printable`: what a terminal would obey is escaped.
"""

HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories that a terminal obeys or cannot show: controls, bidi marks, lone surrogates, separators."""


def printable(text: object) -> str:
    r"""Escape what a terminal would obey as Python writes it: `\x1b`, `\u202e`, `\udcff`. Line feeds stay."""
    import unicodedata

    lines = str(text).split("\n")
    return "\n".join(
        line
        if line.isprintable()
        else "".join(
            letter.encode("unicode_escape").decode("ascii") if unicodedata.category(letter) in HIDDEN else letter
            for letter in line
        )
        for line in lines
    )


class ForerouteError(Exception):
    """Base of the tree."""

    def __str__(self) -> str:
        return printable(super().__str__())


class AttachError(ForerouteError, TypeError):
    """Raised when a model's routing cannot be recorded and replayed exactly."""


class ReplayError(ForerouteError, RuntimeError):
    """Raised when replay was asked for and did not take effect."""
