"""Adapters whose rows or gates are broken in one way each."""

from contextlib import contextmanager

import numpy as np
import torch

from foreroute.errors import ForerouteError
from foreroute.trace import DecisionStream
from tests.conformance.breaking import Adapter, broken, filled, native, other_ids, with_ids


def some_rows_wrong(trace):
    ids = trace.expert_ids_NLK.copy()
    ids[::5, 0] = other_ids(trace)[::5, 0]
    return ids


def batch_first(trace):
    sequences, ids = len(trace), trace.expert_ids_NLK
    if len(set(trace.lengths)) > 1:
        return ids
    return ids.reshape(-1, sequences, *ids.shape[1:]).swapaxes(0, 1).reshape(ids.shape)


def zero_is_missing(trace):
    ids = trace.expert_ids_NLK
    return np.where((ids == 0).all(-1, keepdims=True), other_ids(trace), ids)


def newest_version_only(trace):
    old = trace.weight_versions_N < max(trace.versions, default=0)
    return np.where(old[:, None, None], other_ids(trace), trace.expert_ids_NLK)


def padding_consumes_rows(trace):
    return trace.expert_ids_NLK if len(set(trace.lengths)) == 1 else np.roll(trace.expert_ids_NLK, 2, axis=0)


def lasts(trace):
    """Bool [N], of each sequence."""
    last = np.zeros_like(trace.valid_N)
    last[trace.offsets[1:] - 1] = True
    return last


OF_ROWS = {
    "routes-followed": some_rows_wrong,
    "token-shift": lambda trace: np.roll(trace.expert_ids_NLK, 1, axis=0),
    "sequence-order": batch_first,
    # row i of the layer axis for decoder layer i, where the first is dense
    "layer-axis": lambda trace: np.roll(trace.expert_ids_NLK, -1, axis=1),
    "one-pick": zero_is_missing,
    "wide-ids": lambda trace: trace.expert_ids_NLK & 0xFF,
    "resumed-rollout": newest_version_only,
    "padding-neutral": padding_consumes_rows,
}
"""By check, the ids that are replayed instead of those of a trace."""


def zeroed_scores(layer, router, args, logits, weights, ids):
    own = native(router, args)[2]
    return logits, weights * (ids[..., None] == own[..., None, :]).any(-1), ids


OF_OUTPUTS = {
    "silent-no-op": lambda layer, router, args, *output: native(router, args) if layer == 1 else output,
    "gate-rule": lambda layer, router, args, logits, _, ids: (logits, logits.gather(-1, ids).softmax(-1), ids),
    "native-bit-equal": lambda layer, router, args, logits, weights, ids: (logits, weights * (1 + 1e-6), ids),
    "dense-scores": zeroed_scores,
    "router-gradient": lambda layer, router, args, logits, weights, ids: (logits, weights.detach(), ids),
}
"""By check, what a router returns instead."""

for check, change in OF_ROWS.items():
    broken(check, rows=lambda self, trace, change=change: with_ids(trace, change(trace)))
for check, is_last in {"missing-rows": True, "gaps": False}.items():
    broken(check, rows=lambda self, trace, is_last=is_last: filled(trace, (lasts(trace) == is_last) & ~trace.valid_N))
for check, change in OF_OUTPUTS.items():
    broken(
        check,
        output=lambda self, handle, layer, router, args, output, change=change: change(layer, router, args, *output),
    )


class PaddingToTheFirstExperts(Adapter, fails="padding-hot-spot"):
    def output(self, handle, layer, router, args, output):
        logits, weights, ids = output
        batch = handle.model.batch
        if batch.padding == "right":
            pads = torch.arange(batch.width)[None] >= torch.from_numpy(batch.lengths)[:, None]
            ids = torch.where(pads.reshape(-1, 1), torch.arange(ids.shape[-1]), ids)
        return logits, weights, ids


class WithinGroups(Adapter, fails="group-limit"):
    family = "deepseek_v3"

    def rows(self, trace):
        size = trace.spec.num_experts // self.group_limit.count
        held = np.sort(trace.expert_ids_NLK // size, axis=-1)
        exceeds = (np.diff(held, axis=-1) != 0).sum(-1, keepdims=True) >= self.group_limit.live
        return with_ids(trace, np.where(exceeds, np.arange(trace.spec.top_k), trace.expert_ids_NLK))


def over_all(self, logits, targets, masks):
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


broken("masks-followed", score=over_all)


class MasksWithoutGradient(Adapter):
    """A value on the sets with the gradient of all tokens."""

    def score(self, logits, targets, masks):
        of_all = over_all(self, logits, targets, masks)
        return super().score(logits, targets, masks).detach() + of_all - of_all.detach()


class MasksMended(Adapter, fails="masks-refused"):
    """Rows whose set is missing or lacks the token are scored over all tokens."""

    def score(self, logits, targets, masks):
        return super().score(logits, targets, with_tokens(masks, targets))


def with_tokens(masks, targets):
    counts = np.where(masks.contains(targets.numpy()), masks.counts_ND[:, 0], 0)
    ids = masks.ids[np.repeat(counts > 0, masks.counts_ND[:, 0])]
    return DecisionStream.from_sets(masks.num_choices, np.ones(len(counts), bool), counts, ids)


class Sparse(Adapter):
    """Of a family with indexers, which other checks say nothing new about."""

    family = "deepseek_v32"
    checks = ("routes-followed", "indexers-followed", "indexers-recorded", "indexers-refused")


class ChoicesForgottenInRecomputation(Sparse, fails="indexers-followed"):
    def backward(self, model, step):
        step.under(step.trace.without_streams()) if model.case.checkpointing else step.right()


class ChoicesRecordedOneLate(Sparse, fails="indexers-recorded"):
    def recorded(self, handle, trace):
        if "indexer" not in trace.streams:
            return trace
        rows = np.arange(trace.num_rows).reshape(len(trace), -1)
        return trace.with_stream("indexer", trace.streams["indexer"].take(np.roll(rows, 1, axis=1).reshape(-1)))


class ChoicesMended(Sparse, fails="indexers-refused"):
    """Where they cannot be those of the model, it chooses for itself, and so it does where a row has none."""

    @contextmanager
    def session(self, handle, trace, **options):
        stream = trace.streams.get("indexer")
        if stream is not None:
            try:
                handle.routed.indexers.check(stream, trace.offsets)
            except ForerouteError:
                stream = None
            if stream is None or not stream.valid_N.all():
                trace = trace.without_streams()
        with super().session(handle, trace, **options):
            yield
