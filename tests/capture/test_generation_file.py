"""A generation on disk: round trip, binding of the two files, refusals."""

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import Generation, load_generation, save_generation
from foreroute.errors import TraceContentError, TraceFileError
from traces import random_trace


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
    assert fr.load(tmp_path / "rollout.trace.safetensors").equals(generation.trace)


def test_nothing_is_overwritten_unless_asked(tmp_path, generation):
    path = save_generation(generation, tmp_path / "rollout.safetensors")
    with pytest.raises(TraceFileError, match="already exists"):
        save_generation(generation, path)
    save_generation(generation, path, overwrite=True)


def test_a_trace_that_was_exchanged_is_refused(tmp_path, generation):
    path = save_generation(generation, tmp_path / "rollout.safetensors")
    fr.save(random_trace(6), tmp_path / "rollout.trace.safetensors", overwrite=True)
    with pytest.raises(TraceFileError, match="is not the trace"):
        load_generation(path)


def test_what_is_no_generation_is_refused(tmp_path, generation):
    path = save_generation(generation, tmp_path / "rollout.safetensors")
    with pytest.raises(TraceFileError, match="goes with --trace"):
        load_generation(tmp_path / "rollout.trace.safetensors")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(TraceFileError, match="not a whole safetensors file"):
        load_generation(path)
    with pytest.raises(TraceFileError, match="does not exist"):
        load_generation(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", ""])
def test_a_trace_is_never_looked_for_elsewhere(tmp_path, name):
    from safetensors.numpy import save_file

    header = {"foreroute.generation": "1", "foreroute.trace": name, "foreroute.digest": ""}
    save_file({"logprobs": np.zeros(1, np.float32)}, tmp_path / "g", metadata=header)
    with pytest.raises(TraceFileError, match="in the same folder"):
        load_generation(tmp_path / "g")


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
    for token, value in ((0, True), (int(generation.prompt_lengths[0]), False), (int(lengths[0]) - 1, False)):
        wrong = generation.sampled_N.copy()
        wrong[token] = value
        with pytest.raises(TraceContentError, match=rf"token {token} of sequence 0, .* said to be sampled"):
            Generation(generation.trace, generation.prompt_lengths, generation.logprobs_R, wrong)
    with pytest.raises(TraceContentError, match="expected bool"):
        Generation(generation.trace, generation.prompt_lengths, generation.logprobs_R, sampled.astype(np.int8))
