"""The public names of the package: none comes, goes or changes unseen, and each says what it is."""

import difflib

import pytest

from tests.public_api import LISTED, public_api, rooms


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
