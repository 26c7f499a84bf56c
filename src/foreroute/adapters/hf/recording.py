"""Routes as a model takes them: whole batches, or a prefill and the decode steps that follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from foreroute.adapters.hf.batch import Batch, kept_of
from foreroute.adapters.hf.passes import Listener
from foreroute.adapters.overriding import overridden
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.replay import PassNotes, Watch, required
from foreroute.trace import NO_VERSION, RoutingSpec, RoutingTrace, concatenate


@dataclass(frozen=True)
class RecordedPass:
    """One forward: its tokens, and what was selected (by which margin, with which weights), still on the device."""

    batch: Batch
    ids_LRK: Tensor
    margin_LR: Tensor | None
    weights_LRK: Tensor | None


class Recording(Listener):
    """Collects the routes of every forward in a `record()` session.

    Forwards that start without a key-value cache begin new sequences; forwards with one continue the sequences of the
    forward before them, row by row. Nothing is copied to the host before `trace()` is called.
    """

    def __init__(
        self, spec: RoutingSpec, weight_version: int, provenance: dict[str, str], *, margins: bool, weights: bool
    ) -> None:
        self._spec = spec
        self._version = weight_version
        self._provenance = provenance
        self._with_margins = margins
        self.watch = Watch(ids=True, own=margins, weights=weights)
        self._passes: list[RecordedPass] = []

    def end(self, batch: Batch, notes: PassNotes) -> None:
        """Keeps the pass; one that failed is forgotten."""
        batch.keep()
        margin_LR = notes.margin_LR if self._with_margins else None
        weights_LRK = notes.weights_LRK if self.watch.weights else None
        self._passes.append(RecordedPass(batch, required(notes.ids_LRK), margin_LR, weights_LRK))

    def trace(self) -> RoutingTrace:
        """Everything recorded so far, in the order of the forwards, of their rows, and of the sequences in a row.

        Padding before and after the prompt is left out. The last token that `generate` sampled was no input, and what
        a finished sequence goes on with is not known to be padding: `rollout` adds the one and leaves out the other.
        Rows carry the weight version given to `record()`.

        Raises:
            ReplayError: when no forward ran in the session.
        """
        if not self._passes:
            raise ReplayError("nothing was recorded: no forward of the attached model ran in the record() session")
        traces = [self._trace_of(group) for group in self._groups()]
        return concatenate(traces).with_weight_version(self._version).with_provenance(**self._provenance)

    def rollout(
        self, sequences: Tensor | NDArray[np.integer] | Sequence[ArrayLike], attention_mask: ArrayLike | None = None
    ) -> RoutingTrace:
        """The routes of sequences that were sampled in the session, such as `generate` returns them.

        The last token of each was sampled and never an input, so that it is in the trace without a route. What was fed
        to a sequence after its end is left out. The tokens are compared with those that were recorded.

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
        spec = self._spec
        if self._passes or any(len(each) > 1 for each in tokens):
            inputs = _inputs_of(self.trace(), tokens)
        else:  # of one token each, which nothing had to be computed from
            inputs = RoutingTrace.unrouted(spec, [each[:0] for each in tokens])
        return inputs.continued_by(RoutingTrace.unrouted(spec, [each[-1:] for each in tokens]))

    def margins_NL(self) -> NDArray[np.float32]:
        """float32 [N, L]: K-th minus (K+1)-th selection score of each row of `trace()`, in the router's own scale.

        Raises:
            ReplayError: when the session was not opened with `margins=True`.
        """
        if not self._with_margins or not self._passes:
            raise ReplayError("no margins were recorded; open the session with record(margins=True) and run a forward")
        parts = []
        for group in self._groups():
            kept_BT = _joined_mask(group)
            margins_LBT = [
                np.concatenate([required(p.margin_LR)[layer].cpu().numpy().reshape(len(kept_BT), -1) for p in group], 1)
                for layer in range(self._spec.num_layers)
            ]
            parts.append(np.stack([m[kept_BT] for m in margins_LBT], axis=-1))
        return np.concatenate(parts).astype(np.float32)

    def _groups(self) -> list[list[RecordedPass]]:
        """Passes that belong to the same sequences."""
        groups: list[list[RecordedPass]] = []
        for recorded in self._passes:
            rows = recorded.batch.shape[0]
            if recorded.batch.past == 0 or not groups:
                groups.append([recorded])
                continue
            first = groups[-1][0].batch
            reached = first.past + sum(p.batch.shape[1] for p in groups[-1])
            if (rows, recorded.batch.past) != (first.shape[0], reached):
                raise ReplayError(
                    f"a forward continues {rows} sequences with {recorded.batch.past} cached positions; the batch "
                    f"before it has {first.shape[0]} of {reached}. Record each batch of sequences, and what "
                    "follows a cache that was cut, in a session of its own"
                )
            groups[-1].append(recorded)
        return groups

    def _trace_of(self, group: list[RecordedPass]) -> RoutingTrace:
        kept_BT = _joined_mask(group)
        tokens_BT = np.concatenate([p.batch.input_ids_BT for p in group], axis=1)
        ids_NLK = self._packed([p.ids_LRK for p in group], kept_BT)
        ends = np.cumsum(_sequence_lengths(group, kept_BT))[:-1]
        trace = RoutingTrace.from_sequences(
            self._spec, np.split(tokens_BT[kept_BT], ends), np.split(ids_NLK, ends), weight_version=NO_VERSION
        )
        if not self.watch.weights:
            return trace
        return trace.with_gate_weights(self._packed([required(p.weights_LRK) for p in group], kept_BT))

    def _packed(self, parts_LRK: list[Tensor], kept_BT: NDArray[np.bool_]) -> NDArray[Any]:
        """[N, L, K], the rows that are kept of forwards that continue each other."""
        shape = (self._spec.num_layers, len(kept_BT), -1, self._spec.top_k)
        joined_LBTK = np.concatenate([part.cpu().numpy().reshape(shape) for part in parts_LRK], axis=2)
        return np.asarray(joined_LBTK.transpose(1, 2, 0, 3)[kept_BT])


def _sequence_lengths(group: list[RecordedPass], kept_BT: NDArray[np.bool_]) -> NDArray[np.int64]:
    starts_BT = group[0].batch.starts_BT
    if starts_BT is None:
        return np.asarray(kept_BT.sum(axis=1))
    if len(group) > 1:
        raise ReplayError(
            "sequences packed into one row cannot be continued with a key-value cache: which of them a later token "
            "belongs to is not known. Record such a batch in one forward"
        )
    return np.diff(np.flatnonzero(starts_BT[kept_BT]), append=kept_BT.sum())


def _joined_mask(group: list[RecordedPass]) -> NDArray[np.bool_]:
    return np.concatenate([p.batch.kept_BT for p in group], axis=1)


@contextmanager
def refusing_beams(model: nn.Module) -> Iterator[None]:
    """Have `model.generate` refuse to sample in beams while the context is open."""
    if not callable(getattr(model, "generate", None)):
        yield
        return

    def generate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        require_no_beams(model, args, kwargs)
        return original(*args, **kwargs)

    with overridden(model, "generate", generate):
        yield


def require_no_beams(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `ReplayError` if a call of `model.generate` would have rows of a batch change places."""
    given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    own = getattr(model, "generation_config", None)
    stated = [kwargs.get("num_beams"), *(getattr(config, "num_beams", None) for config in (given, own))]
    num_beams = next((number for number in stated if isinstance(number, int)), 1)
    if num_beams > 1:
        raise ReplayError(
            f"generate() was asked for num_beams={num_beams}: beams change places from token to token, so that what a "
            "router did for a row of the batch is not what it did for the sequence that is returned. Sample with "
            "num_beams=1, or record one forward over what the beam search returned"
        )


def _tokens_of(
    sequences: Tensor | NDArray[np.integer] | Sequence[ArrayLike], attention_mask: ArrayLike | None
) -> list[NDArray[np.int64]]:
    """B arrays [T], each with a token at least."""
    if isinstance(sequences, list | tuple):
        if attention_mask is not None:
            raise BatchMismatchError("sequences in a list have no padding; give no attention_mask with them")
        rows = [_on_host(row) for row in sequences]
    else:
        rows_BT = _on_host(sequences)
        if rows_BT.ndim != 2:
            raise BatchMismatchError(
                f"sequences are a {type(sequences).__name__} of shape {rows_BT.shape}; expected integers [B, T], such "
                "as generate() returns (or has in its `sequences`), or a list of B integer arrays [T]"
            )
        rows = list(rows_BT)
        if attention_mask is not None:
            rows = [row[kept] for row, kept in zip(rows, _kept(attention_mask, rows_BT.shape), strict=True)]
    for s, row in enumerate(rows):
        if row.ndim != 1 or row.dtype.kind not in "iu" or not len(row):
            raise BatchMismatchError(
                f"sequence {s} is {row.dtype} of shape {row.shape}; expected one token at least, integers [T]"
            )
    return [row.astype(np.int64) for row in rows]


def _kept(attention_mask: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    mask = torch.as_tensor(attention_mask)
    if mask.shape != shape:
        raise BatchMismatchError(
            f"attention_mask is {tuple(mask.shape)} and the sequences are {shape}; expected the mask of prompts and "
            "responses: 0 for padding before a prompt, and for what follows the end of a response"
        )
    kept_BT = kept_of(mask, shape)
    return np.ones(shape, np.bool_) if kept_BT is None else kept_BT


def _on_host(values: Any) -> NDArray[Any]:
    try:
        return np.asarray(values.detach().cpu().numpy() if isinstance(values, Tensor) else values)
    except (TypeError, ValueError) as error:
        raise BatchMismatchError(f"a {type(values).__name__} holds no tokens ({error}); expected integers") from error


def _inputs_of(recorded: RoutingTrace, tokens: Sequence[NDArray[np.int64]]) -> RoutingTrace:
    """The rows of all tokens but the last of each sequence."""
    if len(recorded) != len(tokens):
        raise BatchMismatchError(
            f"{len(recorded)} sequences were recorded, and the rollout has {len(tokens)}; record each call of "
            "generate() in a session of its own, with a key-value cache, and give all sequences that it returned"
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
