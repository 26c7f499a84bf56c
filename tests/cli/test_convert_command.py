"""`foreroute convert`: options and contents; `tests/robustness/test_doors.py` has files that are none."""

import json
import re

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import load_generation
from tests import wires
from tests.cli.command import foreroute, refused
from tests.traces import random_trace

R = wires.rollout(np.random.default_rng(0), experts=16, dense=1, layers=4)
CONFIG = {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 3, "num_hidden_layers": 5}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "answer.json").write_text(wires.vllm_http(R))
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "mlp_only_layers": [0]}))
    fr.save(fr.RoutingTrace.unrouted(R.spec, [[1]]), tmp_path / "model")
    fr.save(random_trace(5), tmp_path / "trace")
    return tmp_path


def converted(folder, source="answer.json", target="out", *more, model="model"):
    return foreroute("convert", folder / source, folder / target, "--model", folder / model, *more)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("answer.json --weight-version -2", "weight_version is -2"),
        ("answer.json --start 3", "has 11 rows for 12 tokens"),
        ("answer.json --to generation", "0 log-probs for"),
        ("rows.npy", "rows.npy: the output does not carry the tokens of sequence 0; pass token_ids=, prompt"),
        ("rows.npy --tokens more.json", "Rows are missing: pass start= if the request skipped a known prefix"),
    ],
)
def test_what_is_wrong_or_missing_is_told_in_options_of_the_verb(folder, words, message):
    (folder / "rows.npy").write_bytes(wires.npy(R.all_layers()))
    (folder / "more.json").write_text(json.dumps([[*R.tokens, 1, 2]]))
    before, (source, *options) = sorted(folder.rglob("*")), words.split()
    said = refused(message, "convert", source, "out", "--model", "model", *options, cwd=folder, columns=400)
    assert said.count("\n") == 1
    assert sorted(folder.rglob("*")) == before


def test_a_folder_says_which_layers_are_dense(folder):
    result = converted(folder, model=".")
    assert "output of the form vllm" in result.stdout
    trace = fr.load(folder / "out")
    assert [layer.index for layer in trace.spec.layers] == [1, 2, 3, 4]
    assert np.array_equal(trace.expert_ids_NLK[:-1], np.sort(R.routes_RLK, axis=-1))  # the sets, unless told otherwise
    assert trace.token_ids_N.tolist() == R.tokens


def test_weights_that_nobody_named_are_warned_of(folder):
    """The trace is refused where a version is expected; one that was given is kept, and -1 says that none is known."""
    for version in ("7", "-1"):
        result = converted(folder, "answer.json", version, "--weight-version", version)
        assert (fr.load(folder / version).versions, result.stderr) == ((int(version),), "")
    result = converted(folder)
    assert fr.load(folder / "out").versions == (-1,)
    assert re.fullmatch(r"warning: \S+ was read without --weight-version, .*\n", result.stderr)


def test_log_probs_are_kept_on_request(folder):
    answer = json.loads(wires.vllm_http(R))
    answer["choices"][0]["logprobs"] = {"token_logprobs": [-0.5] * len(R.response)}
    (folder / "answer.json").write_text(json.dumps(answer))
    converted(folder, "answer.json", "kept", "--to", "generation")
    generation = load_generation(folder / "kept")
    assert generation.logprobs_R.tolist() == [-0.5] * len(R.response)
    foreroute("convert", folder / "kept", folder / "again", "--to", "generation")
    assert load_generation(folder / "again").trace.equals(generation.trace)
    assert "without its log-probs" in foreroute("convert", folder / "kept", folder / "routes").stdout
