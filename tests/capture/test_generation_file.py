"""A generation on disk: round trip, its trace alone, refusals."""

import numpy as np
import pytest

from foreroute.capture import Generation, load_generation, save_generation
from foreroute.errors import TraceContentError, TraceFileError
from tests.traces import random_trace


@pytest.fixture
def generation():
    trace = random_trace(5)
    trace = trace.select(np.flatnonzero(trace.lengths > 1))
    prompts = np.ones(len(trace), np.int64)
    return Generation(trace, prompts, -np.arange(int((trace.lengths - 1).sum()), dtype=np.float32))


def test_round_trip(tmp_path, generation):
    path = save_generation(generation, tmp_path / "rollout.safetensors")
    read = load_generation(path)
    assert read.trace.equals(generation.trace)
    assert np.array_equal(read.logprobs_R, generation.logprobs_R)
    assert np.array_equal(read.prompt_lengths, generation.prompt_lengths)
    assert [each.name for each in tmp_path.iterdir()] == ["rollout.safetensors"]
    with pytest.raises(TraceFileError, match="already exists"):
        save_generation(generation, path)


def test_what_tools_said_between_turns_is_kept(tmp_path, generation):
    lengths = generation.trace.lengths
    sampled = generation.sampled_N.copy()
    inner = int(generation.trace.offsets[0]) + int(generation.prompt_lengths[0]) + 1
    assert lengths[0] - generation.prompt_lengths[0] >= 3
    sampled[inner] = False
    talked = Generation(generation.trace, generation.prompt_lengths, np.delete(generation.logprobs_R, 1), sampled)
    path = save_generation(talked, tmp_path / "rollout.safetensors")
    read = load_generation(path)
    assert np.array_equal(read.sampled_N, sampled)
    assert np.array_equal(read.logprobs_R, talked.logprobs_R)
    both = Generation.concatenate([generation, talked]).select([len(generation), 0])
    assert both.response_lengths.tolist() == [generation.response_lengths[0] - 1, generation.response_lengths[0]]
    assert np.array_equal(both.response(0), np.delete(both.response(1), 1))


def put(place, value):
    """A change of one entry."""

    def change(array):
        changed = array.copy()
        changed[place] = value
        return changed

    return change


NO_LOGPROBS = r"floats \[\d+\].*sampled"
REFUSED = [
    ("trace", lambda trace: None, r"trace.*RoutingTrace"),
    *(
        ("prompt_lengths", lambda each, n=n: [n] * len(each), "a prompt and a response of at least")
        for n in (1.5, True, 0, 2**63 - 1, None, [2, 3], 10**6)
    ),
    ("logprobs_R", put(1, np.nan), "hold nan for sampled token 1"),
    ("logprobs_R", put(1, 2e-3), "hold 0.002.* for sampled token 1"),
    *(("logprobs_R", make, NO_LOGPROBS) for make in (list, lambda each: each.astype(complex), lambda each: each[1:])),
    ("sampled_N", put(0, True), "token 0 of sequence 0, .* said to be sampled"),
    ("sampled_N", put(-1, False), "not said to be sampled"),
    ("sampled_N", lambda each: each.astype(np.int8), "numpy, bool"),
    *(("sampled_N", lambda each, value=value: value, "sampled tokens") for value in ("x", [[True], [True, True]])),
]


@pytest.mark.parametrize(("name", "change", "words"), REFUSED)
def test_what_cannot_be_a_generation_is_refused(generation, name, change, words):
    given = {"trace": generation.trace, "prompt_lengths": generation.prompt_lengths}
    given |= {"logprobs_R": generation.logprobs_R, "sampled_N": generation.sampled_N}
    with pytest.raises(TraceContentError, match=words):
        Generation(**given | {name: change(given[name])})
