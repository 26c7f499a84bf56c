"""Live telemetry, against a recount on the host of what each router saw and would have done."""

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.errors import ReplayError
from foreroute.mismatch import margin_histogram
from foreroute.testing.models import FAMILIES, GROUPED, tiny
from tests.adapters.hf.model_runs import batch_of, enable_checkpointing, log_probs, loss_of, random_routes
from tests.adapters.hf.test_missing import MISSING, without

BATCH = batch_of(9, 6, 4)
KEPT = BATCH["attention_mask"].bool().reshape(-1)
ALL = sorted([*FAMILIES, *GROUPED])


def selected_by(family, router, output, hidden, ids):
    """What a router selects by, and its own picks, computed from its logits in float64 by the family's definition."""
    logits = output[0].double()
    if family == "gpt_oss":
        return logits
    if family in {"qwen3_moe", "mixtral", "olmoe"}:
        return logits.softmax(-1)
    if family == "deepseek_v3":
        scores = logits.sigmoid() + router.e_score_correction_bias
        groups = scores.view(len(scores), 4, 2)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(2, dim=-1).indices
    else:
        scores = logits.softmax(-1)
        groups = scores.view(len(scores), 4, 2)
        best = groups.amax(-1).topk(2, dim=-1).indices
    allowed = torch.zeros(len(scores), 4, dtype=torch.bool).scatter(1, best, True)
    return torch.where(allowed.repeat_interleave(2, dim=1), scores, 0.0)


def recount(family, model, routed, trace, run):
    """Per layer [(scores [N, E] in float64, own picks, replayed picks)], of rows that have a route."""
    seen = []
    routers = [model.get_submodule(path) for path in routed.router_paths]
    handles = [
        r.register_forward_hook(lambda r, a, out: seen.append(selected_by(family, r, out, a, None).detach()))
        for r in routers
    ]
    run()
    for handle in handles:
        handle.remove()
    layers = []
    for layer, scores in enumerate(seen[: routed.spec.num_layers]):
        scores = scores[KEPT][trace.valid_N].numpy()
        own = np.argsort(-scores, axis=-1, kind="stable")[:, : routed.spec.top_k]
        layers.append((scores, own, trace.expert_ids_NLK[trace.valid_N, layer].astype(int)))
    return layers


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("missing", ["none", "gap"])
def test_telemetry_is_what_a_recount_finds(family, missing):
    model = tiny(family)
    routed = hf.attach(model)
    trace = without(random_routes(routed.spec, BATCH), MISSING[missing])
    with routed.replay(trace, missing="native", telemetry=True) as session:
        layers = recount(family, model, routed, trace, lambda: log_probs(model, BATCH))
    top_k, seen = routed.spec.top_k, session.agreement()
    shared = np.array([[len(set(a) & set(b)) for a, b in zip(own, ids, strict=True)] for _, own, ids in layers])
    differs = shared < top_k
    assert seen.routing.rows == trace.valid_N.sum()
    assert np.array_equal(seen.routing.shared_L, shared.sum(1))
    assert np.array_equal(seen.routing.differing_L, differs.sum(1))
    assert np.array_equal(
        seen.routing.by_differing_layers, np.bincount(differs.sum(0), minlength=routed.spec.num_layers + 1)
    )
    first = differs[:, differs.any(0)].argmax(0)
    assert np.array_equal(seen.routing.first_differing_L, np.bincount(first, minlength=routed.spec.num_layers))
    for layer, (scores, own, ids) in enumerate(layers):
        ordered = -np.sort(-scores, axis=-1)
        margins = ordered[:, top_k - 1] - ordered[:, top_k]
        assert np.abs(seen.margins_LB[layer] - margin_histogram(margins[:, None])[0]).sum() <= 2
        assert seen.margins_LB[layer].sum() == trace.valid_N.sum()
        mass = np.exp(scores) if family == "gpt_oss" else scores
        replaced = 0.0
        for row in range(len(own)):
            picks = mass[row, own[row]] / mass[row, own[row]].sum()
            replaced += sum(share for share, expert in zip(picks, own[row], strict=True) if expert not in ids[row])
        assert seen.replaced_mass_L[layer] == pytest.approx(replaced, rel=1e-4)


def test_micro_batches_add_up_to_the_batch_and_recomputation_counts_once(checkpointing):
    model = tiny("qwen3_moe")
    enable_checkpointing(model, checkpointing)
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    with routed.replay(trace, telemetry=True) as session:
        loss_of(model, BATCH).backward()
    whole, counts = session.agreement(), session.expert_counts_LE()
    parts = []
    for s in range(3):
        part = {name: value[s : s + 1] for name, value in BATCH.items()}
        with routed.replay(trace.select([s]), telemetry=True) as session:
            loss_of(model, part).backward()
        parts.append(session)
    joined = parts[0].agreement() + parts[1].agreement() + parts[2].agreement()
    assert joined.routing.rows == whole.routing.rows
    assert np.array_equal(joined.routing.shared_L, whole.routing.shared_L)
    assert np.array_equal(joined.routing.first_differing_L, whole.routing.first_differing_L)
    assert joined.replaced_mass_L == pytest.approx(whole.replaced_mass_L, rel=1e-5)
    assert np.array_equal(sum(part.expert_counts_LE() for part in parts), counts)


def test_without_telemetry_there_is_none():
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    with routed.replay(random_routes(routed.spec, BATCH)) as session:
        model(**BATCH)
    for ask in (session.agreement, session.expert_counts_LE):
        with pytest.raises(ReplayError, match="telemetry=True"):
            ask()
