"""`foreroute convert` at its doors: whatever the files are, one message and exit code 2, and nothing is touched."""

import json
import os

import numpy as np
import pytest

import foreroute as fr
from tests import wires
from tests.cli.command import foreroute
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
    before = sorted(folder.rglob("*"))
    result = foreroute("convert", folder / source, folder / target, "--model", folder / model, *more)
    assert "Traceback" not in result.stderr
    assert not result.stderr.count("\n") > 1
    if result.returncode:
        assert sorted(folder.rglob("*")) == before
    return result


def refused(folder, message, *args, **kwargs):
    result = converted(folder, *args, **kwargs)
    assert result.returncode == 2, result.stdout
    assert message in result.stderr
    return result


def special(folder, kind):
    path = folder / "special"
    match kind:
        case "folder":
            path.mkdir()
        case "FIFO":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "missing":
            pass
        case "dangling":
            path.symlink_to(folder / "nothing")
        case "not UTF-8":
            path.write_bytes(b'{"\xff\xfe": 1}')
        case "deep":
            path.write_text("[" * 60_000)
        case "digits":
            path.write_text("[" + "1" * 5000 + "]")
        case "empty":
            path.write_bytes(b"")
        case "cut trace":
            path.write_bytes((folder / "trace").read_bytes()[:-3])
        case "cut header":
            path.write_bytes((folder / "trace").read_bytes()[:40])
    return path


KINDS = [
    "folder",
    "FIFO",
    "device",
    "missing",
    "dangling",
    "not UTF-8",
    "deep",
    "digits",
    "empty",
    "cut trace",
    "cut header",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["source", "model", "config.json", "tokens"])
def test_every_input_may_be_anything(folder, kind, place):
    path = special(folder, kind)
    if place == "config.json":
        (folder / "below").mkdir()
        below = folder / "below" / "config.json"
        path = path.rename(below) if os.path.lexists(path) else below
    names = {"source": (path, "out"), "tokens": ("answer.json", "out", "--tokens", path)}
    model = {"model": path, "config.json": path.parent}.get(place, "model")
    result = refused(folder, "error: ", *names.get(place, ()), model=model)
    assert path.name in result.stderr or kind in ("deep", "digits", "not UTF-8", "empty", "cut header")


@pytest.mark.parametrize("to", ["sets", "ordered"])
@pytest.mark.parametrize("target", ["below", "folder", "FIFO", "device", "long", "there"])
def test_what_cannot_be_written_is_one_message(folder, to, target):
    path = {
        "below": folder / "answer.json" / "out",
        "folder": folder / "made",
        "FIFO": folder / "fifo",
        "device": folder / "full",
        "long": folder / ("x" * 300),
        "there": folder / "config.json",
    }[target]
    if target == "folder":
        path.mkdir()
    elif target == "FIFO":
        os.mkfifo(path)
    elif target == "device":
        path.symlink_to("/dev/full")
    content = (folder / "config.json").read_bytes()
    result = refused(folder, "error: ", "answer.json", path, "--to", to)
    assert path.name[:100] in result.stderr
    assert (folder / "config.json").read_bytes() == content


def test_a_full_disk_leaves_nothing_behind(folder, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    refused(folder, "No space left", "answer.json", "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "npy"], "'npy' is not one of 'sets', 'ordered'"),
        (["--weight-version", "-2"], "weight_version is -2"),
        (["--start", "-1"], "start is -1"),
        (["--start", "3"], "has 11 rows for 12 tokens"),
    ],
)
def test_options_are_checked(folder, options, message):
    refused(folder, message, "answer.json", "out", *options)


@pytest.mark.parametrize(
    "tokens", ["5", "{}", '"x"', "[1.5]", "[[1.5]]", "[true]", "[null]", "[[true]]", "[", "[[[1]]]"]
)
def test_a_file_of_tokens_is_not_cast(folder, tokens):
    (folder / "rows.npy").write_bytes(wires.npy(R.all_layers()))
    (folder / "tokens.json").write_text(tokens)
    refused(folder, "token", "rows.npy", "out", "--tokens", folder / "tokens.json")
    (folder / "tokens.json").write_text(json.dumps([R.tokens]))
    assert converted(folder, "rows.npy", "out", "--tokens", folder / "tokens.json").returncode == 0


@pytest.mark.parametrize("name", [".", "config.json"])
def test_a_folder_says_which_layers_are_dense(folder, name):
    result = converted(folder, model=name)
    assert result.returncode == 0, result.stderr
    assert "output of the form vllm" in result.stdout
    trace = fr.load(folder / "out")
    assert [layer.index for layer in trace.spec.layers] == [1, 2, 3, 4]
    assert np.array_equal(trace.expert_ids_NLK[:-1], np.sort(R.routes_RLK, axis=-1))  # the sets, unless told otherwise
    assert trace.token_ids_N.tolist() == R.tokens
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "of_nobody"}))
    refused(folder, "config.json cannot be loaded by transformers", "answer.json", "other", model=name)


def test_an_answer_needs_a_model(folder):
    result = foreroute("convert", folder / "answer.json", folder / "out")
    assert (result.returncode, "pass --model" in result.stderr) == (2, True)
    assert not (folder / "out").exists()


def test_text_that_looks_like_a_header_is_not_taken_for_a_trace(folder):
    body = json.loads(wires.vllm_http(R))
    (folder / "answer.json").write_text('{"out":[ ' + "{}], " + json.dumps(body)[1:])
    assert (folder / "answer.json").read_text()[9] == "{"
    (folder / "answer.json").write_text('{"out": {' + "}, " + json.dumps(body)[1:])
    assert (folder / "answer.json").read_text()[8] == "{"
    assert converted(folder).returncode == 0


def test_large_input_is_parsed_once(folder, monkeypatch):
    calls = []
    loads = json.loads
    monkeypatch.setattr("json.loads", lambda text: calls.append(len(text)) or loads(text))
    assert converted(folder).returncode == 0
    assert calls.count(len(wires.vllm_http(R))) == 1


def test_input_is_bounded_in_length(folder, monkeypatch):
    most = len(wires.vllm_http(R)) - 1
    monkeypatch.setattr("foreroute.capture.arrays.MAX_TEXT", most)
    refused(folder, f"characters; expected at most {most}")
