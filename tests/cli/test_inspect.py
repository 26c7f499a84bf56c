"""What `inspect` and `validate` print of files that say and cost more than they should."""

import tracemalloc
from dataclasses import replace

import numpy as np

import foreroute as fr
from foreroute.capture import Generation, save_generation
from tests.cli.command import foreroute
from tests.traces import random_trace, spec_of, with_decisions


def test_inspect_shows_facts_and_claims_apart_and_obeys_neither(tmp_path):
    lie = {"digest": "0" * 32, "rows": "1,000,000\nsequences  9", "\x1b]0;title\x07": "\u202e[bold]x"}
    trace = random_trace(0).with_provenance(**lie)
    trace = replace(trace, spec=replace(trace.spec, model="\x1b[2Jmodel"))
    path = fr.save(trace, tmp_path / "a\x1b[31m\nb")
    shown = foreroute("inspect", path, columns=200).stdout
    assert not set(shown) & {"\x1b", "\x07", "\u202e"}
    lines = [line.strip() for line in shown.splitlines()]
    assert r"\x1b[2Jmodel" in shown
    assert "a\\x1b[31m\\nb" in shown.replace("\n", "")
    [rows] = [line for line in lines if line.startswith("rows ")]
    assert f"{trace.num_rows}, of which" in rows
    assert sum("provenance: " in line for line in lines) == 3
    assert r"1,000,000\nsequences  9" in shown
    said = foreroute("validate", path, columns=200).stdout
    assert said.count("\n") == 1
    assert "\x1b" not in said


def test_inspect_of_a_file_full_of_claims_stays_short(tmp_path):
    facts = {f"fact {i}": "x" for i in range(20_000)} | {"a first": "y" * 100_000}
    path = fr.save(random_trace(0).with_provenance(**{"a long": "z" * 100_000, **facts}), tmp_path / "t")
    shown = foreroute("inspect", path)
    assert shown.returncode == 0
    assert "19970 more facts" in shown.stdout
    assert "(100000 characters)" in shown.stdout
    assert len(shown.stdout) < 20_000


def test_a_small_file_of_many_experts_does_not_dictate_memory(tmp_path):
    """The reader's limits bound what is counted: 16 layers of 65,536 experts at most."""
    spec = fr.RoutingSpec(65_536, 1, tuple(map(fr.RoutedLayer, range(16))))
    path = fr.save(fr.RoutingTrace.from_sequences(spec, [[1]], [[[[7]] * 16]]), tmp_path / "t")
    tracemalloc.start()
    shown = foreroute("inspect", path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "decoder 15" in shown.stdout
    assert peak < 64 << 20


def test_inspect_names_the_decisions_beside_the_routes(tmp_path):
    trace = with_decisions(random_trace(0), 0)
    shown = foreroute("inspect", fr.save(trace, tmp_path / "t"), columns=200).stdout
    masks = trace.streams["sampling"]
    assert f"{int(masks.valid_N.sum())} rows of {masks}, {len(masks.ids)} ids in " in shown
    assert "stream indexer" in shown
    plain = foreroute("inspect", fr.save(random_trace(0), tmp_path / "p"), columns=200).stdout
    assert "stream" not in plain


def test_inspect_and_convert_take_the_trace_of_a_generation(tmp_path):
    trace = fr.RoutingTrace.unrouted(spec_of(), [[1, 2, 3]])
    path = save_generation(Generation(trace, np.array([1]), np.zeros(2, np.float32)), tmp_path / "g")
    assert "top-2 of 8 experts in 3 layers" in foreroute("inspect", path).stdout
    converted = foreroute("convert", path, tmp_path / "t", "--to", "ordered", columns=300)
    assert "the trace of a generation, without its log-probs" in converted.stdout
    assert fr.load(tmp_path / "t").equals(trace)
