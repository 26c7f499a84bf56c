"""A user's function in its process: what comes back, and what happens when it raises, hangs, dies or talks nonsense."""

import time

import pytest

from foreroute.errors import ConfigError, FunctionError
from foreroute.train.tasks.function import UserFunction

SOURCE = """
import os, sys, time, subprocess
calls = 0

def reward(prompt, response, row):
    global calls
    calls += 1
    print("talking")
    if response == "raise":
        return 1 / 0
    if response == "hang":
        while True:
            pass
    if response == "sleep":
        child = subprocess.Popen(["sleep", "1000"])
        open(row["note"], "w").write(str(child.pid))
        time.sleep(1000)
    if response == "die":
        os._exit(3)
    if response == "exit":
        sys.exit("enough")
    return {"calls": calls, "none": None, "text": "much", "nan": float("nan"), "list": [1], "true": True}.get(
        response, len(prompt) + len(response) + row["more"]
    )
"""


@pytest.fixture(scope="module")
def function(tmp_path_factory):
    path = tmp_path_factory.mktemp("function") / "mine.py"
    path.write_text(SOURCE)
    made = UserFunction(f"{path}:reward", what="task.reward", timeout_s=1.0)
    yield made
    made.close()


def test_it_gets_prompt_response_and_row(function):
    assert function.number("ab", "cde", {"more": 2.5}) == 7.5
    assert function.number("", "true", {"more": 0}) == 1.0
    assert function.text("", "text", {"more": 0}) == "much"
    assert function.text("", "none", {"more": 0}) is None


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("raise", r"ZeroDivisionError: division by zero \(line 10 of .*mine\.py\)"),
        ("exit", "SystemExit: enough"),
        ("none", "returned None; expected a finite number"),
        ("text", "returned 'much'; expected a finite number"),
        ("nan", "returned nan; expected a finite number"),
        ("list", r"returned \[1\]; expected a finite number"),
    ],
)
def test_a_failed_call_is_explained_and_the_next_goes_on(function, response, message):
    before = function.number("", "calls", {"more": 0})
    with pytest.raises(FunctionError, match=message):
        function.number("", response, {"more": 0})
    assert function.number("", "calls", {"more": 0}) == before + 2, "the process is the same"


@pytest.mark.parametrize(("response", "message"), [("die", "exit code 3"), ("hang", "took more than 1 s")])
def test_a_process_that_dies_or_hangs_is_replaced(function, response, message):
    with pytest.raises(FunctionError, match=message):
        function.number("", response, {"more": 0})
    assert function.number("", "calls", {"more": 0}) == 1, "a new process"


def test_what_the_function_started_is_ended_with_it(function, tmp_path):
    with pytest.raises(FunctionError, match="took more than"):
        function.number("", "sleep", {"more": 0, "note": str(tmp_path / "pid")})
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_functions_that_are_not_there_are_named(tmp_path):
    path = tmp_path / "mine.py"
    for source, message in (("x = 1", "has no function reward"), ("import nothing_such", "No module named")):
        path.write_text(source)
        with pytest.raises(ConfigError, match=rf"task\.reward = '.*mine\.py:reward' failed: .*{message}"):
            UserFunction(f"{path}:reward", what="task.reward", timeout_s=1.0)
    with pytest.raises(ConfigError, match="is no file"):
        UserFunction(f"{tmp_path}/other.py:reward", what="task.reward", timeout_s=1.0)
