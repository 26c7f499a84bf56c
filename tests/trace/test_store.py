"""The store of a run's traces: appending, reading, and being killed while writing."""

import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest

import foreroute as fr
from foreroute.errors import TraceFileError
from foreroute.trace import TraceStore
from tests.processes import environment
from tests.traces import mixed_trace, random_trace

WRITER = """
import sys
from foreroute.trace import TraceStore
from tests.traces import mixed_trace
store = TraceStore(sys.argv[1], codec="planes")
step = len(store)
while True:
    store.append(mixed_trace(step), step=step)
    print(step, flush=True)
    step += 1
"""


def test_append_iterate_and_load(tmp_path):
    store = TraceStore(tmp_path / "traces")
    assert len(store) == 0
    assert list(store) == []
    for step in (3, 0, 11):
        store.append(random_trace(step), step=step)
    assert store.steps == [0, 3, 11]
    assert all(trace.equals(random_trace(step)) for step, trace in store)
    part = store.load(3, sequences=[0], layers=random_trace(3).spec.layers[:1])
    assert part.equals(random_trace(3).select([0]).select_layers(part.spec.layers))
    assert TraceStore(tmp_path / "traces").steps == [0, 3, 11]


def test_nothing_stored_is_replaced(tmp_path):
    store = TraceStore(tmp_path)
    store.append(random_trace(1), step=5)
    with pytest.raises(TraceFileError, match="already exists"):
        store.append(random_trace(2), step=5)
    with pytest.raises(TraceFileError, match="steps count from 0"):
        store.append(random_trace(2), step=-1)
    assert store.load(5).equals(random_trace(1))


def test_names_that_a_terminal_would_obey_are_escaped(tmp_path):
    (tmp_path / "\x1b[31mred").touch()
    with pytest.warns(UserWarning, match=r"complete trace: \\x1b\[31mred"):
        TraceStore(tmp_path)


def test_the_traces_of_a_run_are_a_store(tmp_path):
    for step in (0, 20, 1_234_567):
        fr.save(random_trace(step), tmp_path / "traces" / f"step-{step:06d}.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = TraceStore(tmp_path / "traces")
    assert store.steps == [0, 20, 1_234_567]
    assert not store.leftovers
    assert store.append(random_trace(1), step=21).name == "step-000021.safetensors"


@pytest.mark.parametrize("step", [1.0, True, "3", None, -1])
def test_steps_are_whole_numbers(tmp_path, step):
    for use in (lambda store: store.append(random_trace(0), step=step), lambda store: store.load(step)):
        with pytest.raises(TraceFileError, match="steps count from 0"):
            use(TraceStore(tmp_path))
    assert not list(tmp_path.iterdir())


def test_missing_steps_and_files_in_the_place_of_a_folder_are_refused(tmp_path):
    store = TraceStore(tmp_path / "traces")
    with pytest.raises(TraceFileError, match="no step 2; it has none"):
        store.load(2)
    (tmp_path / "file").touch()
    with pytest.raises(TraceFileError, match="is a file"):
        TraceStore(tmp_path / "file")


def test_a_torn_shard_is_named_and_hides_no_other(tmp_path):
    store = TraceStore(tmp_path)
    for step in range(3):
        store.append(random_trace(step), step=step)
    torn = store.path(1)
    torn.write_bytes(torn.read_bytes()[:-20])
    with pytest.raises(TraceFileError, match="step-000001"):
        list(store)
    assert list(store.damaged()) == [torn]
    assert store.load(2).equals(random_trace(2))


def test_foreign_files_are_named(tmp_path):
    store = TraceStore(tmp_path)
    store.append(random_trace(0), step=0)
    (tmp_path / ".step-000001.safetensors.abc").write_bytes(b"half")
    (tmp_path / "step-0000002.safetensors").write_bytes(b"a second name for step 2")
    with pytest.warns(UserWarning, match=r"\.step-000001\.safetensors\.abc"):
        reopened = TraceStore(tmp_path)
    assert [path.name for path in reopened.leftovers] == [".step-000001.safetensors.abc", "step-0000002.safetensors"]
    assert reopened.steps == [0]


@pytest.mark.filterwarnings("ignore:.*no complete trace")
def test_killed_at_any_point_every_acknowledged_shard_is_whole(tmp_path):
    rng = np.random.default_rng(0)
    acknowledged = -1
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment()
        )
        assert writer.stdout.readline(), "the writer wrote nothing"
        time.sleep(rng.random() * 0.05)
        writer.send_signal(signal.SIGKILL)
        last = writer.stdout.read().split()
        writer.wait()
        store = TraceStore(tmp_path)
        acknowledged = int(last[-1]) if last else acknowledged + 1
        assert store.steps == list(range(len(store)))
        assert len(store) > acknowledged
        assert not store.damaged()
        assert all(path.name.startswith(".step-") for path in store.leftovers)
    for step, trace in TraceStore(tmp_path):
        assert trace.equals(mixed_trace(step).without_pick_order())
