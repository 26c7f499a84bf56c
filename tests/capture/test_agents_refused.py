"""Records of agents that lie, were cut, or hold what nothing can be trained on: one error, or a sentence of why."""

import json
import shutil
from copy import deepcopy

import pytest

from foreroute.capture import read_nemo_gym, read_skycap
from foreroute.capture.arrays import MAX_TEXT
from foreroute.errors import CaptureError
from tests import scripted
from tests.scripted import SPEC

TOOL = scripted.Call("c0", None, [5, 6, 7, 8], [10, 11, 12], 1, at=100.0)
LAST = scripted.Call("c1", TOOL, [*TOOL.tokens, 20, 21], [13, 14], 1, at=101.0)
OTHER = scripted.Call("c2", TOOL, [*TOOL.tokens, 30], [15], 2, at=102.0)
TOOL.children = [LAST, OTHER]
MADE = [TOOL, LAST, OTHER]


def skycap(folder, *, change=None, change_arrays=None, masks=False, **options):
    graph = scripted.Skycap(MADE, masks=masks)
    document, arrays = graph.document(), graph.arrays()
    if change_arrays is not None:
        change_arrays(arrays)
    path = scripted.write_skycap(folder, document, arrays)
    if change is not None:
        written = json.loads(scripted.content(path.read_bytes()))
        path.write_bytes(scripted.compressed(json.dumps(change(written) or written).encode()))
    return read_skycap(path, **{"model": SPEC, "weight_version": 1, "vocabulary_size": scripted.VOCABULARY, **options})


def gym(folder, *, change=None, made=MADE, state=None, **options):
    entries = deepcopy([scripted.gym_entry(call, "0-0") for call in made])
    if change is not None:
        change(entries)
    path = scripted.write_gym(folder, entries, **(state or {}))
    return read_nemo_gym(path, **{"model": SPEC, "weight_version": 1, **options})


def put(value, *keys):
    """A change of one place of a document, or of lines."""

    def change(values):
        for key in keys[:-1]:
            values = values[key]
        values[keys[-1]] = value

    return change


ROWS, IDS, MASK = "routed_experts", ("experts", "routed_experts"), ("sampling_mask", "ids")
ROUTES = ("sidecars", "experts", "arrays", ROWS)
REFUSED = {
    "version": (skycap, {"change": put(2, "format_version")}, "format_version 1"),
    "id": (skycap, {"change": put(7, "nodes", 1, "id")}, r"node 1.*id 7"),
    "circle": (skycap, {"change": put(2, "nodes", 1, "parent")}, r"parent.*node 1 is 2"),
    "sampled": (skycap, {"change": put(99, "nodes", 2, "tokens", "sampled_start")}, "sampled_start of node 2"),
    "target": (skycap, {"change": put([3], "samples", "rows", 0, "targets")}, r"samples.*node 3"),
    "size": (skycap, {"change": put([2**40] * 3, *ROUTES, "shape")}, r"an axis.*1099511627776"),
    "log-prob": (skycap, {"change_arrays": put(5.0, "tokens", "logprobs", 5)}, "log-probs hold 5.0"),
    "expert twice": (skycap, {"change_arrays": put([3, 3], *IDS, (0, 1))}, r"picked twice"),
    "dense layer": (skycap, {"change_arrays": put([1, 2], *IDS, (0, 0))}, r"spec.*dense"),
    "mask of another": (skycap, {"masks": True, "change_arrays": put(199, *MASK, 0)}, "leave out.*position"),
    "a mask less": (skycap, {"masks": True, "change": put(2, "nodes", 2, "tokens", "mask_rows")}, "2 sampling mask.*3"),
    "no vocabulary": (skycap, {"masks": True, "vocabulary_size": None}, "pass vocabulary_size="),
    "weights": (skycap, {"weight_version": lambda call: "3"}, "weight version"),
    "other rollout": (gym, {"change": put("1-0", 0, "rollout_id")}, r"expected a call.*rollout 0-0"),
    "digest": (gym, {"change": put("00", 0, "digest")}, r"not those.*cum_len.*digest"),
    "token large": (gym, {"change": put(2**40, 0, "prompt_token_ids", 1)}, "prompt_token_ids of call c0"),
    "no parent": (gym, {"change": put(None, 1, "parent_call_id")}, r"name.*call.*resolved"),
    "itself": (gym, {"change": put("c1", 1, "parent_call_id")}, r"parents.*circle"),
    "log-probs": (gym, {"change": put([-0.5], 0, "generation_log_probs")}, "has 1 log-probs for 3 tokens"),
    "rows": (gym, {"change": lambda lines: put(lines[1][ROWS], 0, ROWS)(lines)}, "8 rows for 7|10 rows for 7"),
    "envelope": (gym, {"change": put("nrlre2:int16:6x3x2:AAAA", 0, ROWS)}, "expected nrlre1:int16"),
    "state": (gym, {"state": {"entry_digests": {}}}, "state"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_records_that_cannot_be_are_refused(tmp_path, case):
    read, given, message = REFUSED[case]
    with pytest.raises(CaptureError, match=message):
        read(tmp_path, **given)


AT_07 = put({"temperature": 0.7}, "capture", "sampling_overrides")
RAW = put("raw_logprobs", "capture", "logprobs_mode")


@pytest.mark.parametrize(
    ("changes", "temperature", "masks", "at"),
    [
        ([AT_07], 1.0, True, "0.7"),
        ([AT_07], 0.7, False, None),
        ([put(0, "nodes", 5, "calls", 0, "sampling", "temperature")], 1.0, False, "0"),  # of one reply of three
        ([], 0.7, False, "1.0"),
        ([AT_07, RAW], 1.0, False, None),
        ([AT_07, RAW], 0.7, False, "1.0"),
        ([put({"temperature": None}, "capture", "sampling_overrides")], 1.0, False, None),
    ],
)
def test_replies_whose_log_probs_are_at_another_temperature_are_left_out(tmp_path, changes, temperature, masks, at):
    def change(document):
        for each in changes:
            each(document)

    read = skycap(tmp_path, change=change, masks=masks, temperature=temperature)
    assert read.ends == ({None: ("4", "5"), "0": ("4",)}.get(at, ()))
    assert (at is None) is not any(f"at the temperature {at};" in each for each in read.left_out)


@pytest.mark.parametrize(
    ("change", "ends", "sentence"),
    [
        (put([{"modality": "image"}], "nodes", 3, "tokens", "media"), ("5",), "path to node 4 is left out: it has im"),
        (put(None, "nodes", 3, "tokens"), ("5",), "path to node 4 is left out: it has messages without tokens"),
        (put(False, "nodes", 2, "tokens", "has_logprobs"), ("4", "5"), "node 2 is not trained: it has no log-probs"),
        (put(False, "nodes", 5, "tokens", "has_logprobs"), ("4",), "path to node 5 is left out: none of its replies"),
        (put({"top_p": 0.9}, "nodes", 5, "calls", 0, "sampling"), ("4",), "truncated distribution"),
        (put({"top_k": 7}, "capture", "sampling_overrides"), (), "truncated distribution"),
        (put(None, "nodes", 0, "tokens", "experts_offset"), ("4", "5"), "rows without routes: the record has none"),
        (put("failed", "status"), (), "its status is 'failed'"),
        (put(None, "samples"), (), "it has no samples"),
    ],
)
def test_parts_of_a_record_or_all_of_it_are_left_out_with_a_sentence(tmp_path, change, ends, sentence):
    read = skycap(tmp_path, change=change)
    assert read.ends == ends
    assert (read.generation is None) == (ends == ())
    assert any(sentence in each for each in read.left_out)


def test_frames_that_hold_more_than_is_stated_are_not_unpacked(tmp_path):
    skycap(tmp_path)
    bomb = scripted.compressed(bytes(MAX_TEXT + 1), states_size=False)
    (tmp_path / "tr_1.tokens.zst").write_bytes(bomb)
    with pytest.raises(CaptureError, match=r"holds.*\d+ bytes"):
        read_skycap(tmp_path / "tr_1.json.zst", model=SPEC, weight_version=1)


@pytest.mark.parametrize(
    ("state", "extra", "sentence"),
    [
        ({"incomplete": True}, None, "marked as incomplete"),
        ({}, "incomplete", "marked as incomplete"),
        ({}, "intents", "1 calls were begun and not recorded"),
        ({"frozen": False}, None, "not frozen"),
    ],
)
def test_a_rollout_that_lost_a_call_trains_nothing(tmp_path, state, extra, sentence):
    path = scripted.write_gym(tmp_path, [scripted.gym_entry(call, "0-0") for call in MADE], **state)
    if extra:
        with path.with_name(f"0-0.tokens.{extra}").open("a") as file:
            file.write("c9\n")
    read = read_nemo_gym(path, model=SPEC, weight_version=1)
    assert read.generation is None
    assert any(sentence in each for each in read.left_out)


def test_a_file_without_its_state_is_refused(tmp_path):
    path = scripted.write_gym(tmp_path, [scripted.gym_entry(TOOL, "0-0")])
    shutil.copy(path, other := tmp_path / "calls.jsonl")
    with pytest.raises(CaptureError, match="file"):
        read_nemo_gym(other, model=SPEC, weight_version=1)
    path.with_name("0-0.tokens.state.json").unlink()
    with pytest.raises(CaptureError, match=r"state\.json.*exist"):
        read_nemo_gym(path, model=SPEC, weight_version=1)


def test_a_parent_is_not_believed_but_compared(tmp_path):
    strange = scripted.Call("c1", TOOL, [1, 2, 3, 4, 5, 6, 7, 8], [13, 14], 1, at=101.0)
    read = gym(tmp_path, made=[TOOL, strange])
    assert read.ends == ("c0", "c1")
    assert any("begins a sequence of its own: its prompt does not begin" in each for each in read.left_out)
    read = gym(tmp_path, made=[LAST])
    assert read.generation.prompt_lengths.tolist() == [len(LAST.prompt)]
    assert any("which it goes on from, is not there" in each for each in read.left_out)
    read = gym(tmp_path, change=put(scripted.gym_entry(LAST, "0-0", 3), 0), made=[LAST])
    assert read.generation is None
    assert any("call c1 is left out: it holds what its prompt adds" in each for each in read.left_out)
    assert gym(tmp_path, change=put(True, 0, "prompt_is_delta"), made=[TOOL]).generation is None


def test_many_paths_of_a_small_record_are_refused_before_they_are_built(tmp_path, monkeypatch):
    monkeypatch.setattr("foreroute.capture.skycap.MOST_BYTES", 2000)
    with pytest.raises(CaptureError, match=r"paths.*2000 bytes"):
        skycap(tmp_path)
    monkeypatch.setattr("foreroute.capture.nemo_gym.MOST_BYTES", 100)
    with pytest.raises(CaptureError, match=r"chains.*100 bytes"):
        gym(tmp_path)
    monkeypatch.setattr("foreroute.capture.nemo_gym.MOST_TOKENS", 20)
    with pytest.raises(CaptureError, match="more than 20 tokens together"):
        gym(tmp_path)
