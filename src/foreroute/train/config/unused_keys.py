"""Keys that change nothing beside others are refused, so that nobody waits for what they asked for."""

from __future__ import annotations

from collections.abc import Iterable

from foreroute.files.config_file import Section


def refuse_unused(section: Section, names: Iterable[str], why: str) -> None:
    """Refuse keys that have another value than their default.

    A default may be written down: the resolved configuration of a run is a configuration.

    Args:
        section: the table that they are in.
        names: of keys that are not looked at.
        why: what they are not looked at for, and what to do, in words that follow "change nothing".

    Raises:
        ValueError: naming those that have.
    """
    fields = type(section).model_fields
    unused = [name for name in names if getattr(section, name) != fields[name].get_default(call_default_factory=True)]
    if unused:
        raise ValueError(f"{', '.join(unused)} {'change' if len(unused) > 1 else 'changes'} nothing {why}")
