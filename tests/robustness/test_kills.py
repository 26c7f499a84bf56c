"""What is killed at any moment and given again ends with the same bits as what was not.

How often it was is shown by `pytest -rP`. 200 kills take `-m exhaustive`.
"""

import random
from dataclasses import replace
from itertools import count

import pytest

from tests.robustness.kills import Tally, verbs


@pytest.fixture(scope="module")
def few_steps(tmp_path_factory):
    return verbs(tmp_path_factory.mktemp("kills"), steps=10)


@pytest.fixture(scope="module")
def many_steps(tmp_path_factory):
    return verbs(tmp_path_factory.mktemp("kills"), steps=24)


def killed(verb, folder, kills, **how):
    """Until a verb was killed so often; the moments depend on the machine, and are others each time."""
    tally, seed = Tally(), random.randrange(2**32)
    for number in count():
        if tally.kills >= kills or number == 3 * kills:
            break
        target = folder / str(number)
        verb.killed(target, random.Random(f"{seed} {number}"), tally, kills - tally.kills, **how)
    print(f"{verb.whole.name}: {tally}; seed {seed}")
    assert tally.tripped == []
    assert all(tally.same)
    assert tally.same
    assert tally.kills >= kills


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("convert", 2),
        *(pytest.param(name, n, marks=pytest.mark.slow) for name, n in (("plan", 2), ("report", 2), ("run", 4))),
    ],
)
def test_a_killed_command_ends_with_the_same_bits(tmp_path, few_steps, name, kills):
    killed(few_steps[name], tmp_path, kills)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "kills"), [("convert", 30), ("plan", 30), ("report", 30), ("run", 105)])
def test_commands_are_killed_often(tmp_path, many_steps, name, kills):
    killed(many_steps[name], tmp_path, kills)


@pytest.mark.exhaustive
def test_runs_that_are_started_anew_are_killed(tmp_path, many_steps):
    killed(many_steps["run"], tmp_path, 5, forked=False)


def leaves_more(convert, folder):
    (folder / "more").touch()
    return convert.words(folder)


def leaves_half(convert, folder):
    path = folder / "out"
    if path.exists():
        path.write_bytes(path.read_bytes()[:-1])
    return convert.read(folder)


@pytest.mark.parametrize(
    ("part", "careless", "tripped"),
    [
        ("words", lambda convert, folder: convert.words(folder), ""),
        ("words", lambda convert, folder: [*convert.words(folder)[:-1], "ordered"], "another content"),
        ("words", leaves_more, "more is left"),
        ("words", lambda convert, folder: ["convert", "--unknown"], "exit code 2"),
        ("read", leaves_half, "TraceFileError"),
    ],
)
def test_what_is_not_careful_is_seen(tmp_path, few_steps, part, careless, tripped):
    """The first is careful, and is the control of the others."""
    convert, tally = few_steps["convert"], Tally()
    assert convert.seconds, "it ran once, carefully"
    folder = tmp_path / "folder"
    folder.mkdir()
    verb = replace(
        convert, **{part: lambda path: careless(convert, path) if path == folder else getattr(convert, part)(path)}
    )
    verb.seconds = convert.seconds
    verb.killed(folder, random.Random(0), tally, kills=0)
    if tripped == "another content":
        assert tally.same == [False]
    else:
        assert bool(tally.tripped) == bool(tripped)
        assert any(tripped in each for each in [*tally.tripped, ""])
