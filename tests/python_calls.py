"""What replay costs the host: how many functions of the package a piece of work calls, stand-ins of tests aside."""

import sys
from pathlib import Path

import foreroute

PACKAGE = Path(foreroute.__file__).parent


def calls_of(work):
    """Their number, in this thread; a generator counts once each time that it goes on."""
    calls = 0

    def note(frame, event, _):
        nonlocal calls
        file = Path(frame.f_code.co_filename)
        calls += event == "call" and file.is_relative_to(PACKAGE) and not file.is_relative_to(PACKAGE / "testing")

    work()  # a first one imports and fills caches
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def calls_per_layer(work_with):
    """What a layer adds to `work_with(number of layers)`, which makes a function to be called within a session."""
    with work_with(2) as two:
        of_two = calls_of(two)
    with work_with(6) as six:
        of_six = calls_of(six)
    return (of_six - of_two) / 4
