"""A user's function in its process: what comes back, and what happens when it raises, hangs, dies or talks nonsense."""

import os
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
    made = UserFunction(f"{path}:reward", label="task.reward", timeout_s=1.0)
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
            UserFunction(f"{path}:reward", label=f"task.reward = '{path}:reward'", timeout_s=1.0)
    with pytest.raises(ConfigError, match="is no file"):
        UserFunction(f"{tmp_path}/other.py:reward", label="task.reward", timeout_s=1.0)


HOSTILE = """
import os, signal, sys, time
calls = 0
channel = int(sys.argv[3])

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")

class Dark:
    def __repr__(self):
        raise RuntimeError("no picture")

class Odd(int):
    def __float__(self):
        raise RuntimeError("no float")

def loud(text):
    os.write(channel, text)

def reward(prompt, response, row):
    global calls
    calls += 1
    if response == "fork":
        os.fork()
    if response == "fork and raise":
        if not os.fork():
            raise ValueError("in the child")
    if response == "leave a child and die":
        if os.fork():
            os._exit(4)
        time.sleep(1000)
    for name, text in row.get("loud", {}).items():
        if response == name:
            loud(text.encode("latin-1"))
    if response == "close":
        os.close(channel)
        while True:
            time.sleep(1)
    if response == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "realtime signal":
        os.kill(os.getpid(), 40)
    if response == "mute":
        raise Mute
    if response == "long words":
        raise ValueError("x" * 10_000_000)
    if response == "surrogate":
        raise ValueError("\\ud800")
    return {"huge": 10**400, "dark": Dark(), "odd": Odd(3), "much": "x" * (1 << 26), "calls": calls}.get(response, 1.0)
"""
LOUD = {
    "noise": "hello",
    "lines": "one\ntwo\n",
    "bytes": "\xff\xfe\n",
    "deep": "[" * 100_000 + "\n",
    "list": "[1]\n",
    "number": "5\n",
    "another answer": '{"number": 1, "value": 2.0}\n',
    "no number": '{"value": 2.0}\n',
    "two kinds": '{"number": true, "value": [2]}\n',
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "hostile.py"
    path.write_text(HOSTILE)
    made = UserFunction(f"{path}:reward", label="task.reward", timeout_s=1.0)
    yield made
    made.close()


@pytest.mark.parametrize("response", ["fork", "fork and raise"])
def test_a_process_that_was_forked_in_a_call_does_not_answer(hostile, response):
    before = hostile.number("", "calls", {})
    for number in range(5):
        assert hostile.number("", response, {}) == 1.0
        assert hostile.number("", "calls", {}) == before + 2 * number + 2, "and each question has its own answer"


@pytest.mark.parametrize("response", LOUD)
def test_a_function_that_writes_where_its_answers_go_has_failed(hostile, response):
    with pytest.raises(FunctionError, match="reward wrote to the socket that its answers go through; it was ended"):
        # what stands behind a whole answer may arrive with it, or be seen by the next question
        [hostile.number("", response, {"loud": LOUD}) for _ in range(3)]
    assert hostile.number("", "calls", {}) == 1, "a new process"


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("huge", "OverflowError: int too large to convert to float"),
        ("odd", "RuntimeError: no float"),
        ("dark", "returned a Dark, whose repr raises RuntimeError; expected a finite number"),
        ("mute", r"failed: Mute, whose str raises RuntimeError \(line"),
        ("long words", "failed: ValueError: xxx"),
        ("surrogate", r"failed: ValueError: \\ud800"),
        ("much", "returned text of 67108864 characters"),
    ],
)
def test_values_and_errors_that_cannot_be_shown_are_explained(hostile, response, message):
    before = hostile.number("", "calls", {})
    with pytest.raises(FunctionError, match=message) as caught:
        hostile.number("", response, {})
    assert len(str(caught.value)) < 3000
    assert hostile.number("", "calls", {}) == before + 2, "the process is the same"


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("close", "task.reward closed the socket that its answers go through; it was ended"),
        ("kill", r"task.reward ended its process \(signal SIGKILL\)"),
        ("realtime signal", r"task.reward ended its process \(signal 40\)"),
        ("leave a child and die", r"task.reward ended its process \(exit code 4\)"),
    ],
)
def test_the_reason_for_an_end_is_the_true_one(hostile, response, message):
    with pytest.raises(FunctionError, match=message):
        hostile.number("", response, {})
    assert hostile.number("", "calls", {}) == 1, "a new process"


def test_a_file_that_forks_when_it_is_imported_is_loaded_once(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import os\nos.fork()\ndef reward(prompt, response, row):\n    return os.getpid()\n")
    made = UserFunction(f"{path}:reward", label="task.reward", timeout_s=1.0)
    assert len({made.number("", "", {}) for _ in range(3)}) == 1
    made.close()


@pytest.mark.parametrize("name", ["x" * 5000 + ".py", "a\0b.py", "fifo.py", "."])
def test_paths_that_are_no_files_are_refused(tmp_path, name):
    if name == "fifo.py":
        os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="is no file"):
        UserFunction(f"{tmp_path}/{name}:reward", label="task.reward", timeout_s=1.0)
