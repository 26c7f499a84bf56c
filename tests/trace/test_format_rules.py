"""Each rule of docs/formats.md for readers of traces: a file that breaks it is refused, though checksums are right."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard

import foreroute as fr
from foreroute.errors import TraceContentError, TraceFileError
from foreroute.trace.file import ENCODINGS
from tests.trace.forging import STAIRCASE, forged, frame_contents, holding, setting
from tests.traces import random_trace, uneven_trace, with_decisions

TRACE = random_trace(0)
ROWS = TRACE.num_rows
ABSENT = int(np.flatnonzero(~TRACE.valid_N)[0])


def metadata(**values):
    def change(there, tensors):
        there.update({f"foreroute.{name}": value for name, value in values.items()})

    return change


def layers(*entries):
    """Another layer table; numbers stand for whole entries of that layer."""
    return metadata(layers=json.dumps([[each, "decoder", 8, 2] if isinstance(each, int) else each for each in entries]))


def places(name, value, *, at=0):
    """A change of one number of a tensor."""

    def change(there, tensors):
        tensors[name].reshape(-1)[at] = value

    return change


def puts(frame, value, *, at=0):
    """A change of one byte that a frame holds."""

    def edit(content):
        content[at] = value

    return holding(frame, edit)


def framed(compress):
    """Other bytes in the place of the first frame, of what it holds."""

    def change(there, tensors):
        made, size = compress(frame_contents(tensors)[0]), int(tensors["frame_bytes"][0, 0])
        tensors["frames"] = np.frombuffer(made + tensors["frames"].tobytes()[size:], np.uint8)
        tensors["frame_bytes"][0, 0] = len(made)

    return change


METADATA = {
    "another encoding": (metadata(encoding="zip"), "encoding 'zip' is unknown"),
    "nothing is changed": (lambda there, tensors: None, None),
    "provenance is no object": (metadata(provenance='["x"]'), "and a table of texts"),
    "provenance with half a character": (metadata(provenance='{"x": "\\ud800"}'), "and a table of texts"),
    "deep provenance": (metadata(provenance="[" * 200_000), "nested too deep"),
    "no layer": (layers(), "the layer table is empty"),
    "a layer twice": (layers(0, 0, 1), "names a layer twice"),
    "a negative layer": (layers(-4, 1, 2), "routed layer is -4"),
    "a layer of another kind": (layers(*[[0, "sideways", 8, 2]] * 3), r"expected \[number, kind\]"),
    "fewer experts in one layer": (layers(0, 1, [2, "decoder", 3, 2]), "decoder 2 has .*expected ids from 0 to 2"),
    "wider ids in one layer": (layers(0, 1, [2, "decoder", 257, 2]), "another size than its rows take"),
    "too many experts in all": (layers(*[[i, "decoder", 65_536, 2] for i in range(17)]), "17 layers of 65536 experts"),
    "a layer fewer": (layers(0, 1), "tables of frames have the shape"),
}

TENSORS = {
    "a negative length": (places("lengths", -1), "are not sizes that add up to less than 2\\^63"),
    "lengths whose sum wraps": (setting(lengths=np.array([*STAIRCASE, ROWS])), "are not sizes that add up to less"),
    "more rows than chunks have": (places("lengths", 99), "expected as many"),
    "an empty chunk": (
        lambda there, tensors: tensors.update({name: np.concatenate([tensors[name], tensors[name] * 0])
                                               for name in ("chunk_rows", "frame_bytes", "content_bytes")}),
        "in chunks of 1 to 65536 rows",
    ),
    "a chunk that is too large": (setting(lengths=np.array([1 << 17]), chunk_rows=np.array([1 << 17])), "of 1 to"),
    "frames that do not add up": (places("frame_bytes", 99), "bytes by their table"),
    "rows of another size": (places("content_bytes", 10), "another size than its rows take"),
}  # fmt: skip

SOUND = zstandard.ZstdCompressor(write_checksum=True).compress
SIZELESS = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress
NO_FRAME = r"frame 0 of chunk 0 is not what was written"
FRAMES = {
    "a frame without its size": (framed(SIZELESS), NO_FRAME),
    "a frame without a checksum": (framed(zstandard.ZstdCompressor().compress), NO_FRAME),
    "no frame": (framed(lambda content: b""), NO_FRAME),
    "the same frame": (framed(SOUND), None),
}
CONTENTS = {
    "a negative token": (puts(0, 128, at=3 * ROWS), "a token id is -"),
    "a version below -1": (puts(0, 254, at=4 * ROWS + ABSENT), "a weight version is below -1"),
    "a version of a row without routes": (
        holding(0, lambda content: np.where(np.arange(len(content)) // ROWS // 4 == 1, 0, content)),
        "or stated for a row without routes",
    ),
    "a validity of 2": (puts(0, 2, at=8 * ROWS), "a validity is 2"),
    "ids of a row without routes": (puts(1, 1, at=ABSENT), "a row without a route has ids"),
    "an expert too high": (puts(2, 8), "expected ids from 0 to 7"),
    "an expert twice": (holding(1, lambda content: np.tile(content[:ROWS], 2)), "an expert is picked twice"),
}


@pytest.mark.parametrize("broken", [*METADATA, *TENSORS, *FRAMES, *CONTENTS])
def test_a_file_that_breaks_a_rule_is_refused(tmp_path, broken):
    change, message = {**METADATA, **TENSORS, **FRAMES, **CONTENTS}[broken]
    path = forged(tmp_path / "t", TRACE, change)
    if message is None:
        assert fr.load(path).equals(TRACE)  # the control: a file that was put together anew is one
        return
    with pytest.raises(TraceFileError, match=message):
        fr.load(path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (puts(1, 8), r"expert.*model.*not have"),
        (puts(1, 255, at=ROWS), r"expert.*model.*not have"),  # and no sum that wraps
        (puts(1, 1, at=ABSENT), r"ids and.*no route"),
        (puts(1, 1, at=ROWS + ABSENT), r"ids and.*no route"),
    ],
)
def test_sets_of_experts_that_cannot_be_are_refused(tmp_path, edit, message):
    assert fr.load(forged(tmp_path / "s", TRACE, lambda there, tensors: None, encoding="sets")).equals(
        TRACE.without_pick_order()
    )
    with pytest.raises(TraceFileError, match=message):
        fr.load(forged(tmp_path / "t", TRACE, edit, encoding="sets"))


STREAMS = with_decisions(TRACE, 1)


def stream(**values):
    """A change of what the header says of the sampling masks."""

    def change(there, tensors):
        entries = json.loads(there["foreroute.streams"])
        entries[1] |= values
        there["foreroute.streams"] = json.dumps(entries)

    return change


def words(frame, edit):
    """A change of the 32-bit numbers that a frame of sets holds: of `ROWS` sizes, and of the gaps."""

    def on_bytes(content):
        split = [content[: 4 * ROWS], content[4 * ROWS :]]
        numbers = [np.ascontiguousarray(each.reshape(4, -1).T).view("<u4")[:, 0].astype(np.int64) for each in split]
        changed = edit(*numbers) or numbers
        return np.concatenate([each.astype("<u4").view(np.uint8).reshape(-1, 4).T.reshape(-1) for each in changed])

    return holding(frame, on_bytes)


def doubled(sizes, gaps):
    row = int(np.flatnonzero(STREAMS.streams["sampling"].counts_ND[:, 0] >= 2)[0])
    gaps[int(STREAMS.streams["sampling"].counts_ND[:row].sum()) + 1] = 0


def absent_in_one_layer(sizes, gaps):
    sizes[np.flatnonzero(sizes == 1)[0]] = 0


REFUSED = {
    "too many streams": (metadata(streams="[" + "1," * 16 + "1]"), "expected a list of 16"),
    "another kind": (stream(kind="zip"), r"name.*own.*kind"),
    "a layer twice": (stream(layers=[[1, "decoder"]] * 2), "2 layers decide"),
    "the name of another": (stream(name="indexer"), r"a name.*own"),
    "streams that have frames and are not named": (metadata(streams="[]"), r"frames.*shape"),
    "fewer choices": (stream(num_choices=3), "expected 0 to 2"),
    "half a number": (holding(6, lambda content: content[:-1]), "expected 4 per number"),
    "fewer bytes than rows": (holding(6, lambda content: content[: ROWS * 4 - 4]), "expected 4 per number"),
    "an id twice": (words(6, doubled), r"twice, .*ascend"),
    "a gap that leaves 31 bits": (words(6, lambda sizes, gaps: gaps.put(-1, 2**31)), r"gap.*ids"),
    "gaps whose sum leaves 31 bits": (words(4, lambda sizes, gaps: gaps.fill(2**31 - 1)), r"an id.*\d{10}"),
    "a decision in some layers": (words(4, absent_in_one_layer), r"decision.*none in"),
}


@pytest.mark.parametrize("broken", REFUSED)
def test_a_stream_that_breaks_a_rule_is_refused(tmp_path, broken):
    change, message = REFUSED[broken]
    with pytest.raises(TraceFileError, match=message):
        fr.load(forged(tmp_path / "t", STREAMS, change))


def test_the_rows_that_are_written_anew_are_the_rows_that_were(tmp_path):
    """The control of the tests above: frames and words that are put together again are the same trace."""
    for frame in (4, 6):  # behind the rows and three layers: of the indexer, and of the masks
        assert fr.load(forged(tmp_path / "t", STREAMS, holding(frame, lambda content: None))).equals(STREAMS)
        assert fr.load(forged(tmp_path / "t", STREAMS, words(frame, lambda sizes, gaps: None))).equals(STREAMS)


def test_far_more_memory_than_the_file_has_bytes_is_neither_written_nor_read(tmp_path, monkeypatch):
    """Rows without routes take next to nothing in a file; in memory, layers of one pick take as much as the largest."""
    spec = fr.RoutingSpec.of_sizes(map(fr.RoutedLayer, range(200)), [(200, 200), *[(200, 1)] * 199])
    trace = fr.RoutingTrace.unrouted(spec, [np.zeros(2000, np.int32)])
    with pytest.raises(TraceContentError, match=r"\d+.*frames.*become 80018000"):
        fr.save(trace, tmp_path / "t")
    monkeypatch.setattr("foreroute.trace.file.check_memory", lambda *_: None)
    fr.save(trace, tmp_path / "t")
    monkeypatch.undo()
    with pytest.raises(TraceFileError, match=r"\d+.*frames.*become 80018000"):
        fr.load(tmp_path / "t")


def test_a_generation_is_not_saved_as_a_trace(tmp_path):
    with pytest.raises(TraceContentError, match=r"Namespace.*save_generation"):
        fr.save(SimpleNamespace(trace=TRACE), tmp_path / "t")


def test_a_header_of_more_than_a_mebibyte_is_not_written(tmp_path):
    with pytest.raises(TraceContentError, match=r"shorten.*facts"):
        fr.save(TRACE.with_provenance(log="x" * (1 << 20)), tmp_path / "u")
    most = 600 * 1024  # of characters that take two bytes each as JSON within JSON
    with pytest.raises(TraceContentError, match=r"shorten.*facts"):
        fr.save(TRACE.with_provenance(log='"' * most), tmp_path / "u")


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    ("make", "column", "at", "value", "message"),
    [
        (random_trace, "token_ids_N", 0, -1, r"token id.*-1"),
        (random_trace, "weight_versions_N", 0, -2, r"version.*below -1"),
        (random_trace, "weight_versions_N", -1, 3, r"stated.*without routes"),
        (random_trace, "expert_ids_NLK", 0, 0, "picked twice"),
        (random_trace, "expert_ids_NLK", (0, 1, 1), 8, r"ids.*0 to 7"),
        (uneven_trace, "expert_ids_NLK", (0, 0, 2), 0, r"decoder 0 .*65535.*behind"),
        (uneven_trace, "expert_ids_NLK", (0, 2, 1), 7, "decoder 2 .*: expected 65535"),
        (uneven_trace, "expert_ids_NLK", (0, 3, 0), 8, r"decoder 3 .*0 to 7"),
    ],
)
def test_what_a_reader_refuses_is_not_written(tmp_path, encoding, make, column, at, value, message):
    trace = make(0)
    getattr(trace, column)[at] = value
    with pytest.raises(TraceContentError, match=message):
        fr.save(trace, tmp_path / "t", encoding=encoding)
    assert not list(tmp_path.iterdir())
