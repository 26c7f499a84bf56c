"""A generation on disk: round trip, its trace alone, refusals."""

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import Generation, load_generation, save_generation
from foreroute.capture.generation import is_generation
from foreroute.errors import TraceContentError, TraceFileError
from foreroute.trace.file import FORMAT, encode
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


def test_a_generation_is_shown_in_a_line(generation):
    shown = f"Generation({len(generation.logprobs_R)} sampled tokens of {generation.trace})"
    assert repr(generation) == shown
    assert len(shown) < 160


def test_whatever_reads_traces_reads_the_trace_of_a_generation(tmp_path, generation):
    path, alone = save_generation(generation, tmp_path / "rollout"), tmp_path / "trace"
    assert fr.load(path).equals(generation.trace)
    layers = generation.trace.spec.layers[:1]
    assert fr.load(path, sequences=[1], layers=layers).equals(generation.trace.select([1]).select_layers(layers))
    fr.save(generation.trace, alone, encoding="ordered")
    (metadata, of_both), (of_alone, of_trace) = FORMAT.read(path), FORMAT.read(alone)
    assert metadata == of_alone
    assert set(of_both) - set(of_trace) == set(FORMAT.together)
    assert [is_generation(each) for each in (path, alone, tmp_path / "none")] == [True, False, False]


def test_nothing_is_overwritten_unless_asked(tmp_path, generation):
    path = save_generation(generation, tmp_path / "rollout.safetensors")
    with pytest.raises(TraceFileError, match="already exists"):
        save_generation(generation, path)
    shorter = generation.select([0])
    save_generation(shorter, path, overwrite=True)
    assert load_generation(path).trace.equals(shorter.trace)


@pytest.mark.parametrize("lengths", [1.5, True, 0, -(2**63), 2**63 - 1, None, [2, 3]])
def test_prompts_are_whole_numbers_of_tokens(generation, lengths):
    with pytest.raises(TraceContentError, match="prompt"):
        Generation(generation.trace, [lengths] * len(generation), generation.logprobs_R)


def test_what_is_no_generation_is_refused(tmp_path, generation):
    path = tmp_path / "rollout.safetensors"
    fr.save(generation.trace, path)
    with pytest.raises(TraceFileError, match=r"capture\.save_generation.*generations"):
        load_generation(path)
    metadata, tensors = encode(generation.trace, "ordered")
    with pytest.raises(TraceFileError, match=r"tensors.*prompt_lengths"):
        FORMAT.write(path, metadata, tensors | {"logprobs": generation.logprobs_R}, overwrite=True)


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
    with pytest.raises(TraceContentError, match="numpy, bool"):
        Generation(generation.trace, generation.prompt_lengths, generation.logprobs_R, sampled.astype(np.int8))


@pytest.mark.parametrize(
    ("value", "seen"),
    [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf"), (5.0, "5.0"), (2e-3, "0.002"), (1e12, "9999")],
)
def test_log_probs_that_cannot_be_are_refused(generation, value, seen):
    logprobs_R = generation.logprobs_R.copy()
    logprobs_R[1] = value
    with pytest.raises(
        TraceContentError, match=rf"log-probs hold {seen}.* for sampled token 1; expected finite numbers"
    ):
        Generation(generation.trace, generation.prompt_lengths, logprobs_R)


def test_a_log_prob_that_was_rounded_above_0_is_taken(generation):
    logprobs_R = np.full_like(generation.logprobs_R, 5e-4)
    assert len(Generation(generation.trace, generation.prompt_lengths, logprobs_R)) == len(generation)


@pytest.mark.parametrize("make", [list, lambda each: each.astype(np.uint8)])
def test_prompt_lengths_of_any_kind_become_an_array(generation, make):
    made = Generation(generation.trace, make(generation.prompt_lengths), generation.logprobs_R)
    assert type(made.prompt_lengths) is np.ndarray
    assert made.prompt_lengths.dtype == np.int64
    assert made.select([1, 0]).prompt_lengths.tolist() == generation.prompt_lengths[[1, 0]].tolist()


@pytest.mark.parametrize(
    "make",
    [
        list,
        lambda each: each.astype(complex),
        lambda each: each.astype(str),
        lambda each: each[1:],
        lambda each: [each[:1], each[1:]],
    ],
)
def test_log_probs_that_are_no_real_for_each_token_are_refused(generation, make):
    with pytest.raises(TraceContentError, match=r"floats \[\d+\].*sampled"):
        Generation(generation.trace, generation.prompt_lengths, make(generation.logprobs_R))


def test_what_is_no_trace_no_response_and_no_mask_is_named(generation):
    with pytest.raises(TraceContentError, match="token"):
        Generation(generation.trace, generation.trace.lengths, generation.logprobs_R)
    with pytest.raises(TraceContentError, match=r"trace.*RoutingTrace"):
        Generation(None, generation.prompt_lengths, generation.logprobs_R)
    for sampled in (generation.sampled_N.tolist(), "x", 3, [[True], [True, True]], generation.sampled_N[1:]):
        with pytest.raises(TraceContentError, match="sampled tokens"):
            Generation(generation.trace, generation.prompt_lengths, generation.logprobs_R, sampled)


def test_a_file_with_log_probs_that_cannot_be_is_refused(tmp_path, generation):
    path = save_generation(generation, tmp_path / "rollout.safetensors")
    metadata, tensors = encode(generation.trace, "ordered")
    more = {name: tensor for name, tensor in FORMAT.read(path)[1].items() if name in FORMAT.together}
    more["logprobs"][:] = 7
    FORMAT.write(path, metadata, tensors | more, overwrite=True)
    with pytest.raises(TraceContentError, match=r"log-probs hold 7\.0"):
        load_generation(path)
