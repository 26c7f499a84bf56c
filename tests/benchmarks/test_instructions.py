"""The kernel counts for us what it says it counts; where it counts no instructions, the reason is said."""

import ctypes
import errno
import mmap
import os
import platform
import resource
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from benchmarks.harness.instructions import PAGE_FAULTS, SYSCALL, count_in_user_space

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in SYSCALL, reason="perf_event_open is Linux's"
)
PAGES = 1000


def touch_pages():
    memory = mmap.mmap(-1, PAGES * mmap.PAGESIZE)
    for page in range(PAGES):
        memory[page * mmap.PAGESIZE] = 1


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.fixture
def counter():
    """Of page faults, which the kernel counts on every machine, and twice: here and in rusage."""
    counter, reason = count_in_user_space(PAGE_FAULTS)
    if counter is None:
        pytest.skip(reason)
    return counter


def test_what_this_thread_does_is_counted(counter):
    before, counted = faults(), counter()  # what the counter sees is inside of what rusage sees
    touch_pages()
    assert PAGES <= counter() - counted <= faults() - before


def test_threads_and_processes_that_come_later_are_counted(counter):
    counted = counter()
    thread = threading.Thread(target=touch_pages)
    thread.start()
    thread.join()
    by_thread = counter()
    assert by_thread - counted >= PAGES
    subprocess.run([sys.executable, "-c", f"bytearray({PAGES} * {mmap.PAGESIZE})"], check=True)
    assert counter() - by_thread >= PAGES


def test_instructions_are_counted_or_the_reason_is_said():
    counting = count_in_user_space()
    if counting.counter is None:
        assert counting.reported() == {"instructions_reason": counting.reason}
        return
    assert counting.reported() == {}
    begun = counting.counter()
    sum(range(1_000_000))
    assert counting.counter() - begun >= 1_000_000


def kernel_that_answers(monkeypatch, answer, error=0):
    def syscall(*_):
        ctypes.set_errno(error)
        return answer

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syscall=syscall))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errno.ENOENT, "this machine has no counter of instructions"),
        (errno.EACCES, "perf_event_paranoid must be 2 or less"),
        (errno.ENOSYS, "built without perf_event_open"),
        (errno.EMFILE, "perf_event_open failed: Too many open files"),
    ],
)
def test_a_kernel_that_refuses_is_quoted(monkeypatch, error, reason):
    kernel_that_answers(monkeypatch, -1, error)
    counter, said = count_in_user_space()
    assert counter is None
    assert reason in said


def answers(*counts):
    read, write = os.pipe()
    os.write(write, b"".join(count.to_bytes(8, "little") for count in counts))
    os.close(write)
    return read


def test_a_counter_that_stands_still_is_none(monkeypatch):
    for counts in ((0,), ()):
        kernel_that_answers(monkeypatch, answers(*counts))
        counter, reason = count_in_user_space()
        assert counter is None
        assert "counts nothing" in reason


def test_a_counter_that_is_taken_away_ends_the_benchmark(monkeypatch):
    kernel_that_answers(monkeypatch, answers(1, 70_000))
    counter, _ = count_in_user_space()
    assert counter() == 70_000
    with pytest.raises(RuntimeError, match="gave the counter of instructions to somebody else"):
        counter()
