"""What is killed at any moment and given again ends with the same bits as what was not."""

import random
from dataclasses import replace
from itertools import count

import pytest

from tests.robustness import NIGHT
from tests.robustness.kills import Tally, verbs

pytestmark = pytest.mark.slow
STEPS, KILLS = (
    (24, {"convert": 30, "plan": 30, "report": 30, "run": 105}) if NIGHT else (4, {"convert": 1, "plan": 1, "run": 1})
)
"""Steps of a run, and kills by verb: 200 by night, with those of runs that are started anew and of reports."""


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    return verbs(tmp_path_factory.mktemp("kills"), STEPS)


def killed(verb, folder, kills, **how):
    """Until a verb was killed so often; the moments depend on the machine, and are others each time."""
    tally, seed = Tally(), random.randrange(2**32)
    for number in count():
        if tally.kills >= kills or number == 20 * kills:
            break
        target = folder / str(number)
        verb.killed(target, random.Random(f"{seed} {number}"), tally, kills - tally.kills, **how)
    print(f"{verb.whole.name}: {tally}; seed {seed}")
    assert tally.tripped == []
    assert all(tally.same)
    assert tally.same
    assert tally.kills >= kills


@pytest.mark.parametrize(("name", "kills"), KILLS.items())
def test_a_killed_command_ends_with_the_same_bits(tmp_path, commands, name, kills):
    killed(commands[name], tmp_path, kills)


@pytest.mark.skipif(not NIGHT, reason="starting takes half a minute; FOREROUTE_SAMPLE=night does it")
def test_runs_that_are_started_anew_are_killed(tmp_path, commands):
    killed(commands["run"], tmp_path, 5, forked=False)


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
def test_what_is_not_careful_is_seen(tmp_path, commands, part, careless, tripped):
    """The first is careful, and is the control of the others."""
    convert, tally = commands["convert"], Tally()
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
