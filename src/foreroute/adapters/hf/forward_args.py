"""What a forward call of a Hugging Face model says about its batch, and which rows of a trace that takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.hf.indexers import FoundIndexers
from foreroute.errors import BatchMismatchError, LayoutError
from foreroute.layout import Layout, locate_rows, starts_from_cumulative_lengths, starts_from_positions
from foreroute.replay import (
    WANTED_MASK,
    IndexerRows,
    LateChecks,
    PassRoutes,
    Places,
    Policy,
    ReplayRows,
    faithful_rows,
    kept_by,
    refuse_missing,
    to_device,
)
from foreroute.trace import INDEXER, RoutingTrace

Written = list[tuple[Tensor | None, int]]
"""Tensors, and how often each was written to."""


@dataclass(frozen=True)
class BatchTensors:
    """The arguments of one forward that tell which token is where, still on the device.

    Attributes:
        input_ids_BT: integers [B, T].
        mask: the attention mask, of zeros and ones [B, T' >= T], or None.
        position_ids: integers [B, T] or [1, T], or None.
        cumulative: offsets of packed sequences (`cu_seq_lens_q`), or None.
        past: how many positions the key-value cache already held.
    """

    input_ids_BT: Tensor
    mask: Tensor | None
    position_ids: Tensor | None
    cumulative: Tensor | None
    past: int

    @classmethod
    def of_call(cls, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchTensors:
        """Find them among the arguments of a call whose parameters have these names.

        Raises:
            BatchMismatchError: when the call passes embeddings instead of tokens, or an attention mask that is none of
                tokens.
        """
        given = dict(zip(names, args, strict=False)) | kwargs
        input_ids, mask, positions = (given.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        if not isinstance(input_ids, Tensor):
            raise BatchMismatchError(
                "the forward got no input_ids; pass tokens, so that routes and batch can be checked to belong together"
            )
        if input_ids.ndim != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
            raise BatchMismatchError(f"input_ids are {_described(input_ids)}; expected integers [batch, tokens]")
        if mask is not None and not isinstance(mask, Tensor):
            raise BatchMismatchError(f"attention_mask is a {type(mask).__name__}; {WANTED_MASK}")
        if isinstance(positions, Tensor) and positions.ndim == 1:
            positions = positions[None]
        if not isinstance(positions, Tensor) or positions.ndim != 2:  # three axes of image positions, which do not grow
            positions = None
        cumulative = given.get("cu_seq_lens_q")
        if cumulative is not None:
            _require_offsets(cumulative)
        return cls(input_ids, mask, positions, cumulative, _cached(given.get("past_key_values")))


class ForwardTokens:
    """Tokens of one forward. Copied to the host once, when they are asked for; from the CPU at once.

    Attributes:
        shape: (B, T).
        past: how many positions the key-value cache already held.
        device: where the tokens are.
    """

    def __init__(self, tensors: BatchTensors) -> None:
        self.shape = (tensors.input_ids_BT.shape[0], tensors.input_ids_BT.shape[1])
        self.past = int(tensors.past)
        self.device = tensors.input_ids_BT.device
        self._tensors = tensors

    @classmethod
    def of_call(cls, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardTokens:
        """The batch of a call whose parameters have these names. Raises as `BatchTensors.of_call` and `read`."""
        return cls.read(BatchTensors.of_call(names, args, kwargs))

    @classmethod
    def read(cls, tensors: BatchTensors) -> ForwardTokens:
        """What a forward was called with.

        Raises:
            BatchMismatchError: when mask or positions do not fit the tokens; on another device than the CPU, what only
                their values say is refused when they are asked for.
        """
        batch = cls(tensors)
        _require_shape(tensors.mask, batch.shape)
        if batch.device.type == "cpu":
            _ = batch._on_host
        return batch

    @property
    def input_ids_BT(self) -> NDArray[np.int64]:
        """int64 [B, T]."""
        return self._on_host[0]

    @property
    def mask_BT(self) -> NDArray[np.bool_] | None:
        """Bool [B, T], False where padded, or None when nothing is."""
        return self._on_host[1]

    @property
    def starts_BT(self) -> NDArray[np.bool_] | None:
        """Bool [B, T], the first token of each sequence, or None when every row holds one sequence."""
        return self._on_host[2]

    @property
    def kept_BT(self) -> NDArray[np.bool_]:
        """Bool [B, T], False where padded."""
        return np.ones(self.shape, np.bool_) if self.mask_BT is None else self.mask_BT

    @property
    def cached_padding_B(self) -> NDArray[np.int64]:
        """int64 [B], cached positions that are padding, on the left."""
        return self._on_host[3]

    @property
    def num_slots(self) -> int:
        """B · T."""
        return self.shape[0] * self.shape[1]

    @property
    def versions(self) -> Written:
        """The tensors that were given, and how often each had been written to; none where that is not known."""
        tensors = self._tensors
        given = [tensors.input_ids_BT, tensors.mask, tensors.position_ids, tensors.cumulative]
        # on the CPU they may share memory with arrays of numpy, and of inference nobody counts
        if self.device.type == "cpu" or any(each is not None and each.is_inference() for each in given):
            return []
        return [(each, -1 if each is None else each._version) for each in given]

    def may_hold(self, num_sequences: int) -> bool:
        """Whether a batch of such shapes may hold so many sequences."""
        tensors, (rows, width) = self._tensors, self.shape
        positions, cumulative = tensors.position_ids, tensors.cumulative
        if cumulative is not None:
            return rows == 1 and width > 0 and len(cumulative) > num_sequences
        if positions is not None:
            return width > 0 and positions.shape[1] == width and positions.shape[0] in (1, rows)
        return num_sequences == rows

    def sequences_there(self, num_sequences: int) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """Where the sequences of a batch that may hold so many are, found on its device.

        Returns:
            integers [R], the tokens; bool [R], False where padded; bool [R], the first token of each sequence;
            int64 [R], the sequence of each slot, below `num_sequences`; and bool [] each, what is wrong.
        """
        tensors, (rows, width) = self._tensors, self.shape
        ids_BT, mask, wrong = tensors.input_ids_BT, tensors.mask, []
        kept_BT = torch.ones_like(ids_BT, dtype=torch.bool)
        if mask is not None:
            mask = mask[:, mask.shape[1] - width :]
            kept_BT = mask == 1
            wrong.append((mask != kept_BT).any())
        starts_BT = kept_BT & (kept_BT.cumsum(1) == 1)
        number_BT = torch.arange(rows, device=self.device)[:, None].expand(rows, width)
        if tensors.cumulative is not None:
            ends = tensors.cumulative.long()
            wrong.append((ends.diff() < 0).any() | (ends[0] != 0) | (ends[-1] != width))
            begins = torch.zeros(width + 1, dtype=torch.bool, device=self.device)
            starts_BT = starts_BT | (kept_BT & begins.scatter(0, ends.clamp(0, width), True)[:-1])
        elif tensors.position_ids is not None:
            starts_BT = starts_BT | (kept_BT & (tensors.position_ids == 0))
        if tensors.cumulative is not None or tensors.position_ids is not None:
            are_packed = (starts_BT.sum(1) > 1).any()
            number_R = starts_BT.reshape(-1).cumsum(0)
            wrong.append(torch.where(are_packed, number_R[-1], rows) != num_sequences)
            number_BT = torch.where(are_packed, number_R.view(rows, width) - 1, number_BT)
            number_BT = number_BT.clamp(0, num_sequences - 1)
        return ids_BT.reshape(-1), kept_BT.reshape(-1), starts_BT.reshape(-1), number_BT.reshape(-1), wrong

    def kept(self) -> ForwardTokens:
        """The batch, to be read later, when whoever gave it may have overwritten what it gave."""
        if "_on_host" in self.__dict__:
            return self
        given, mask = self._tensors, self._tensors.mask
        positions, cumulative = (
            None if each is None else each.clone() for each in (given.position_ids, given.cumulative)
        )
        mask = None if mask is None else mask[:, max(0, mask.shape[1] - self.past - self.shape[1]) :].clone()
        self._tensors = BatchTensors(given.input_ids_BT.clone(), mask, positions, cumulative, given.past)
        return self

    @cached_property
    def _on_host(
        self,
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None, NDArray[np.bool_] | None, NDArray[np.int64]]:
        tensors = self._tensors
        tokens = _to_host(tensors.input_ids_BT).astype(np.int64)  # a copy: what was given may be overwritten
        mask = _kept(tensors.mask, tokens.shape)
        starts = None if tensors.past else _starts(tensors, np.ones(tokens.shape, np.bool_) if mask is None else mask)
        padding = np.zeros(len(tokens), np.int64)
        if tensors.past and tensors.mask is not None:
            padding = (~kept_by(_to_host(tensors.mask[:, : tensors.past]))).sum(axis=1)
        return tokens, mask, starts, padding


class BatchRoutes:
    """The routes of a trace, found for each batch by its tokens.

    Args:
        trace: of the sequences of the batch, in order.
        layout: where they are in it, or None to see it from the batch.
        policy: how to replay.
        indexers: of the model, if it has any.
    """

    def __init__(
        self, trace: RoutingTrace, layout: Layout | None, policy: Policy, indexers: FoundIndexers | None = None
    ) -> None:
        if layout is not None:
            _require_whole(layout, trace)
        self._trace = trace
        self._layout = layout
        self._policy = policy
        self._indexers = indexers
        self._checks = LateChecks()
        self._made: tuple[Written, PassRoutes] | None = None

    @property
    def versions(self) -> tuple[int, ...]:
        """See `foreroute.replay.Routes`."""
        return self._trace.versions

    def of_pass(self, chunk: int, batch: ForwardTokens) -> PassRoutes:
        """Those of a pass that begins. See `foreroute.replay.Routes`.

        Where the batch is on a GPU, it is compared with the trace there, and rows that were made are used again for
        tensors that nobody has written to since.
        """
        if batch.past:
            raise BatchMismatchError(
                f"the forward continues a key-value cache of {batch.past} positions; replay whole sequences, "
                "without a cache"
            )
        given = batch.versions
        if self._made is not None and _are_same(given, self._made[0]):
            return self._made[1]
        choices = None
        if batch.device.type == "cpu" or self._needs_host(batch):
            row_of_slot = self._located(batch)
            choices = self._choices(row_of_slot, batch)
            row_R = to_device(row_of_slot, batch.device)
        else:
            row_R = self._located_there(batch)
        rows = ReplayRows.gather(self._trace, row_R, self._policy, choices)
        made = PassRoutes(rows, lambda: rows.counted_R.view(batch.shape).clone(), rows.drops)
        self._made = given, made
        return made

    def close(self) -> None:
        """Waits for the device where batches were compared there. See `foreroute.replay.Routes`."""
        self._checks.close()

    def _choices(self, row_of_slot: NDArray[np.int64], batch: ForwardTokens) -> IndexerRows | None:
        stream = self._trace.streams.get(INDEXER)
        if stream is None or self._indexers is None:
            return None
        places = Places.of(self._trace.offsets, row_of_slot, batch.shape[1])
        self._indexers.require(places, batch.shape[1])
        choices = IndexerRows(self._indexers.spec, stream, row_of_slot, places)
        if self._policy.missing == "error":
            decided = replace(self._trace, valid_N=self._trace.valid_N & stream.valid_N)
            refuse_missing(decided, row_of_slot, what="choice of indexers")
        return choices

    def _located(self, batch: ForwardTokens) -> NDArray[np.int64]:
        """int64 [R], found on the host, which waits for the batch. Whatever is wrong with it is refused."""
        rows = locate_rows(self._trace, batch.input_ids_BT, batch.mask_BT, batch.starts_BT)
        if self._layout is not None and not np.array_equal(rows, self._layout.rows().row_of_slot_R):
            raise BatchMismatchError(
                f"the layout has the sequences elsewhere than the batch of shape {list(batch.shape)}; lay them out as "
                "the batch is padded or packed, or leave the layout out"
            )
        if self._policy.missing == "error":
            refuse_missing(self._trace, rows)
        return rows

    @cached_property
    def _faithful_N(self) -> NDArray[np.bool_]:
        return faithful_rows(self._trace)

    def _needs_host(self, batch: ForwardTokens) -> bool:
        """Whether rows are to be found on the host: for indexers, and where it is plain that something is wrong."""
        trace, layout, is_wanted = self._trace, self._layout, self._policy.missing == "error"
        return (
            not trace.num_rows
            or (self._indexers is not None and INDEXER in trace.streams)
            or not batch.may_hold(len(trace))
            or (layout is not None and layout.num_slots != batch.num_slots)
            or (is_wanted and bool((trace.valid_N & ~self._faithful_N).any()))
        )

    def _located_there(self, batch: ForwardTokens) -> Tensor:
        """int64 [R], found on the device: as `_located`, which is asked what is wrong when the device has said so."""
        trace, device = self._trace, batch.device
        there = partial(to_device, device=device)
        tokens_R, kept_R, starts_R, number_R, wrong = batch.sequences_there(len(trace))
        count_R, begins_S1 = kept_R.cumsum(0), there(trace.offsets)
        # as many rows after the first of its sequence as tokens were kept since
        row_R = begins_S1[number_R] + count_R - torch.where(starts_R, count_R, 0).cummax(0).values
        within_R = kept_R & (row_R < begins_S1[number_R + 1])
        row_R = torch.where(within_R, row_R, -1)
        routed_R = within_R if trace.valid_N.all() else within_R & there(trace.valid_N)[row_R]
        wrong += [
            (within_R != kept_R).any(),
            (within_R & (there(trace.token_ids_N)[row_R] != tokens_R)).any(),
            routed_R.sum() != int(trace.valid_N.sum()),  # rows with a route that the batch leaves out
        ]
        if self._layout is not None:
            wrong.append((row_R != there(self._layout.rows().row_of_slot_R)).any())
        if self._policy.missing == "error" and not self._faithful_N.all():
            wrong.append((within_R & ~there(self._faithful_N)[row_R]).any())
        self._checks.add(torch.stack(wrong).any(), partial(self._located, batch.kept()))
        return row_R


def _are_same(given: Written, before: Written) -> bool:
    """Whether the same tensors were given, and nobody has written to them in between; False where that is not known."""
    return bool(given) and all(a is b and n == m for (a, n), (b, m) in zip(given, before, strict=False))


def _require_whole(layout: object, trace: RoutingTrace) -> None:
    if not isinstance(layout, Layout):
        raise LayoutError(
            f"layout is a {type(layout).__name__}; expected one of foreroute.layout, of pad(...) or pack(...)"
        )
    if layout.is_split or layout.order == "sbhd":
        raise LayoutError(
            f"the layout is {'split' if layout.is_split else 'sequence first'}; a Hugging Face model takes whole "
            'batches, packed or batch first (pad(..., order="bshd"))'
        )
    if layout.num_rows != trace.num_rows:
        raise BatchMismatchError(
            f"the layout is for {layout.num_rows} packed rows and the trace has {trace.num_rows}; lay out trace.lengths"
        )


def parameter_names(forward: Callable[..., Any]) -> list[str]:
    """The parameters of a forward, in order."""
    return list(inspect.signature(forward).parameters)


def _kept(mask: Tensor | None, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
    """Bool [B, T], False where an attention mask says padding; None where nothing is."""
    if mask is None:
        return None
    _require_shape(mask, shape)
    kept = kept_by(_to_host(mask[:, mask.shape[1] - shape[1] :]))
    return None if kept.all() else kept


def _require_shape(mask: Tensor | None, shape: tuple[int, ...]) -> None:
    if mask is None:
        return
    if mask.ndim == 4:
        raise BatchMismatchError(
            f"attention_mask is {tuple(mask.shape)}, an attention pattern, which does not say what is padding; "
            f"{WANTED_MASK}. `generate` makes such a mask where the key-value cache is static, that is, has room for "
            'the longest sequence from the start: generate with cache_implementation="dynamic", which is the default '
            "of most models"
        )
    if mask.ndim != 2 or mask.shape[0] != shape[0] or mask.shape[1] < shape[1]:
        raise BatchMismatchError(f"attention_mask is {tuple(mask.shape)}; {WANTED_MASK}")


def _starts(tensors: BatchTensors, kept_BT: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    if tensors.cumulative is not None:
        starts_BT = starts_from_cumulative_lengths(_to_host(tensors.cumulative), kept_BT)
    elif tensors.position_ids is not None:
        starts_BT = starts_from_positions(_to_host(tensors.position_ids), kept_BT)
    else:
        return None
    return starts_BT if (starts_BT.sum(axis=1) > 1).any() else None


def _cached(cache: Any) -> int:
    """Positions in a key-value cache."""
    if cache is None:
        return 0
    if not hasattr(cache, "get_seq_length"):
        raise BatchMismatchError(
            f"past_key_values is a {type(cache).__name__}; expected a cache of transformers, which says by "
            "get_seq_length() how many positions it holds"
        )
    past: int = cache.get_seq_length()
    return past


def _require_offsets(cumulative: Any) -> None:
    if not isinstance(cumulative, Tensor):
        raise BatchMismatchError(f"cu_seq_lens_q is a {type(cumulative).__name__}; expected a tensor of integers")
    if cumulative.ndim != 1 or cumulative.is_floating_point() or cumulative.dtype == torch.bool:
        raise BatchMismatchError(f"cu_seq_lens_q are {_described(cumulative)}; expected integers [sequences + 1]")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _to_host(tensor: Tensor) -> NDArray[Any]:
    host = tensor.detach().cpu()
    return np.asarray((host.float() if host.is_floating_point() else host).numpy())
