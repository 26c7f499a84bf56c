"""A step in parts: what every rank reads of it, who writes it, what is asked of the store, and what is not accepted."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import foreroute as fr
from foreroute.errors import TraceFileError
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import load_parts, save_part
from tests.trace.test_streams import rows_of
from tests.traces import spec_of, with_decisions

MemoryFileSystem = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem
AbstractBufferedFile = pytest.importorskip("fsspec.spec").AbstractBufferedFile

LENGTHS = [[3, 40, 0, 7], [], [25, 1], [300, 6, 270, 12, 9]]


def part_traces(*, decisions=True):
    """Four parts of 4, 0, 2 and 5 sequences, of several weight versions."""
    traces = [synthetic_trace(spec_of(), each, seed=i, weight_version=i) for i, each in enumerate(LENGTHS)]
    return [with_decisions(each, i) if decisions else each for i, each in enumerate(traces)]


@pytest.fixture(autouse=True)
def _empty_memory():
    yield
    MemoryFileSystem.store.clear()


@pytest.fixture(params=["{}/step-7", pytest.param("local://{}/step-7/", marks=pytest.mark.slow), "memory://run/step-7"])
def step(request, tmp_path):
    """The folder of a step: a path, and URLs of stores, with files and without."""
    place = request.param.format(tmp_path)
    return place if "://" in place else Path(place)


def test_every_rank_reads_its_rows_and_layers(step):
    traces = part_traces()
    for i, trace in enumerate(traces):
        save_part(trace, step, i, 4)
    for again in traces[:2]:
        with pytest.raises(TraceFileError, match="has part 0 already, part-00000-of-00004-4"):
            save_part(again, step, 0, 4)
    stored = fr.concatenate([each.without_pick_order() for each in traces])
    assert load_parts(step).equals(stored)
    rng = np.random.default_rng(0)
    for layers in (None, [1, 0]):
        chosen = None if layers is None else [spec_of().layers[i] for i in layers]
        expected = rows_of(stored if layers is None else stored.select_layers(chosen))
        for ranks in (3, 11):  # of several sequences each that are no neighbours, and of none
            for numbers in np.array_split(rng.permutation(len(stored)), ranks):
                part = load_parts(step, sequences=numbers, layers=chosen)
                assert rows_of(part) == [expected[number] for number in numbers]
    twice = load_parts(step, sequences=[10, 0, 10], streams=["sampling"])
    assert twice.equals(stored.without_streams("indexer").select([10, 0, 10]))
    nothing = load_parts(step, sequences=[])
    assert (len(nothing), nothing.spec) == (0, traces[0].spec)


def test_a_reader_waits_for_writers_who_share_nothing(step, monkeypatch):
    monkeypatch.setattr("foreroute.trace.parts.POLL_S", 0.02)
    traces, read = part_traces(), []
    reader = threading.Thread(target=lambda: read.append(load_parts(step, sequences=[10, 0], wait_s=60)))
    reader.start()
    writers = [threading.Thread(target=save_part, args=(trace, step, i, len(traces))) for i, trace in enumerate(traces)]
    for writer in reversed(writers):
        time.sleep(0.05)
        assert not read
        writer.start()
    for thread in (*writers, reader):
        thread.join(60)
    assert read[0].equals(fr.concatenate(traces).without_pick_order().select([10, 0]))


def part(number, of, count):
    return f"part-{number:05d}-of-{of:05d}-{count}.safetensors"


INDEXES = {
    "nothing": ([], "has 0 of 0 parts"),
    "a part of three": ([part(0, 3, 4), part(2, 3, 4)], "has 2 of 3 parts after 0 s; it lacks 00001"),
    "more sequences": ([part(0, 2, 4), part(1, 2, 5)], r"damaged.*4 sequences; expected 5"),
    "a part twice": ([part(0, 2, 4), part(0, 2, 5), part(1, 2, 4)], r"each part.*once"),
    "two totals": ([part(0, 2, 4), part(1, 3, 4)], r"one number.*parts"),
    "beyond the last": ([part(0, 1, 4), part(1, 1, 4)], "numbered from 0"),
    "other names": (
        [part(0, 100_000, 4), part(0, 1, 10**9), "part-0-of-1-4", f".{part(0, 1, 4)}.ab12"],
        "0 of 0 parts",
    ),
}


@pytest.mark.parametrize(("names", "message"), INDEXES.values(), ids=INDEXES)
def test_an_index_that_lies_is_refused(tmp_path, names, message):
    trace = part_traces(decisions=False)[0]
    (tmp_path / "other").mkdir()
    for name in names:
        fr.save(trace, tmp_path / name)
    with pytest.raises(TraceFileError, match=message):
        load_parts(tmp_path)
