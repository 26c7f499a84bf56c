"""The routing trace: which experts every token of a set of sequences was sent to.

Axis letters: S sequences, N packed token rows, L routed layers, K picks.

    sequence 0         sequence 1
    ┌───────────────┬──────────────────┐
    │ t0 t1 t2 … tn │ t0 t1 …          │   token_ids_N
    │ r0 r1 r2 … ── │ r0 r1 …       ── │   expert_ids_NLK, "──" where valid_N is False
    └───────────────┴──────────────────┘
    offsets[0]      offsets[1]         offsets[2]

Row p of a sequence is the routing of *input position p*, which produced the logits of token p + 1. A sequence of T
tokens has T rows; the last sampled token was never an input, so its row is marked absent. Absence is a bit in `valid_N`
and never an expert id, because 0 is an expert.

This room is the only one that cuts, joins or reorders routes; nothing outside it indexes `expert_ids_NLK` by sequence.
Other decisions of the rollout go with their rows, as `streams`: gate weights, sampling masks, choices of indexers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import MOST_INT32, as_array, as_int32, as_mask, as_numbers, whole_number
from foreroute.errors import TraceContentError, shown
from foreroute.trace.checks import MISSING, as_offsets, check_rows, join_ranges, put_ids
from foreroute.trace.spec import LayerKind, RoutedLayer, RoutingSpec, as_layers
from foreroute.trace.streams import SAMPLING, DecisionStream, check_name, streams_of_all

NO_VERSION = -1
"""The weight version of a row that was never computed, or whose source did not state one."""
MOST_VALUES = 16
"""Distinct values of a fact that joined traces keep, of those on which their parts do not agree."""
_MORE = "…"


class PaddedRoutes(NamedTuple):
    """Sequences as a padded batch, one in each row."""

    token_ids_BT: NDArray[np.int32]  # int32 [B, T], 0 where no token is
    # int16 [B, T, L, K], int32 above 32,768 experts; -1 in all of a position without a route, and in the last columns
    # of a layer with fewer picks
    expert_ids_BTLK: NDArray[Any]
    attention_mask_BT: NDArray[np.bool_]  # bool [B, T], where the tokens are


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Routes of S sequences with N rows in all, bound to the tokens and weights they were computed from.

    Build one with `from_sequences`, `from_padded`, `foreroute.load` or a recording; the constructor trusts its arrays.

    Attributes:
        spec: experts, picks and layer table of the model.
        expert_ids_NLK: uint8 or uint16 [N, L, K] (`spec.id_dtype`), logical expert ids in pick order; 0 where absent,
            and `spec.filler` in the last columns of a layer with fewer picks than K.
        valid_N: bool [N], False where a row was never computed.
        token_ids_N: int32 [N], the input token of each row.
        weight_versions_N: int32 [N], the weights of each row; `NO_VERSION` where absent or not stated.
        offsets: int64 [S + 1], sequence s owns the rows `offsets[s]:offsets[s + 1]`.
        provenance: what made the trace, as short strings (engine, version, source).
        pick_order_kept: False when a file dropped the order of picks; the ids of a row then ascend.
        streams: the other decisions of the rollout by name, such as SAMPLING and INDEXER, each with N rows.
    """

    spec: RoutingSpec
    expert_ids_NLK: NDArray[Any]
    valid_N: NDArray[np.bool_]
    token_ids_N: NDArray[np.int32]
    weight_versions_N: NDArray[np.int32]
    offsets: NDArray[np.int64]
    provenance: Mapping[str, str] = field(default_factory=dict)
    pick_order_kept: bool = True
    streams: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_sequences(
        cls,
        spec: RoutingSpec,
        token_ids: Sequence[ArrayLike],
        expert_ids: Sequence[ArrayLike],
        *,
        weight_version: int = NO_VERSION,
        provenance: Mapping[str, str] | None = None,
    ) -> RoutingTrace:
        """Pack one array of tokens and one of routes per sequence. As in `from_padded`, shifted routes are not noticed.

        Args:
            spec: the model the routes come from.
            token_ids: S integer arrays [T].
            expert_ids: S integer arrays [R, L, K], R <= T: the last T - R tokens were never routed (engines return T -
                1 rows). A row of -1 throughout was not recorded; -1 also stands behind the picks of a layer with fewer.
            weight_version: of the weights that computed the routes.
            provenance: what made the trace.

        Raises:
            TraceContentError: for ids out of range, an expert picked twice in a row, or shapes that disagree.
        """
        tokens = [as_array(t, name=f"token_ids[{s}]") for s, t in enumerate(token_ids)]
        routes = [as_array(r, name=f"expert_ids[{s}]") for s, r in enumerate(expert_ids)]
        version = whole_number(weight_version, name="weight version", least=NO_VERSION, most=MOST_INT32)
        return cls.from_rows(
            spec,
            tokens,
            routes,
            valid=[np.arange(t.size) < (len(r) if r.ndim else 0) for t, r in zip(tokens, routes, strict=False)],
            weight_versions=[np.full(t.size, version) for t in tokens],
            provenance=provenance,
        )

    @classmethod
    def from_rows(
        cls,
        spec: RoutingSpec,
        token_ids: Sequence[ArrayLike],
        expert_ids: Sequence[ArrayLike],
        *,
        valid: Sequence[ArrayLike],
        weight_versions: Sequence[ArrayLike],
        provenance: Mapping[str, str] | None = None,
    ) -> RoutingTrace:
        """Pack sequences whose routed rows may lie anywhere and may come from several weight versions.

        Args:
            spec: as in `from_sequences`.
            token_ids: as in `from_sequences`.
            expert_ids: as in `from_sequences`, with rows of any content where `valid` is False.
            valid: S bool arrays [T], True where a row was routed.
            weight_versions: S integer arrays [T], from 0, or `NO_VERSION`; not looked at where `valid` is False.
            provenance: what made the trace.

        Raises:
            TraceContentError: as `from_sequences`.
        """
        counts = {len(token_ids), len(expert_ids), len(valid), len(weight_versions)}
        if len(counts) != 1:
            raise TraceContentError(f"got tokens, routes, validity and versions of {sorted(counts)} sequences")
        # Sequence by sequence, so that an error names the one that is wrong; rows are checked at once, when packed.
        tokens = [np.zeros(0, np.int32), *(as_int32(t, name=f"token_ids[{s}]") for s, t in enumerate(token_ids))]
        masks = [as_mask(v, name=f"valid[{s}]") for s, v in enumerate(valid)]
        offsets = as_offsets(np.array([len(t) for t in tokens[1:]], np.int64))
        valid_N, versions_N = np.zeros(int(offsets[-1]), np.bool_), np.full(int(offsets[-1]), NO_VERSION, np.int32)
        # rows without a route hold zeros, whatever was handed in for them
        ids_NLK = np.zeros((len(valid_N), spec.num_layers, spec.top_k), spec.id_dtype)
        for s, (m, start, stop) in enumerate(zip(masks, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            v = as_array(weight_versions[s], name=f"weight_versions[{s}]")
            r = as_array(expert_ids[s], name=f"expert_ids[{s}]")
            fits = r.ndim == 3 and m.ndim == v.ndim == 1 and stop - start == m.size == v.size >= len(r)
            if not fits or m[len(r) :].any():
                raise TraceContentError(
                    f"sequence {s} has {stop - start} tokens, routes of shape {r.shape}, validity of shape {m.shape} "
                    f"and versions of shape {v.shape}; expected one row of each for every token, or fewer routes. "
                    "Check that prompt and response tokens are both passed"
                )
            with_rows = slice(start, start + len(r))
            valid_N[start:stop] = m
            put_ids(r, valid_N[with_rows], ids_NLK[with_rows], spec, name=f"expert_ids[{s}]")
            is_routed = valid_N[start:stop]
            stated = np.where(is_routed, v, v.dtype.type(0))  # others are not looked at
            stated = as_int32(stated, name=f"weight_versions[{s}]", least=NO_VERSION)
            versions_N[start:stop][is_routed] = stated[is_routed]
        check_rows(ids_NLK, valid_N, offsets, spec)
        return cls(
            spec=spec,
            expert_ids_NLK=ids_NLK,
            valid_N=valid_N,
            token_ids_N=np.concatenate(tokens),
            weight_versions_N=versions_N,
            offsets=offsets,
            provenance=dict(provenance or {}),
        )

    @classmethod
    def from_padded(
        cls,
        spec: RoutingSpec,
        token_ids_BT: ArrayLike,
        expert_ids_BTLK: ArrayLike,
        attention_mask: ArrayLike | None = None,
        *,
        weight_version: int = NO_VERSION,
    ) -> RoutingTrace:
        """Take the sequences out of a padded batch, one in each row: tensors of torch, on any device, or arrays.

        Nothing tells whether routes are of these tokens: those shifted by a row, or of layers in another order, replay
        without an error. Compare a first batch with the model's own by `foreroute.compare`.

        Args:
            spec: the model the routes come from.
            token_ids_BT: integers [B, T].
            expert_ids_BTLK: integers of any width [B, T, L, K], the routes of each input position. A position of -1
                throughout was not recorded, as that of the last sampled token; padding holds anything.
            attention_mask: 1 for a token and 0 for padding, [B, T], wherever the padding is; or lengths, integers [B],
                of sequences with their padding on the right. Every place has a token by default.
            weight_version: the version of the weights that computed the routes.

        Raises:
            TraceContentError: for ids out of range, an expert picked twice in a row, or shapes that disagree.
        """
        tokens, routes = as_array(token_ids_BT, name="token_ids"), as_array(expert_ids_BTLK, name="expert_ids")
        kept = np.ones(tokens.shape, np.bool_) if attention_mask is None else _kept_places(attention_mask, tokens)
        if tokens.ndim != 2 or routes.ndim != 4 or not tokens.shape == routes.shape[:2] == kept.shape:
            raise TraceContentError(
                f"token_ids has shape {tokens.shape}, expert_ids {routes.shape}, attention_mask {kept.shape}; expected "
                "[B, T], [B, T, layers, picks] and [B, T], or B lengths. Engines return T - 1 rows: append a row of -1"
            )
        return cls.from_sequences(
            spec,
            [row[own] for row, own in zip(tokens, kept, strict=True)],
            [row[own] for row, own in zip(routes, kept, strict=True)],
            weight_version=weight_version,
        )

    @classmethod
    def unrouted(cls, spec: RoutingSpec, token_ids: Sequence[ArrayLike]) -> RoutingTrace:
        """Make rows for tokens that no router has seen, to be joined with `continued_by`."""
        empty = np.zeros((0, spec.num_layers, spec.top_k), spec.id_dtype)
        return cls.from_sequences(spec, token_ids, [empty] * len(token_ids))

    def __len__(self) -> int:
        """S, the number of sequences."""
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        s, versions = self.spec, self.versions
        listed = f"{versions}" if len(versions) <= 8 else f"{len(versions)} from {versions[0]} to {versions[-1]}"
        return (
            f"RoutingTrace({len(self)} sequences, {self.num_rows} rows of which {int(self.valid_N.sum())} routed, "
            f"{s.num_layers} layers, {s.routing}, weight versions {listed})"
        )

    @property
    def num_rows(self) -> int:
        """N, the number of token rows, absent ones included."""
        return len(self.token_ids_N)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [S], tokens per sequence."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def positions_N(self) -> NDArray[np.int64]:
        """int64 [N], the position of each row in its sequence."""
        return np.arange(self.num_rows) - np.repeat(self.offsets[:-1], self.lengths)

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions of the routed rows, ascending."""
        return tuple(int(v) for v in np.unique(self.weight_versions_N[self.valid_N]))

    def tokens(self, sequence: int) -> NDArray[np.int32]:
        """Return the tokens of one sequence, int32 [T]."""
        return self.token_ids_N[self.offsets[sequence] : self.offsets[sequence + 1]]

    def to_padded(self, attention_mask: ArrayLike | None = None) -> PaddedRoutes:
        """Lay the sequences out as a padded batch, one in each row, without weight versions, provenance and streams.

        Args:
            attention_mask: [B, T], with as many ones in a row as its sequence has tokens; by default tokens are on the
                left and padding goes up to the longest.

        Raises:
            TraceContentError: when the mask has other numbers of tokens.
        """
        lengths = self.lengths
        mask = np.arange(lengths.max(initial=0)) < lengths[:, None] if attention_mask is None else attention_mask
        kept = as_mask(mask, name="attention_mask")
        if kept.ndim != 2 or not np.array_equal(kept.sum(axis=1), lengths):
            raise TraceContentError(
                f"attention_mask has shape {kept.shape}, with {kept.sum(axis=-1).reshape(-1)[:8].tolist()} tokens in "
                f"its rows; expected those of the {len(self)} sequences, {lengths[:8].tolist()}"
            )
        ids_NLK = self.expert_ids_NLK.astype(np.int16 if self.spec.num_experts <= 1 << 15 else np.int32)
        if self.spec.sizes:
            ids_NLK[:, ~self.spec.is_pick_LK] = MISSING
        ids_NLK[~self.valid_N] = MISSING
        tokens, routes = np.zeros(kept.shape, np.int32), np.full(kept.shape + ids_NLK.shape[1:], MISSING, ids_NLK.dtype)
        tokens[kept], routes[kept] = self.token_ids_N, ids_NLK
        return PaddedRoutes(tokens, routes, kept)

    def select(self, sequences: ArrayLike) -> RoutingTrace:
        """Return the given sequences, integers [S'] from 0 to S - 1, in that order; one may be taken several times."""
        chosen = as_numbers(sequences, name="sequences", below=len(self))
        lengths = self.lengths[chosen]
        return self.take_rows(join_ranges(self.offsets[:-1][chosen], lengths), lengths)

    def select_layers(self, layers: Iterable[RoutedLayer]) -> RoutingTrace:
        """Return the given layers, in the given order; the layer table shrinks with them.

        Raises:
            TraceContentError: when something else than routed layers is given.
            SpecMismatchError: when a layer is not in the table.
        """
        chosen = as_layers(layers)
        spec, positions = self.spec.select(chosen), self.spec.positions(chosen)
        # the columns and the type of the layer with most picks and experts; fillers of a wider type become those of it
        ids_NLK = self.expert_ids_NLK[:, positions, : spec.top_k].astype(spec.id_dtype, copy=False)
        return replace(self, spec=spec, expert_ids_NLK=np.ascontiguousarray(ids_NLK))

    def truncated(self, lengths: ArrayLike) -> RoutingTrace:
        """Return the first `lengths[s]` rows of each sequence, without the sampling masks of tokens that are cut off.

        Raises:
            TraceContentError: unless there is a whole number for each sequence, from 0 to its length.
        """
        kept = as_numbers(lengths, name="lengths", below=self.lengths + 1, count=len(self))
        cut = self.take_rows(join_ranges(self.offsets[:-1], kept), kept)
        if SAMPLING not in cut.streams:
            return cut
        # Row p holds the set that token p + 1 was drawn from. That token is gone where a sequence was cut.
        last = cut.offsets[1:][(kept > 0) & (kept < self.lengths)] - 1
        return replace(cut, streams={**cut.streams, SAMPLING: cut.streams[SAMPLING].without(last)})

    def continued_by(self, suffix: RoutingTrace) -> RoutingTrace:
        """Append to each sequence that of the same number in `suffix` (a later turn, a resumed rollout)."""
        start, suffix = on_common_layers([self, suffix], what="the continuation")
        if len(suffix) != len(self):
            raise TraceContentError(f"{len(self)} sequences cannot be continued by {len(suffix)}; expected as many")
        both = concatenate([start, suffix])
        # sequences 0, S, 1, S + 1, ...: each is followed by its continuation, and every second boundary goes
        order = np.arange(2 * len(self)).reshape(2, -1).T.reshape(-1)
        joined = both.select(order)
        return replace(joined, offsets=joined.offsets[::2])

    def with_weight_version(self, version: int) -> RoutingTrace:
        """Return the same routes, all stamped with one weight version, from 0, or `NO_VERSION`."""
        whole = whole_number(version, name="weight version", least=NO_VERSION, most=MOST_INT32)
        return replace(self, weight_versions_N=np.where(self.valid_N, whole, NO_VERSION).astype(np.int32))

    def without_pick_order(self) -> RoutingTrace:
        """Return the same sets of experts, ids ascending in each row, as files of sets return them."""
        order_NLK = np.argsort(self.expert_ids_NLK, axis=-1, kind="stable")
        return replace(
            self, expert_ids_NLK=np.take_along_axis(self.expert_ids_NLK, order_NLK, axis=-1), pick_order_kept=False
        )

    def with_stream(self, name: str, stream: DecisionStream) -> RoutingTrace:
        """Add a stream with N rows under a name of lower-case letters and underscores, or replace the one of that name.

        Raises:
            TraceContentError: when there can be no such name, or the stream cannot belong to these rows.
        """
        if not isinstance(stream, DecisionStream):
            raise TraceContentError(f"the stream is {shown(stream)}; expected a DecisionStream")
        check_name(name)
        if stream.num_rows != self.num_rows:
            raise TraceContentError(f"a stream has {stream.num_rows} rows for {self.num_rows} of the trace")
        stream.check_sets()
        return replace(self, streams={**self.streams, name: stream})

    def without_streams(self, *names: str) -> RoutingTrace:
        """Return the same trace without the named streams, or without any when none is named."""
        gone = names or tuple(self.streams)
        return replace(self, streams={name: each for name, each in self.streams.items() if name not in gone})

    def with_provenance(self, **facts: str) -> RoutingTrace:
        """Return the same routes with further facts about what made them."""
        return replace(self, provenance={**self.provenance, **facts})

    def equals(self, other: RoutingTrace) -> bool:
        """Say whether all but the provenance and the model's name is the same, pick order included, bit for bit."""
        return digest(self) == digest(other)

    def take_rows(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> RoutingTrace:
        """Return sequences of the given lengths, int64 [S'], made of the given rows, int64 [N'], with all streams."""
        return replace(
            self,
            expert_ids_NLK=self.expert_ids_NLK[rows],
            valid_N=self.valid_N[rows],
            token_ids_N=self.token_ids_N[rows],
            weight_versions_N=self.weight_versions_N[rows],
            offsets=as_offsets(lengths),
            streams={name: stream.take(rows) for name, stream in self.streams.items()},
        )


def digest(trace: RoutingTrace) -> str:
    """Return a BLAKE2b-128 digest of all but the provenance and the model's name, as hex.

    The same routes have the same digest wherever they came from. A trace read from a file of sets has the digest of
    `trace.without_pick_order()`, not that of the trace that was recorded.
    """
    spec, streams = trace.spec, sorted(trace.streams.items())
    layers: list[list[Any]] = [[layer.index, layer.kind.value] for layer in spec.layers]
    if spec.sizes:
        layers = [[*layer, *size] for layer, size in zip(layers, spec.sizes, strict=True)]
    beside = [[name, "sets", stream.facts()] for name, stream in streams]
    facts = json.dumps([spec.num_experts, spec.top_k, layers, trace.pick_order_kept, beside])
    arrays: list[NDArray[Any]] = [
        trace.offsets,
        trace.token_ids_N,
        trace.weight_versions_N,
        trace.valid_N,
        trace.expert_ids_NLK,
    ]
    # provenance and the model's name are left out: the same routes are the same wherever they came from
    arrays += [array for _, stream in streams for array in stream.arrays().values()]
    from foreroute.files.container import blake2b_hex

    return blake2b_hex(facts.encode(), *(np.asarray(array, array.dtype.newbyteorder("<")) for array in arrays))


def concatenate(traces: Iterable[RoutingTrace]) -> RoutingTrace:
    """Join all sequences of traces, in order.

    What one lacks, all lose: the order of picks, and layers that look experts up by token, which a model knows.

    Raises:
        TraceContentError: when there is no trace to join, or some have a stream and others do not.
        SpecMismatchError: when the traces come from different models.
    """
    parts = list(traces)
    if not parts:
        raise TraceContentError("there is no trace to concatenate; pass at least one")
    parts = on_common_layers(parts, what="a trace to concatenate")
    # One flag speaks for all rows: what one part has lost, the others must give up too.
    if not all(part.pick_order_kept for part in parts):
        parts = [part.without_pick_order() if part.pick_order_kept else part for part in parts]
    streams = {}
    for name in dict.fromkeys(name for part in parts for name in part.streams):
        first, *others = streams_of_all(name, [p.streams.get(name) for p in parts], [p.valid_N for p in parts])
        streams[name] = first.join(others)
    return RoutingTrace(
        spec=parts[0].spec,
        expert_ids_NLK=np.concatenate([p.expert_ids_NLK for p in parts]),
        valid_N=np.concatenate([p.valid_N for p in parts]),
        token_ids_N=np.concatenate([p.token_ids_N for p in parts]),
        weight_versions_N=np.concatenate([p.weight_versions_N for p in parts]),
        offsets=as_offsets(np.concatenate([p.lengths for p in parts])),
        provenance=_common_provenance([p.provenance for p in parts]),
        pick_order_kept=parts[0].pick_order_kept,
        streams=streams,
    )


def on_common_layers(traces: Sequence[RoutingTrace], *, what: str) -> list[RoutingTrace]:
    """Return traces of one model, without the layers of the kind `hash` that one of them lacks. `what` names others."""
    tables = [{layer for layer in trace.spec.layers if layer.kind is LayerKind.HASH} for trace in traces]
    partial = {layer for own in tables for layer in own if not all(layer in each for each in tables)}
    alike = [
        trace.select_layers([layer for layer in trace.spec.layers if layer not in partial])
        if partial & own and len(partial) < trace.spec.num_layers
        else trace
        for trace, own in zip(traces, tables, strict=True)
    ]
    for trace in alike[1:]:
        alike[0].spec.require_same(trace.spec, what=what)
    return alike


def _kept_places(attention_mask: ArrayLike, tokens_BT: NDArray[Any]) -> NDArray[np.bool_]:
    """Find the tokens of a padded batch by its mask or its lengths: bool [B, T]."""
    given = as_array(attention_mask, name="attention_mask")
    if given.ndim != 1 or tokens_BT.ndim != 2:
        return as_mask(given, name="attention_mask")
    width = tokens_BT.shape[1]
    return np.arange(width) < as_numbers(given, name="lengths in attention_mask", below=width + 1)[:, None]


def _common_provenance(all_facts: list[Mapping[str, str]]) -> dict[str, str]:
    """Return the facts on which the parts agree, and every distinct value of others, `MOST_VALUES` at most."""
    keys = dict.fromkeys(key for facts in all_facts for key in facts)
    return {key: _join_facts([facts[key] for facts in all_facts if key in facts]) for key in keys}


def _join_facts(values: list[str]) -> str:
    """Join the distinct values of one fact."""
    # a part may be a joined trace itself
    distinct = list(dict.fromkeys(value for joined in values for value in joined.split(" | ")))
    kept = [value for value in distinct if value != _MORE][:MOST_VALUES]
    return " | ".join([*kept, _MORE] if len(kept) < len(distinct) else kept)
