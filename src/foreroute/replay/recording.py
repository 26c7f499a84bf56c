"""Routes as a model takes them: whole batches, or a prefill and the decode steps that follow it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from foreroute.checks import as_array
from foreroute.core.passes import Interceptor, Pass, RecordOptions, Rows
from foreroute.core.routed import NOTHING_RECORDED
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.replay.arguments import kept_by
from foreroute.trace import NO_VERSION, DecisionStream, RoutingSpec, RoutingTrace, concatenate


@dataclass(frozen=True)
class ForwardRows:
    """Rows of one forward of the whole model, on the host: its rows without padding, sequence after sequence."""

    lengths_S: NDArray[np.int64]  # rows of each sequence
    tokens_N: NDArray[np.int64]
    ids_NLK: NDArray[Any]  # uint8 or uint16
    values_NL: NDArray[np.float32] | None  # margins or deficits; None where none were asked for
    past: int  # how many positions a key-value cache already held
    width: int | None  # positions of a sequence, padding included; None where sequences share a row, and cannot go on
    streams: dict[str, DecisionStream] = field(default_factory=dict)  # N rows; the same names in every forward


@dataclass(frozen=True)
class RecordedPass:
    """One forward of one chunk, still on the device, and no more of it than the trace is made of."""

    args: Any  # what its arguments said
    ids_LRK: Tensor | None  # uint8 or uint16; None of a chunk without routers
    values_LR: Tensor | None = None  # float32, margins or deficits; None where none were asked for
    choices: dict[int, Tensor] | None = None  # what each indexer returned, by its number


CheckRollout = Callable[[Sequence[NDArray[np.int64]]], None]
"""Looks at the tokens of each sequence of a rollout, masked ones left out."""


class Recording(Interceptor):
    """Collects the routes of every forward in a `record()` session.

    Forwards that start without a key-value cache begin new sequences; forwards with one continue the sequences of the
    forward before them. Routes stay on the device until they are asked for.
    """

    _check_rollout: CheckRollout | None = None

    def __init__(
        self,
        spec: RoutingSpec,
        num_chunks: int,
        rows_of: Callable[[list[list[RecordedPass]]], list[ForwardRows]],  # as `RoutedModel.rows_of`
        weight_version: int,
        provenance: dict[str, str],
        options: RecordOptions,
    ) -> None:
        self.options = options
        self._spec = spec
        self._rows_of = rows_of
        self._version = weight_version
        self._provenance = provenance
        self._passes: list[list[RecordedPass]] = [[] for _ in range(num_chunks)]
        self._begun: list[Any] = [None] * num_chunks

    def begin_pass(self, chunk: int, args: Any) -> Rows | None:
        """Keep what says where the sequences are, before whoever gave it overwrites it."""
        self._begun[chunk] = args.kept()
        return None

    def end_pass(self, chunk: int, args: Any, current: Pass | None) -> None:
        """Keep what is asked for of the pass; one that failed is forgotten."""
        recorded = RecordedPass(self._begun[chunk], None)
        if current is not None:
            if self.options.deficits:
                ids_LRK, values_LR = current.native_LRK, current.deficit_LR
            else:
                ids_LRK, values_LR = current.executed_LRK, current.margin_LR if self.options.margins else None
            choices = current.returned if self.options.others else None
            recorded = RecordedPass(self._begun[chunk], _to_trace_dtype(ids_LRK, self._spec), values_LR, choices)
        self._passes[chunk].append(recorded)

    def trace(self) -> RoutingTrace:
        """Everything recorded so far, in the order of the forwards, of their rows, and of the sequences in a row.

        All layers and rows, on every rank: each rank of the model must call it, like a collective of torch.distributed.
        Padding is left out where the batch says what is padding: by a mask, or between packed sequences. The last token
        that `generate` sampled was no input, and what a finished sequence goes on with is not known to be padding:
        `rollout` adds the one and leaves out the other.

        Raises:
            ReplayError: when no forward ran in the session, or the chunks of a rank ran different numbers of them.
        """
        traces = [self._trace_of(batch) for batch in self._batches()]
        return concatenate(traces).with_weight_version(self._version).with_provenance(**self._provenance)

    def rollout(self, sequences: Any, attention_mask: ArrayLike | None = None) -> RoutingTrace:
        """The routes of sequences that were sampled in the session, such as `generate` returns them.

        The last token of each was sampled and never an input, so that it is in the trace without a route. The tokens
        are compared with those that were recorded. Called on every rank of the model, as `trace`.

        Args:
            sequences: prompts and responses, integers [B, T], in the order in which they were recorded; or B integer
                arrays [T] without padding.
            attention_mask: of sequences [B, T], as a training step takes it: 0 for padding before the prompt and after
                the end of the response, 1 elsewhere. Everything is a token by default.

        Raises:
            BatchMismatchError: when other tokens or fewer were recorded, or the mask is not that of the sequences.
            ReplayError: when no forward ran in the session.
        """
        tokens = _tokens_of(sequences, attention_mask)
        if self._check_rollout is not None:
            self._check_rollout(tokens)
        spec = self._spec
        if any(self._passes) or any(len(each) > 1 for each in tokens):
            inputs = _inputs_of(self.trace(), tokens)
        else:  # of one token each, which nothing had to be computed from
            inputs = RoutingTrace.unrouted(spec, [each[:0] for each in tokens])
        return inputs.continued_by(RoutingTrace.unrouted(spec, [each[-1:] for each in tokens]))

    def margins_NL(self) -> NDArray[np.float32]:
        """float32 [N, L]: K-th minus (K+1)-th selection score of each row of `trace()`, in the router's own scale.

        Called on every rank of the model, as `trace`. Raises `ReplayError` without `record(margins=True)`.
        """
        return self._values_NL("margins", "margins", is_kept=self.options.margins)

    def deficits_NL(self) -> NDArray[np.float32]:
        """float32 [N, L]: how far the replayed experts of each row of `trace()` are from the router's own choice.

        The least selection score of the native picks less the least of the replayed experts, in the router's own scale;
        in logits where that is a softmax. 0 where both are the same, or nothing was replayed. Called on every rank of
        the model, as `trace`. Raises `ReplayError` without `record(native=True)`.
        """
        return self._values_NL("deficits", "native", is_kept=self.options.deficits)

    def _values_NL(self, what: str, switch: str, *, is_kept: bool) -> NDArray[np.float32]:
        if not is_kept or not any(self._passes):
            raise ReplayError(f"no {what} were recorded; open the session with record({switch}=True) and run a forward")
        return np.concatenate([_in_order(batch, lambda rows: rows.values_NL) for batch in self._batches()])

    def _batches(self) -> list[list[ForwardRows]]:
        """Join forwards of the same batch of sequences."""
        counts = {len(passes) for passes in self._passes}
        if counts == {0}:
            raise ReplayError(NOTHING_RECORDED)
        if len(counts) > 1:
            raise ReplayError(
                f"the chunks of this rank ran {[len(p) for p in self._passes]} forwards; expected one of each for "
                "every micro-batch"
            )
        batches: list[list[ForwardRows]] = []
        for rows in self._rows_of(self._passes):
            if rows.past and batches:
                _require_continues(rows, batches[-1])
                batches[-1].append(rows)
            else:
                batches.append([rows])
        return batches

    def _trace_of(self, batch: list[ForwardRows]) -> RoutingTrace:
        """Make the trace of one batch of sequences, in the order in which they grew."""
        tokens_N, ids_NLK = _in_order(batch, lambda rows: rows.tokens_N), _in_order(batch, lambda rows: rows.ids_NLK)
        ends = np.cumsum(sum(rows.lengths_S for rows in batch))[:-1]
        trace = RoutingTrace.from_sequences(
            self._spec, np.split(tokens_N, ends), np.split(ids_NLK, ends), weight_version=NO_VERSION
        )
        for name in batch[0].streams:
            first, *others = (rows.streams[name] for rows in batch)
            trace = trace.with_stream(name, first.join(others).take(_sorted_rows(batch)))
        return trace


def _to_trace_dtype(ids_LRK: Tensor, spec: RoutingSpec) -> Tensor:
    """Copy ids to the type that a trace has; -1 becomes its filler."""
    if spec.id_dtype.itemsize == 1:
        return ids_LRK.to(torch.uint8)
    return ids_LRK.to(torch.int16, copy=True).view(torch.uint16)


def _require_continues(rows: ForwardRows, batch: list[ForwardRows]) -> None:
    first = batch[0]
    if rows.width is None or any(each.width is None for each in batch):
        raise ReplayError(
            "sequences packed into one row cannot be continued with a key-value cache: which of them a later token "
            "belongs to is not known. Record such a batch in one forward"
        )
    reached = first.past + sum(each.width or 0 for each in batch)
    if (len(rows.lengths_S), rows.past) != (len(first.lengths_S), reached):
        raise ReplayError(
            f"a forward continues {len(rows.lengths_S)} sequences with {rows.past} cached positions; the batch "
            f"before it has {len(first.lengths_S)} of {reached}. Record each batch of sequences, and what "
            "follows a cache that was cut, in a session of its own"
        )


def _sorted_rows(batch: list[ForwardRows]) -> NDArray[np.int64]:
    """Sort the rows of all forwards by sequence, each in the order of the forwards: int64 [N]."""
    sequence_N = np.concatenate([np.repeat(np.arange(len(rows.lengths_S)), rows.lengths_S) for rows in batch])
    return np.argsort(sequence_N, kind="stable")


def _in_order(batch: list[ForwardRows], part: Callable[[ForwardRows], Any]) -> NDArray[Any]:
    """Join a part of all rows, sorted by sequence."""
    return np.concatenate([part(rows) for rows in batch])[_sorted_rows(batch)]


def _tokens_of(sequences: Any, attention_mask: ArrayLike | None) -> list[NDArray[np.int64]]:
    """Give B arrays [T], each with a token at least."""
    if isinstance(sequences, list | tuple):
        if attention_mask is not None:
            raise BatchMismatchError("sequences in a list have no padding; give no attention_mask with them")
        rows = [as_array(row, name=f"sequence {s}", error=BatchMismatchError) for s, row in enumerate(sequences)]
    else:
        rows_BT = as_array(sequences, name="sequences", error=BatchMismatchError)
        if rows_BT.ndim != 2:
            raise BatchMismatchError(
                f"sequences are a {type(sequences).__name__} of shape {rows_BT.shape}; expected integers [B, T], such "
                "as generate() returns (or has in its `sequences`), or a list of B integer arrays [T]"
            )
        rows = list(rows_BT)
        if attention_mask is not None:
            mask_BT = as_array(attention_mask, name="attention_mask", error=BatchMismatchError)
            if mask_BT.shape != rows_BT.shape:
                raise BatchMismatchError(
                    f"attention_mask is {mask_BT.shape} and the sequences are {rows_BT.shape}; expected the mask of "
                    "prompts and responses: 0 for padding before a prompt, and for what follows the end of a response"
                )
            rows = [row[kept] for row, kept in zip(rows, kept_by(mask_BT), strict=True)]
    for s, row in enumerate(rows):
        if row.ndim != 1 or row.dtype.kind not in "iu" or not len(row):
            raise BatchMismatchError(
                f"sequence {s} is {row.dtype} of shape {row.shape}; expected one token at least, integers [T]"
            )
    return [row.astype(np.int64) for row in rows]


def _inputs_of(recorded: RoutingTrace, tokens: Sequence[NDArray[np.int64]]) -> RoutingTrace:
    """Give the rows of all tokens but the last of each sequence."""
    if len(recorded) != len(tokens):
        advice = (
            "record each call of generate() in a session of its own, with a key-value cache, and give all sequences "
            "that it returned"
        )
        if len(tokens) < len(recorded) and recorded.lengths[len(tokens)] == recorded.lengths[0] + 1:
            advice = (
                "each forward of generate() ran the whole sequence again, without a key-value cache. Leave use_cache "
                "on, and call model.eval() before: activation checkpointing takes the cache away in training mode"
            )
        raise BatchMismatchError(
            f"{len(recorded)} sequences were recorded, and the rollout has {len(tokens)}; {advice}"
        )
    for s, (row, length) in enumerate(zip(tokens, recorded.lengths.tolist(), strict=True)):
        seen = recorded.tokens(s)[: len(row) - 1]
        differs = seen != row[: len(seen)]
        if differs.any():
            position = int(differs.argmax())
            raise BatchMismatchError(
                f"sequence {s}, position {position}: token {int(row[position])} in the rollout, {int(seen[position])} "
                "recorded. Give the sequences in the order of generate(), and an attention_mask if they are padded"
            )
        if len(seen) < len(row) - 1:
            raise BatchMismatchError(
                f"sequence {s} has {len(row)} tokens in the rollout and {length} were recorded; expected all but the "
                "last. Give an attention_mask if the rest is padding"
            )
    return recorded.truncated([len(row) - 1 for row in tokens])
