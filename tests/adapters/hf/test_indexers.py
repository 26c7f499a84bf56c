"""Choices of sparse-attention indexers. The oracle is the attention of unpatched code: weight 0 where not chosen."""

import itertools
import re
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.adapters.hf import indexers as hf_indexers
from foreroute.errors import AttachError, BatchMismatchError, ConfigError, ReplayError, SpecMismatchError
from foreroute.replay.indexers import IndexerRows
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.testing.models import tiny
from foreroute.trace import RoutingTrace
from tests.adapters.hf.families import MODELLING, SPARSE, build, lacks, skip_in_older
from tests.adapters.hf.model_runs import batch_of, random_routes
from tests.tiers import grid
from tests.traces import foreign_choices

AT_ONCE = ("deepseek_v32", "deepseek_v4", "minimax_m3_vl")
"""One that chooses tokens, one that chooses compressed entries, and one that chooses blocks."""
BATCH = batch_of(37, 24)


def test_every_indexer_of_transformers_is_known():
    """Fails when transformers adds a family with one: give it a form and a tiny model here."""
    sources = {path.parent.name: path.read_text() for path in MODELLING.glob("*/modeling_*.py")}
    with_one = {name: text for name, text in sources.items() if re.search("[Ii]ndexer|index_topk", text)}
    lacking = [name for name in SPARSE if lacks(name)]
    assert with_one.keys() == SPARSE.keys() - set(lacking)
    classes = {each for text in with_one.values() for each in re.findall(r"^class (\w*Indexer)\(", text, re.MULTILINE)}
    assert classes <= hf_indexers.FORMS.keys()
    if lacking:
        skip_in_older(f"this transformers has no {', '.join(lacking)}")
    assert classes == hf_indexers.FORMS.keys()


@lru_cache
def attached(family, device="cpu", **sizes):
    model = build(family, **SPARSE[family] | sizes)
    model.set_attn_implementation("eager")
    return model, hf.attach(model.to(device))


def output_of(model, batch=BATCH):
    return model(**batch, use_cache=False)[0][batch["attention_mask"].bool()]


@lru_cache
def recorded(family):
    """The output, without padding, and the trace of `BATCH`."""
    model, routed = attached(family)
    with routed.record(indexers=True) as recording, torch.no_grad():
        output = output_of(model)
    return output, recording.trace()


OWN = {
    "as recorded": BATCH,
    "padding alone": {name: torch.zeros((2, 5), dtype=torch.int64) for name in BATCH},
    "all seen": {name: each[1:, :8] for name, each in batch_of(9, 5).items()},
}
"""The last has more columns than its queries see, from which an indexer that leaves nothing out chooses too."""
CASES = dict.fromkeys([*zip(SPARSE, itertools.cycle(OWN), strict=False), *itertools.product(AT_ONCE, OWN)])


@grid(("family", "case"), CASES, quick=4)
def test_own_choices_change_no_bit(family, case):
    """Of the output, and of what is executed; recording changes none either."""
    wide = {name: 64 for name in SPARSE[family] if name in ("index_topk", "index_topk_blocks", "topk_blocks")}
    model, routed = attached(family, **wide if case == "all seen" else {})
    outputs, traces = [], []
    with torch.no_grad():
        native = model(**OWN[case], use_cache=False)[0]
        for _ in range(2):
            with routed.replay(traces[0]) if traces else nullcontext(), routed.record(indexers=True) as recording:
                outputs.append(model(**OWN[case], use_cache=False)[0])
            traces.append(recording.trace())
    assert all(torch.equal(output, native) for output in outputs)
    assert traces[1].equals(traces[0])
    assert traces[0].streams["indexer"].valid_N.all()
    assert traces[0].num_rows == OWN[case]["attention_mask"].sum()


@grid("family", SPARSE, quick=3)
def test_foreign_choices_are_obeyed(family):
    """Every query of every layer attends to the replayed keys and to no others, those of shared layers too."""
    model, routed = attached(family)
    _, trace = recorded(family)
    other = foreign_choices(trace, routed.indexers)
    with torch.no_grad(), routed.replay(other), attention_of(model) as weights:
        output_of(model)
    require_attended(family, routed, other, weights)
    with pytest.raises(AssertionError):  # the control: not the model's own
        require_attended(family, routed, trace, weights)


@contextmanager
def attention_of(model):
    """Weights [B, heads, T, keys] by layer number, from the modules around indexers and those that share."""
    weights = {}
    with ExitStack() as stack:
        for path, module in model.named_modules():
            has_one = hasattr(module, "indexer") or hasattr(getattr(module, "compressor", None), "indexer")
            if has_one and (number := re.search(r"layers\.(\d+)\.self_attn$", path)):
                note = partial(lambda number, _, __, output: weights.update({number: output[1]}), int(number[1]))
                stack.enter_context(module.register_forward_hook(note))
        yield weights


def require_attended(family, routed, trace, weights):
    spec = routed.indexers
    numbers = [layer.index for layer in spec.layers]
    for number, weights_BHTC in weights.items():
        if number < numbers[0]:
            continue  # dense
        layer = max(place for place, other in enumerate(numbers) if other <= number)
        seen_BHTC = weights_BHTC[..., BATCH["input_ids"].shape[1] if family == "deepseek_v4" else 0 :] > 0
        for b, length in enumerate(trace.lengths):
            for head, seen_HTC in enumerate(seen_BHTC[b].chunk(spec.heads)):
                expected_TC = torch.zeros(length, seen_HTC.shape[-1], dtype=torch.bool)
                for p in range(length):
                    expected_TC[p, keys_of(family, spec, trace, int(trace.offsets[b]) + p, p, layer, head)] = True
                assert torch.equal(seen_HTC[:, :length], expected_TC.expand_as(seen_HTC[:, :length]))


def keys_of(family, spec, trace, row, position, layer, head):
    """The columns that a query attends to: tokens, or compressed entries."""
    stream = trace.streams["indexer"]
    start, stop = stream.offsets[row * stream.depth + layer :][:2]
    units = [int(i) // spec.heads for i in stream.ids[start:stop] if i % spec.heads == head]
    if start == stop:
        units = list(range(int(spec.num_visible(np.array([position]))[0])))
    if family == "deepseek_v4":
        return units
    tokens = [u * spec.unit + i for u in units for i in range(spec.unit)]
    if family in ("glm5_next", "qwen4_exp"):
        tokens += range((position + 1) // spec.unit * spec.unit, position + 1)
    return [token for token in tokens if token <= position]


def test_choices_of_another_model_are_refused():
    _, routed = attached("deepseek_v32")
    _, trace = recorded("deepseek_v32")
    stream = trace.streams["indexer"]
    elsewhere = replace(stream, layers=tuple(replace(layer, index=layer.index + 1) for layer in stream.layers))
    without = hf.attach(tiny("qwen3_moe"))
    assert without.indexers is None
    for each, given, said in (
        (routed, trace.with_stream("indexer", elsewhere), r"of 3 layers .*; expected 3 layers"),
        (without, random_routes(without.spec, BATCH).with_stream("indexer", stream), r"indexer.*replayed"),
    ):
        with pytest.raises(SpecMismatchError, match=said), each.replay(given):
            pass
    with pytest.raises(ConfigError, match="no sparse-attention indexer"), without.record(indexers=True):
        pass


def test_rows_without_choices_follow_the_policy():
    model, routed = attached("deepseek_v32")
    expected, trace = recorded("deepseek_v32")
    gappy = trace.with_stream("indexer", trace.streams["indexer"].without(np.array([20])))
    with torch.no_grad():
        with pytest.raises(BatchMismatchError, match=r"sequence 0.*indexers.*20"), routed.replay(gappy):
            output_of(model)
        with routed.replay(gappy, missing="native"):
            assert torch.equal(output_of(model), expected)  # which is what it chose when it was recorded
        with routed.replay(gappy, missing="drop") as session:
            output_of(model)
            assert session.loss_mask_BT.sum(1).tolist() == [21, 24]


def test_an_indexer_that_is_deaf_is_refused_on_attach(monkeypatch):
    monkeypatch.setattr(hf_indexers.ChoosingIndexer, "_replayed", lambda self, own, rows, indexer: own)
    with pytest.raises(AttachError, match=r"model\.layers\.0\.self_attn\.indexer"):
        hf.attach(build("deepseek_v32", **SPARSE["deepseek_v32"]))


@pytest.mark.slow
def test_choices_in_what_is_compiled_are_refused_and_routes_alone_replayed():
    expected, trace = recorded("deepseek_v32")
    model = build("deepseek_v32", **SPARSE["deepseek_v32"])
    routed = hf.attach(model)
    model.model.layers[0].compile(backend="eager")
    with pytest.raises(ReplayError, match=r"eager.*alone"), routed.replay(trace), torch.no_grad():
        output_of(model)
    with routed.replay(trace.without_streams()), torch.no_grad():
        torch.testing.assert_close(output_of(model), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_nobody_waits_for_choices(monkeypatch):
    """Neither in a pass that records them, nor in one that replays others, of which the CPU is the oracle."""
    model, routed = attached("deepseek_v32")
    _, trace = recorded("deepseek_v32")
    other = foreign_choices(trace, routed.indexers)
    with torch.no_grad(), routed.replay(other):
        expected = output_of(model)
    with other_device() as device, torch.no_grad():
        there, moved = attached("deepseek_v32", DEVICE)
        given = {name: each.to(DEVICE) for name, each in BATCH.items()}

        def waits():
            device.reads.clear()
            output = there(**given, use_cache=False)[0]
            return sum(device.reads.values()), output.values_here[BATCH["attention_mask"].bool()]

        unpatched, _ = waits()
        with moved.record(indexers=True) as recording:
            assert waits()[0] == unpatched
        assert recording.trace().streams["indexer"].num_rows == trace.num_rows
        rows = moved.rows(other)
        for _ in range(2):  # the second time on what is there
            with moved.replay(rows):
                seen, output = waits()
            assert seen == unpatched
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
        units = IndexerRows.units_RHW  # the control: a wait that is put back
        monkeypatch.setattr(IndexerRows, "units_RHW", lambda self, i: units(self, i).cpu().to(DEVICE))
        with moved.replay(rows):
            assert waits()[0] == unpatched + 2 * len(routed.indexers.layers)


PADDED_INSIDE = {name: each[:, [0, 5, 1, 2, 6, 3, 4, 7, 8]] for name, each in batch_of(9, 5).items()}
MISPLACED = {
    "padding inside": ("deepseek_v32", PADDED_INSIDE, r"padding.*inside"),
    "padding before": ("minimax_m3_vl", batch_of(9, 5, side="left"), r"begins.*padding"),
    "several in a row": (
        "glm5_next",
        {"input_ids": torch.arange(1, 15)[None], "position_ids": torch.tensor([[*range(9), *range(5)]])},
        r"row of.*holds several",
    ),
}


@grid(("family", "batch", "message"), MISPLACED.values(), ids=MISPLACED, quick=1)
def test_a_batch_that_upstream_cuts_elsewhere_is_refused(family, batch, message):
    model, routed = attached(family)
    kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    tokens = np.split(batch["input_ids"][kept].numpy(), [9])
    routes = np.split(random_routes(routed.spec, batch_of(9, 5)).expert_ids_NLK.astype(int), [9])
    trace = foreign_choices(RoutingTrace.from_sequences(routed.spec, tokens, routes), routed.indexers)
    with pytest.raises(BatchMismatchError, match=message), routed.replay(trace), torch.no_grad():
        model(**batch, use_cache=False)
