"""The public names of the package: none comes, goes or changes unseen, and each says what it is."""

import difflib

import pytest

from tests.public_api import LISTED, names_of, public_api, public_members, rooms, target


@pytest.fixture(scope="module")
def every_room():
    """Read once, and by one worker of a run."""
    return rooms()


def test_the_public_names_are_those_of_the_list(every_room):
    kept, now = LISTED.read_text().splitlines(), public_api(every_room).splitlines()
    changes = list(difflib.unified_diff(kept, now, "tests/public_api.txt", "src", n=0, lineterm=""))
    assert not changes, "\n".join(
        [
            "the public API is not what tests/public_api.txt says.",
            "If this is meant: python tests/public_api.py, and say it in CHANGELOG.md.",
            *changes,
        ]
    )


def test_every_public_name_has_a_docstring(every_room):
    silent = [room.path for room in every_room if not room.docstring]
    for room, name in ((each, name) for each in every_room for name in names_of(each)):
        found = target(room[name])
        silent += [] if found.docstring or name == "__version__" else [f"{room.path}.{name}"]
        silent += [
            member.path
            for member in (public_members(found) if found.is_class else [])
            if (member.is_function or "property" in member.labels) and member.name != "__init__"
            if not member.docstring
        ]
    assert not silent
