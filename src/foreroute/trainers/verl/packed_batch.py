"""A micro-batch of verl without padding, on its device: where responses are, and its routes as forwards replay them.

Nothing here waits for the device. What only values can tell is a bool there, read later.

Axis letters: S sequences, N packed token rows, L routed layers, K picks, R rows of a forward on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from foreroute.capture.arrays import columns_of
from foreroute.core.deferred_checks import DeferredChecks
from foreroute.core.passes import signed_dtype
from foreroute.errors import BatchMismatchError, CaptureError, ReplayError, shown
from foreroute.replay import Policy, ReplayRows
from foreroute.replay.rows import PlacedRows, to_device
from foreroute.trace import NO_VERSION, RoutingSpec, RoutingTrace

FIELD = "routed_experts"
"""The name of the field of routes, verl's own."""


class PackedBatch:
    """The sequences of a batch with responses, one behind the other."""

    def __init__(self, batch: Any) -> None:
        self.fields = fields_of(batch)
        ids = field_of(self.fields, "input_ids")
        if not ids.is_nested:
            raise CaptureError(
                "input_ids are padded; expected them nested, as verl's left_right_2_no_padding leaves them"
            )
        self.tokens_N: Tensor = ids.values()
        self.offsets: Tensor = ids.offsets().long()  # [S + 1], first rows of the sequences, and N
        num_rows, num_sequences, device = len(self.tokens_N), len(ids), self.tokens_N.device
        self._row_N = torch.arange(num_rows, device=device)
        numbers_S = torch.arange(num_sequences, device=device)
        # the host knows how many rows there are, and need not ask for them
        self.number_N = numbers_S.repeat_interleave(self.offsets.diff(), output_size=num_rows)
        # what `require_true` refuses is collected in `wrong`
        self._responses_S, self.wrong = self._lengths_of_responses()
        self.wrong = self.wrong | (self._responses_S > self.offsets.diff()).any()
        # the number of each row's token in its response; below 0 in a prompt
        self.index_N: Tensor = self._row_N - (self.offsets[1:] - self._responses_S)[self.number_N]

    @property
    def is_first_N(self) -> Tensor:
        """Bool [N], first tokens of sequences."""
        return self._row_N == self.offsets[self.number_N]

    def gather_field(self, name: str) -> Tensor:
        """Give each row its entry [N] of a field that has one for each token of a response; arbitrary in prompts."""
        values = field_of(self.fields, name)
        if len(values) != len(self._responses_S):
            raise CaptureError(
                f"{name} has {len(values)} rows for {len(self._responses_S)} responses; expected as many"
            )
        if values.is_nested:
            flat, begins_S, ends_S = values.values(), values.offsets()[:-1], values.offsets()[1:]
        else:
            flat, width = values.reshape(-1), values.shape[1]
            begins_S = torch.arange(0, len(flat), width, device=flat.device) if width else self.offsets[:-1] * 0
            ends_S = begins_S + width
        self.wrong = self.wrong | (ends_S - begins_S < self._responses_S).any()
        if not len(flat):
            return torch.zeros(len(self.tokens_N), dtype=flat.dtype, device=flat.device)
        entries_N: Tensor = flat[(begins_S[self.number_N] + self.index_N).clamp(0, len(flat) - 1)]
        return entries_N

    @cached_property
    def trained_N(self) -> Tensor:
        """Bool [N], tokens that were sampled and are trained on."""
        mask_N, is_response_N = self.gather_field("response_mask"), self.index_N >= 0
        self.wrong = self.wrong | (is_response_N & _is_no_mask(mask_N)).any()
        return is_response_N & (mask_N == 1)

    def find_missing(self, valid_N: Tensor) -> Tensor:
        """Give bool [N], rows without a route that a trained token depends on: those before the last one trained."""
        last_S = torch.full_like(self._responses_S, -1)
        trained_N = torch.where(self.trained_N, self._row_N, -1)
        last_S = last_S.scatter_reduce(0, self.number_N, trained_N, "amax")
        return ~valid_N & (self._row_N < last_S[self.number_N])

    def require_true(self) -> None:
        """Raise `CaptureError` for masks of other numbers, and responses that lie outside of sequences or of fields."""
        if self.wrong.item():
            lengths = f"{self.offsets.diff().tolist()[:8]} tokens, their responses {self._responses_S.tolist()[:8]}"
            raise CaptureError(
                f"sequences of the batch have {lengths}, by response_mask, attention_mask and responses; expected "
                "masks of 0 and 1 alone, tokens without padding between them, and responses that their sequences, and "
                "every field of responses, have room for"
            )

    def _lengths_of_responses(self) -> tuple[Tensor, Tensor]:
        """Give int64 [S], and whether the mask that says so is none."""
        responses = field_of(self.fields, "responses")
        if responses.is_nested:
            return responses.offsets().diff().long(), torch.zeros((), dtype=torch.bool, device=self.tokens_N.device)
        width, mask = responses.shape[1], field_of(self.fields, "attention_mask")
        if not mask.is_nested:
            kept_BT = mask == 1
            # a row of tokens in one piece begins once
            begins_B = (kept_BT[:, 1:] & ~kept_BT[:, :-1]).sum(1) + kept_BT[:, 0]
            return kept_BT[:, mask.shape[1] - width :].sum(1), _is_no_mask(mask).any() | (begins_B > 1).any()
        ends_S1 = mask.offsets().long()
        counts = functional.pad((mask.values() == 1).cumsum(0), (1, 0))
        begins_S = torch.maximum(ends_S1[:-1], ends_S1[1:] - width)
        return counts[ends_S1[1:]] - counts[begins_S], _is_no_mask(mask.values()).any()


def require_routed(trace: RoutingTrace, batch: Any) -> None:
    """Raise `ReplayError` when a row is absent that a trained token depends on.

    A token depends on the rows before it. Rows after the last trained token may be absent: that of the last token,
    those of an answer of a tool at the end, and all of a sequence that only fills the batch up.
    """
    packed = PackedBatch(batch)
    if len(packed.offsets) - 1 != len(trace):
        raise BatchMismatchError(
            f"the trace has {len(trace)} sequences, the batch {len(packed.offsets) - 1}; expected the same"
        )
    missing_N = packed.find_missing(torch.from_numpy(trace.valid_N).to(packed.tokens_N.device))
    packed.require_true()
    if missing_N.any():
        row = int(missing_N.int().argmax())
        begin, end = (int(packed.offsets[packed.number_N[row] + each]) for each in (0, 1))
        last = int(packed.trained_N[begin:end].nonzero()[-1])
        raise ReplayError(
            f"sequence {int(packed.number_N[row])} of the micro-batch has no route at position {row - begin}, and "
            f"trains on tokens up to position {last}: the rollout engine did not return it (a row of zeros is an "
            "absent one)"
        )


class PackedRoutes:
    """verl's field of routes, checked where it is. A Hugging Face model replays it as `foreroute.replay.Routes`."""

    versions = ()  # verl names them for whole sequences, in what it logs

    def __init__(
        self,
        packed: PackedBatch,
        spec: RoutingSpec,
        refuse: Callable[[], object],  # reads the field on the host, and raises what is wrong with it
        *,
        rank: int = 0,  # among those that share the packed rows
        tables: Mapping[int, Tensor] | None = None,  # [vocabulary, K] of layers that look experts up by token
    ) -> None:
        field, number_N = field_of(packed.fields, FIELD), packed.number_N
        values = field.values() if field.is_nested else field
        expected = (len(number_N), (spec.top_k,))
        if not field.is_nested or values.is_floating_point() or (len(values), values.shape[2:]) != expected:
            refuse()
        columns = columns_of(spec.layers, values.shape[1], FIELD)
        first, num_layers = int(columns[0]), len(columns)
        if np.array_equal(columns, np.arange(first, first + num_layers)):
            self._ids_NLK = values[:, first : first + num_layers]  # no copy of the field
        else:
            self._ids_NLK = values.index_select(1, to_device(columns, values.device))
        if tables:
            self._ids_NLK = self._ids_NLK.clone()  # the field is verl's
        written_N = (values != 0).flatten(1).any(1)
        self._valid_N = written_N & (self._ids_NLK != -1).flatten(1).any(1)
        for layer, table_VK in (tables or {}).items():
            self._ids_NLK[:, layer] = table_VK[packed.tokens_N].to(values.dtype)
        ordered_NLK = self._ids_NLK.sort(-1).values
        impossible_NL = (ordered_NLK[..., 0] < 0) | (ordered_NLK[..., -1] >= spec.num_experts)
        impossible_NL |= (ordered_NLK[..., 1:] == ordered_NLK[..., :-1]).any(-1)
        impossible_N = impossible_NL.any(-1) & self._valid_N
        # what gathers by such ids would fail on the device before anybody says why
        self._forced_N = self._valid_N & ~impossible_N
        # zeros stand behind the last route of a sequence alone; of top-1 routes they may be expert 0 before its end
        gap_N = ~written_N[:-1] & (number_N[:-1] == number_N[1:])
        gap_N &= written_N[1:] | (spec.top_k == 1)
        self._wrong = (
            impossible_N.any()
            | gap_N.any()
            | (field.offsets() != packed.offsets).any()
            | packed.find_missing(self._valid_N).any()
            | packed.wrong
        )
        self._packed, self._spec, self._refuse, self._rank = packed, spec, refuse, rank

    def trace(self) -> RoutingTrace:
        """Give the routes as a trace, of a batch on the host. Raises what is wrong with the field."""
        if self._wrong.item():
            self._refuse()
        valid_N = self._valid_N.cpu().numpy()
        return RoutingTrace(
            self._spec,
            self._ids_NLK.masked_fill(~self._valid_N[:, None, None], 0).cpu().numpy().astype(self._spec.id_dtype),
            valid_N,
            self._packed.tokens_N.cpu().numpy().astype(np.int32),
            np.full(len(valid_N), NO_VERSION, np.int32),
            self._packed.offsets.cpu().numpy(),
        )

    def of_pass(self, chunk: int, batch: Any, policy: Policy, checks: DeferredChecks) -> ReplayRows:
        """Give the rows of a forward, whose tokens are compared with those of the batch."""
        (num_rows, width), packed = batch.shape, self._packed
        row_R = torch.arange(batch.num_router_rows, device=batch.device)
        if num_rows == 1:
            # verl pads the packed rows at their end, and under Ulysses cuts them into equal parts, one for each rank
            row_R = row_R + self._rank * width
            is_real_R = row_R < len(packed.tokens_N)
        elif num_rows == len(packed.offsets) - 1:
            sequence_R = row_R // width
            row_R = packed.offsets[:-1][sequence_R] + row_R % width
            is_real_R = row_R < packed.offsets[1:][sequence_R]
        else:
            raise BatchMismatchError(
                f"the forward runs on {list(batch.shape)} [B, T], the micro-batch has {len(packed.offsets) - 1} "
                "sequences; expected all in one row, or a row for each"
            )
        row_R = row_R.where(is_real_R, 0)
        differs = (is_real_R & (batch.input_ids.reshape(-1) != packed.tokens_N[row_R])).any()
        differs = differs | (num_rows > 1 and (packed.offsets.diff() > width).any())
        if policy.missing == "error":  # what is only compared may lack rows, and the host has read it
            checks.add(self._wrong, self._refuse)
        checks.add(differs, lambda: _refuse_other(differs))
        forced_R = is_real_R & self._forced_N[row_R]
        ids_LRK = self._ids_NLK.transpose(0, 1).index_select(1, row_R).to(signed_dtype(self._spec.num_experts))
        return ReplayRows(
            ids_LRK.masked_fill_(~forced_R[:, None], -1),
            real_R=is_real_R,
            counted_R=is_real_R,
            counts=policy.counts,
            loss_mask=lambda: is_real_R.view(batch.shape),
            placed=lambda: self._placed(row_R, is_real_R),
        )

    def _placed(self, row_R: Tensor, is_real_R: Tensor) -> PlacedRows:
        """Give the place of each row in the micro-batch, and what is replayed beside it, also on another rank."""
        packed, num_rows = self._packed, len(self._packed.tokens_N)
        beside = []
        for step in (-1, 1):
            other_R = (row_R + step).clamp(0, num_rows - 1)
            is_beside_R = is_real_R & (other_R != row_R) & (packed.number_N[other_R] == packed.number_N[row_R])
            ids_LRK = self._ids_NLK.transpose(0, 1).index_select(1, other_R).to(signed_dtype(self._spec.num_experts))
            beside.append(ids_LRK.masked_fill_(~(is_beside_R & self._forced_N[other_R])[:, None], -1))
        return PlacedRows(num_rows, row_R.where(is_real_R, num_rows), *beside)


def _refuse_other(differs: Tensor) -> None:
    if differs.item():
        raise BatchMismatchError(
            "the forward runs on other tokens than the micro-batch that brings its routes; hand verl's micro-batches "
            "on as they are"
        )


def fields_of(batch: Any) -> Any:
    """Find what maps names to tensors: a `DataProto` keeps it in its attribute `batch`."""
    fields = batch.batch if hasattr(batch, "non_tensor_batch") else batch
    if not (hasattr(fields, "get") and hasattr(fields, "keys")):
        raise CaptureError(f"{shown(batch)} is no batch of verl; expected a DataProto, a TensorDict or a mapping")
    return fields


def field_of(fields: Any, name: str) -> Any:
    """Find a tensor, plain or nested, in what `fields_of` found. Raises `CaptureError` when it is not there."""
    value = fields.get(name, None)
    if not isinstance(value, Tensor):
        raise CaptureError(
            f"the batch of verl has no {name!r}, only {sorted(map(str, fields.keys()))[:16]}; routes come from a "
            "rollout with actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
        )
    return value


def _is_no_mask(values: Tensor) -> Tensor:
    return (values != 0) & (values != 1)
