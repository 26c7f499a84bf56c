"""The errors of the core, and the base of every error that foreroute raises on purpose.

A message says what was seen, what was expected, and what to do. It may quote a file, a model or a path, so it is
`printable`: what a terminal would obey is escaped.
"""


def printable(text: object) -> str:
    r"""Escape what a terminal would obey or cannot show as Python writes it: `\x1b`, `\u202e`. Line feeds stay."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode("ascii")
        for letter in str(text)
    )


class ForerouteError(Exception):
    """Base of the tree."""

    def __str__(self) -> str:
        return printable(super().__str__())


class AttachError(ForerouteError, TypeError):
    """Raised when a model's routing cannot be recorded and replayed exactly."""


class ReplayError(ForerouteError, RuntimeError):
    """Raised when replay was asked for and did not take effect."""
