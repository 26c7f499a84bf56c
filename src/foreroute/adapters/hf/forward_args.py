"""What a forward call of a Hugging Face model says about its batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.errors import BatchMismatchError
from foreroute.layout import starts_from_cumulative_lengths, starts_from_positions
from foreroute.replay import WANTED_MASK, kept_by

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

    @property
    def given(self) -> list[Tensor]:
        """Those of them that there are."""
        every = (self.input_ids_BT, self.mask, self.position_ids, self.cumulative)
        return [each for each in every if each is not None]

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
    def written(self) -> Written:
        """The tensors that were given, and how often each had been written to; none where that is not known."""
        tensors = self._tensors
        # on the CPU they may share memory with arrays of numpy, and in inference mode nobody counts
        if self.device.type == "cpu" or any(each.is_inference() for each in tensors.given):
            return []
        every = (tensors.input_ids_BT, tensors.mask, tensors.position_ids, tensors.cumulative)
        return [(each, 0 if each is None else each._version) for each in every]

    def may_hold(self, num_sequences: int) -> bool:
        """Whether a batch of such shapes may hold so many sequences, one at least, and is on one device."""
        tensors, (rows, width) = self._tensors, self.shape
        positions, cumulative = tensors.position_ids, tensors.cumulative
        if not self.num_slots or any(each.device != self.device for each in tensors.given):
            return False
        if cumulative is not None:
            return rows == 1 and len(cumulative) > num_sequences
        if positions is not None:
            return positions.shape[1] == width and positions.shape[0] in (1, rows)
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
