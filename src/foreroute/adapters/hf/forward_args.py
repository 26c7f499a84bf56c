"""What a forward call of a Hugging Face model says about its batch."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.errors import BatchMismatchError
from foreroute.layout import starts_from_cumulative_lengths, starts_from_positions
from foreroute.replay.arguments import WANTED_MASK, kept_by

Written = list[tuple[Tensor | None, int]]
"""Tensors, and how often each was written to."""


class HostBatch(NamedTuple):
    """A batch on the host.

    Attributes:
        ids_BT: int64 [B, T], its tokens.
        mask_BT: bool [B, T], False where padded, or None when nothing is.
        starts_BT: bool [B, T], the first token of each sequence, or None when every row holds one sequence.
        cached_padding_B: int64 [B], cached positions that are padding, on the left.
    """

    ids_BT: NDArray[np.int64]
    mask_BT: NDArray[np.bool_] | None
    starts_BT: NDArray[np.bool_] | None
    cached_padding_B: NDArray[np.int64]

    @property
    def kept_BT(self) -> NDArray[np.bool_]:
        """Bool [B, T], False where padded."""
        return np.ones(self.ids_BT.shape, np.bool_) if self.mask_BT is None else self.mask_BT

    def equals(self, other: HostBatch) -> bool:
        """Whether another batch has the same tokens in the same places."""
        pairs = zip(self, other, strict=True)
        return all(a is b or (a is not None and b is not None and np.array_equal(a, b)) for a, b in pairs)


class ForwardTokens:
    """The arguments of one forward that tell which token is where, on the device until `host` is asked for.

    Args:
        input_ids: integers [B, T].
        mask: the attention mask, of zeros and ones [B, T' >= T], or None.
        position_ids: integers [B, T] or [1, T], or None.
        cumulative: offsets of packed sequences (`cu_seq_lens_q`), or None.
        past: how many positions the key-value cache already held.

    Attributes:
        shape: (B, T).
        num_slots: B · T.
        device: where the tokens are.
    """

    def __init__(
        self,
        input_ids: Tensor,
        mask: Tensor | None,
        position_ids: Tensor | None,
        cumulative: Tensor | None,
        past: int,
    ) -> None:
        self.input_ids, self.mask, self.position_ids, self.cumulative = input_ids, mask, position_ids, cumulative
        self.past = past
        self.shape = (input_ids.shape[0], input_ids.shape[1])
        self.num_slots = input_ids.shape[0] * input_ids.shape[1]
        self.device = input_ids.device

    @classmethod
    def of_call(cls, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardTokens:
        """Find them among the arguments of a call whose parameters have these names. In a graph nothing is read.

        Raises:
            BatchMismatchError: when the call passes embeddings instead of tokens, or an attention mask that is none of
                tokens; and as `read`.
        """
        given = dict(zip(names, args, strict=False)) | kwargs
        input_ids, mask, positions = given.get("input_ids"), given.get("attention_mask"), given.get("position_ids")
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
        cumulative, cache = given.get("cu_seq_lens_q"), given.get("past_key_values")
        if cumulative is not None:
            _require_offsets(cumulative)
        if cache is not None and not hasattr(cache, "get_seq_length"):
            raise BatchMismatchError(
                f"past_key_values is a {type(cache).__name__}; expected a cache of transformers, which says by "
                "get_seq_length() how many positions it holds"
            )
        batch = cls(input_ids, mask, positions, cumulative, 0 if cache is None else cache.get_seq_length())
        return batch if torch.compiler.is_compiling() else batch.read()

    def read(self) -> ForwardTokens:
        """The same, read at once from the CPU.

        Raises:
            BatchMismatchError: when mask or positions do not fit the tokens; on another device than the CPU, what only
                their values say is refused when they are asked for.
        """
        self.past = int(self.past)
        if self.mask is not None:
            _require_shape(self.mask, self.shape)
        if self.device.type == "cpu":
            _ = self.host
        return self

    @cached_property
    def host(self) -> HostBatch:
        """What was given, copied to the host, which waits for it."""
        rows, width = self.shape
        tokens = _to_host(self.input_ids).astype(np.int64)  # a copy: what was given may be overwritten
        mask = starts = None
        padding = np.zeros(rows, np.int64)
        if self.mask is not None:
            kept = kept_by(_to_host(self.mask[:, self.mask.shape[1] - width :]))
            mask = None if kept.all() else kept
            if self.past:
                padding = (~kept_by(_to_host(self.mask[:, : self.past]))).sum(axis=1)
        if not self.past and (self.cumulative is not None or self.position_ids is not None):
            kept = np.ones(tokens.shape, np.bool_) if mask is None else mask
            if self.cumulative is not None:
                starts = starts_from_cumulative_lengths(_to_host(self.cumulative), kept)
            elif self.position_ids is not None:
                starts = starts_from_positions(_to_host(self.position_ids), kept)
            if starts is not None and not (starts.sum(axis=1) > 1).any():
                starts = None
        return HostBatch(tokens, mask, starts, padding)

    @property
    def given(self) -> list[Tensor]:
        """Those tensors that there are."""
        every = (self.input_ids, self.mask, self.position_ids, self.cumulative)
        return [each for each in every if each is not None]

    @property
    def written(self) -> Written:
        """The tensors that were given, and how often each had been written to; none where that is not known."""
        # in inference mode nobody counts
        if any(each.is_inference() for each in self.given):
            return []
        every = (self.input_ids, self.mask, self.position_ids, self.cumulative)
        return [(each, 0 if each is None else each._version) for each in every]

    def may_hold(self, num_sequences: int) -> bool:
        """Whether a batch of such shapes may hold so many sequences, one at least, and is on one device."""
        (rows, width), positions, cumulative = self.shape, self.position_ids, self.cumulative
        if not self.num_slots or any(each.device != self.device for each in self.given):
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
        (rows, width), mask, wrong = self.shape, self.mask, []
        ids_BT = self.input_ids
        kept_BT = torch.ones_like(ids_BT, dtype=torch.bool)
        if mask is not None:
            mask = mask[:, mask.shape[1] - width :]
            kept_BT = mask == 1
            wrong.append((mask != kept_BT).any())
        starts_BT = kept_BT & (kept_BT.cumsum(1) == 1)
        number_BT = torch.arange(rows, device=self.device)[:, None].expand(rows, width)
        if self.cumulative is not None:
            ends = self.cumulative.long()
            wrong.append((ends.diff() < 0).any() | (ends[0] != 0) | (ends[-1] != width))
            begins = torch.zeros(width + 1, dtype=torch.bool, device=self.device)
            starts_BT = starts_BT | (kept_BT & begins.scatter(0, ends.clamp(0, width), True)[:-1])
        elif self.position_ids is not None:
            starts_BT = starts_BT | (kept_BT & (self.position_ids == 0))
        if self.cumulative is not None or self.position_ids is not None:
            are_packed = (starts_BT.sum(1) > 1).any()
            number_R = starts_BT.reshape(-1).cumsum(0)
            wrong.append(torch.where(are_packed, number_R[-1], rows) != num_sequences)
            number_BT = torch.where(are_packed, number_R.view(rows, width) - 1, number_BT)
            number_BT = number_BT.clamp(0, num_sequences - 1)
        return ids_BT.reshape(-1), kept_BT.reshape(-1), starts_BT.reshape(-1), number_BT.reshape(-1), wrong

    def kept(self) -> ForwardTokens:
        """The batch, to be read later, when whoever gave it may have overwritten what it gave."""
        if "host" not in self.__dict__:
            if self.mask is not None:
                self.mask = self.mask[:, max(0, self.mask.shape[1] - self.past - self.shape[1]) :].clone()
            self.input_ids = self.input_ids.clone()
            self.position_ids = None if self.position_ids is None else self.position_ids.clone()
            self.cumulative = None if self.cumulative is None else self.cumulative.clone()
        return self


def _require_shape(mask: Tensor, shape: tuple[int, int]) -> None:
    if mask.ndim == 4:
        raise BatchMismatchError(
            f"attention_mask is {tuple(mask.shape)}, an attention pattern, which does not say what is padding; "
            f"{WANTED_MASK}. `generate` makes such a mask where the key-value cache is static, that is, has room for "
            'the longest sequence from the start: generate with cache_implementation="dynamic", which is the default '
            "of most models"
        )
    if mask.ndim != 2 or mask.shape[0] != shape[0] or mask.shape[1] < shape[1]:
        raise BatchMismatchError(f"attention_mask is {tuple(mask.shape)}; {WANTED_MASK}")


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
