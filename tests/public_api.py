"""The public names of the package, read from the sources without importing any of them.

`python tests/public_api.py` writes them to tests/public_api.txt.
"""

from collections.abc import Iterator
from pathlib import Path

import griffe

SOURCES = Path(__file__).parents[1] / "src"
LISTED = Path(__file__).with_suffix(".txt")


def rooms() -> list[griffe.Module]:
    """The package, its modules that say what is public, and the errors."""
    package = griffe.load("foreroute", search_paths=[SOURCES], resolve_aliases=True)
    return [package, *(module for module in modules(package) if module.exports), package["errors"]]


def modules(package: griffe.Module) -> Iterator[griffe.Module]:
    """All modules below a package, by name."""
    for _, module in sorted(package.modules.items()):
        if not module.is_alias:
            yield module
            yield from modules(module)


def names_of(room: griffe.Module) -> list[str]:
    """What the room's `__all__` lists; all classes of one that has none."""
    return sorted(
        room.exports or (name for name, member in room.members.items() if not member.is_alias and member.is_class)
    )


def lines_of(room: griffe.Module, listed: set[str]) -> Iterator[str]:
    """A line for each public name of a room, and for each public member of its classes if not in `listed` already."""
    for name in names_of(room):
        found = target(room[name])
        path = f"{room.path}.{name}"
        if found.is_class:
            bases = ", ".join(str(base) for base in found.bases)
            yield f"class {path}{f'({bases})' if bases else ''}"
            yield from () if found.path in listed else map(member_line, public_members(found))
            listed.add(found.path)
        elif found.is_function:
            yield f"def {path}{signature(found)}"
        elif found.is_attribute:
            yield f"name {path}"
        else:
            yield f"module {path}"


def public_members(owner: griffe.Class) -> list[griffe.Object]:
    """Methods, properties and attributes of a class without a leading underscore, and how it is made."""
    members = (target(member) for name, member in owner.all_members.items() if name == "__init__" or name[0] != "_")
    return sorted(members, key=lambda member: member.name)


def member_line(member: griffe.Object) -> str:
    if member.is_function:
        return f"    def {member.name}{signature(member)}"
    return f"    {member.name}{f': {member.annotation}' if member.annotation else ''}"


def signature(function: griffe.Function) -> str:
    """Parameters with their kinds, annotations and defaults, and what is returned."""
    return function.signature().removeprefix(function.name)


def target(member: griffe.Object | griffe.Alias) -> griffe.Object:
    return member.final_target if member.is_alias else member


def public_api(found: list[griffe.Module]) -> str:
    listed: set[str] = set()
    return "".join(f"{line}\n" for room in found for line in lines_of(room, listed))


if __name__ == "__main__":
    LISTED.write_text(public_api(rooms()))
