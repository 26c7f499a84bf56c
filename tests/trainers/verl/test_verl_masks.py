"""Sampling masks in verl's own FSDP engine: log-probs on the sets, held against dense logits in float64."""

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="there is no verl in this environment: run `make test-verl`")

from verl.workers.engine.fsdp import transformer_impl

from foreroute.errors import BatchMismatchError, CaptureError, ReplayError
from foreroute.trainers.verl.masked_log_probs import COUNTS, IDS, LOG_PROBS
from tests.trainers.verl.verl_book import Book
from tests.trainers.verl.verl_engines import make, old_log_probs, tensordict, update

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def book(folder):
    return Book(folder)


@pytest.fixture(scope="module")
def engine(group, folder):
    return make(folder, "R3", lr=0.0)


def sets_for(book, vocabulary=60, seed=0):
    """For each response token, itself and up to five others."""
    rng = np.random.default_rng(seed)
    return [
        [np.unique([token, *rng.choice(vocabulary, rng.integers(1, 6), replace=False)]) for token in response]
        for _, response in book.pairs
    ]


def with_sets(book, sets, change=lambda counts, ids: None, *, sampled=None, **settings):
    batch = book.batch()
    del batch["rollout_log_probs"]
    if sampled is not None:
        batch["rollout_log_probs"] = torch.nn.utils.rnn.pad_sequence(sampled, batch_first=True)
    counts = torch.zeros(batch["responses"].shape, dtype=torch.int32)
    ids = torch.full((len(sets), max(sum(map(len, own)) for own in sets)), -1, dtype=torch.int32)
    for s, own in enumerate(sets):
        counts[s, : len(own)] = torch.tensor([len(each) for each in own])
        ids[s, : counts[s].sum()] = torch.from_numpy(np.concatenate(own).astype(np.int32))
    change(counts, ids)
    return tensordict(batch | {COUNTS: counts, IDS: ids}, temperature=TEMPERATURE, **settings)


def exact(logits, tokens, response, sets):
    """float64 [R] of the response, from logits [T, V] of its sequence."""
    scaled = logits.double() / TEMPERATURE
    first = len(tokens) - len(response) - 1
    return torch.stack(
        [
            scaled[first + r, t] - scaled[first + r, s].logsumexp(0)
            for r, (t, s) in enumerate(zip(response, sets, strict=True))
        ]
    )


def replayed_logits(book):
    """Tokens and logits of each sequence on its routes, by the Hugging Face model."""
    found = []
    for trace in book.traces():
        tokens = trace.tokens(0).astype(np.int64)
        with torch.no_grad(), book.routed.replay(trace):
            found.append((tokens, book.model(input_ids=torch.from_numpy(tokens)[None]).logits[0]))
    return found


@pytest.mark.parametrize("settings", [{}, {"use_remove_padding": False}], ids=["packed", "padded"])
def test_log_probs_are_those_on_the_sets(engine, book, settings):
    sets = sets_for(book)
    found, _ = old_log_probs(engine, with_sets(book, sets, **settings))
    without = {name: value for name, value in book.batch().items() if name != "rollout_log_probs"}
    plain, _ = old_log_probs(engine, tensordict(without, temperature=TEMPERATURE, **settings))
    for one, other, own, (tokens, logits), (prompt, response) in zip(
        found, plain, sets, replayed_logits(book), book.pairs, strict=True
    ):
        expected = exact(logits, tokens, response, own)
        np.testing.assert_allclose(one[-len(response) :].numpy(), expected.numpy(), atol=1e-4)
        # prompts have no sets, and without sets responses are scored over all tokens
        assert torch.equal(one[: len(prompt) - 1], other[: len(prompt) - 1])
        assert float((one[-len(response) :] - other[-len(response) :]).min()) > 1e-3


def test_k3_of_updates_is_that_on_the_sets(group, folder, book):
    sets = sets_for(book)
    sampled = [
        exact(logits, tokens, response, own).float()
        for own, (tokens, logits), (_, response) in zip(sets, replayed_logits(book), book.pairs, strict=True)
    ]
    engine = make(folder, "R3")
    old_log_probs(engine, with_sets(book, sets, sampled=sampled))
    metrics = update(engine, with_sets(book, sets, sampled=sampled))["metrics"]
    assert metrics["mismatch/k3"][0] < 1e-9


def moved(counts, ids):
    """Each set one token later."""
    later = counts[0, : int((counts[0] > 0).sum())].roll(1)
    parts = ids[0, : counts[0].sum()].split(counts[0, : len(later)].tolist())
    ids[0, : counts[0].sum()] = torch.cat([parts[-1], *parts[:-1]])
    counts[0, : len(later)] = later


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (moved, BatchMismatchError, "leaves out its token"),
        (lambda counts, ids: counts.__setitem__((1, 0), 0), CaptureError, "in sampling_mask_counts for a response of"),
        (lambda counts, ids: ids.__setitem__((0, 0), 10**6), CaptureError, "cannot be true: ids go from"),
    ],
)
def test_sets_that_are_not_those_of_their_tokens_are_refused(engine, book, change, error, message):
    with pytest.raises(error, match=message):
        old_log_probs(engine, with_sets(book, sets_for(book), change))


def test_masks_that_are_dropped_are_noticed(engine, book, monkeypatch):
    def outputs(self, output, output_args, micro_batch, logits_processor_func):
        return {}

    monkeypatch.setattr(transformer_impl.FSDPEngineWithLMHead, "prepare_model_outputs", outputs)
    with pytest.raises(ReplayError, match=f"past {LOG_PROBS}, so that no sampling mask"):
        old_log_probs(engine, with_sets(book, sets_for(book)))
