"""What a forward of a Hugging Face model says about its batch: tokens, padding, where sequences begin and continue.

Read on the device of the batch, or copied to the host, which says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from foreroute.adapters.hf.pixels import ARGUMENTS, ImageTokens, given_images
from foreroute.core.caches import NO_CACHE, given_cache
from foreroute.errors import BatchMismatchError
from foreroute.layout import starts_from_cumulative_lengths, starts_from_positions
from foreroute.replay.arguments import WANTED_MASK, kept_by


class HostBatch(NamedTuple):
    """A batch on the host.

    Attributes:
        ids_BT: int64 [B, T], its tokens.
        mask_BT: bool [B, T], False where padded, or None when nothing is.
        starts_BT: bool [B, T], the first token of each sequence, or None when every row holds one sequence.
        cached_padding_B: int64 [B], cached positions that are padding, on the left.
        digests_BT: int64 [B, T], of the pixels behind each token, as `ImageTokens.digests`; None where not known.
    """

    ids_BT: NDArray[np.int64]
    mask_BT: NDArray[np.bool_] | None
    starts_BT: NDArray[np.bool_] | None
    cached_padding_B: NDArray[np.int64]
    digests_BT: NDArray[np.int64] | None = None

    @property
    def kept_BT(self) -> NDArray[np.bool_]:
        """Bool [B, T], False where padded."""
        return np.ones(self.ids_BT.shape, np.bool_) if self.mask_BT is None else self.mask_BT

    def until(self, width: int) -> HostBatch:
        """The same, with no positions of a row kept but the first, `width` of them."""
        num_positions = self.ids_BT.shape[1]
        if width == num_positions:
            return self
        return self._replace(mask_BT=self.kept_BT & (np.arange(num_positions) < width))


class ForwardTokens:
    """The arguments of one forward that tell which token is where, on the device until `host` is asked for.

    Args:
        input_ids: integers [B, T].
        mask: the attention mask, of zeros and ones [B, T' >= T], or None; or the causal pattern [B, 1, T, T' >= T] that
            `generate` makes of it for a static cache: bool, or 0 where a token attends to another.
        position_ids: integers [B, T] or [1, T]; of images [A, B, T] or [A, 1, T], on three axes, or behind those of
            text on four; or None.
        cumulative: offsets of packed sequences (`cu_seq_lens_q`), or None.
        past: how many positions the key-value cache already held.
        images: how images stand among the tokens; None where that is not known.
        pixels: the arguments of `given_images`.
        begins: whether the first token of each row must be at position 0, as no cache holds those before it.
        cache_was_seen: whether a recording compared the cache with what the forward before left of it, which a compiled
            model does not show.

    Attributes:
        shape: (B, T).
        num_slots: B · T.
        device: where the tokens are.
        pixel_names: of the arguments that hold pixels.
        is_causal: bool [], whether a mask that was a pattern is that of sequences and padding; None if it was none.
    """

    def __init__(
        self,
        input_ids: Tensor,
        mask: Tensor | None,
        position_ids: Tensor | None,
        cumulative: Tensor | None,
        past: int,
        images: ImageTokens | None = None,
        pixels: dict[str, Tensor] | None = None,
        *,
        begins: bool = False,
        cache_was_seen: bool = True,
    ) -> None:
        self.input_ids, self.mask, self.position_ids, self.cumulative = input_ids, mask, position_ids, cumulative
        self.past, self.images, self.pixels = past, images, pixels or {}
        self.pixel_names = tuple(self.pixels)
        self.is_causal: Tensor | None = None
        self._pattern_shape: tuple[int, ...] = ()
        self.begins, self.cache_was_seen = begins, cache_was_seen
        self.shape = (input_ids.shape[0], input_ids.shape[1])
        self.num_slots = input_ids.shape[0] * input_ids.shape[1]
        self.device = input_ids.device

    @classmethod
    def of_call(
        cls, names: list[str], images: ImageTokens | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ForwardTokens:
        """Find them among the arguments of a call whose parameters have these names. In a graph nothing is read.

        Raises:
            BatchMismatchError: when the call passes embeddings instead of tokens, or an attention mask that is none of
                tokens; and as `read`.
        """
        given = dict(zip(names, args, strict=False)) | kwargs
        input_ids, mask, positions = given.get("input_ids"), given.get("attention_mask"), given.get("position_ids")
        if isinstance(mask, dict) and mask:  # by kind of layer; the values say whether one tells what is padding
            mask = mask.get("full_attention", next(iter(mask.values())))
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
        if not isinstance(positions, Tensor) or positions.ndim not in (2, 3):
            positions = None
        cumulative, cache = given.get("cu_seq_lens_q"), given_cache(given, BatchMismatchError)
        if cumulative is not None:
            _require_offsets(cumulative)
        past = 0 if cache is None else cache.get_seq_length()
        pixels = None if ARGUMENTS.isdisjoint(given) else given_images(given)
        # a part of longer sequences, as under context parallelism, is run without a cache
        may_begin = given.get("use_cache") is not False
        if torch.compiler.is_compiling():
            return cls(input_ids, mask, positions, cumulative, past, images, pixels, begins=may_begin and cache is None)
        return cls(input_ids, mask, positions, cumulative, past, images, pixels, begins=may_begin and not past).read()

    def read(self) -> ForwardTokens:
        """The same. What only the values say is refused when they are asked for.

        Raises:
            BatchMismatchError: when the mask does not fit the tokens.
        """
        self.past = int(self.past)
        if self.mask is not None:
            if self.mask.ndim == 4:
                self._pattern_shape = tuple(self.mask.shape)
                self.mask, self.is_causal = _read_pattern(self.mask, self.shape, self.past)
            _require_shape(self.mask, self.shape, self.past)
        return self

    @cached_property
    def host(self) -> HostBatch:
        """What was given, copied to the host, which waits for it.

        Raises:
            BatchMismatchError: for masks, offsets and positions that are not those of a batch of whole sequences.
        """
        if self.is_causal is not None and not self.is_causal:
            raise BatchMismatchError(
                f"attention_mask is of shape {self._pattern_shape}, another pattern than the causal one of a batch; "
                f"{WANTED_PATTERN}"
            )
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
                positions = _to_host(self.text_positions)
                starts = starts_from_positions(positions, kept)
                if self.begins:
                    _require_beginning(positions, kept)
            if starts is not None and not (starts.sum(axis=1) > 1).any():
                starts = None
        digests = None if self.digests_BT is None else _to_host(self.digests_BT)
        return HostBatch(tokens, mask, starts, padding, digests)

    @cached_property
    def digests_BT(self) -> Tensor | None:
        """int64 [B, T], of the pixels behind each token; None where it is not known how images stand among them."""
        return None if self.images is None else self.images.digests(self.input_ids, self.pixels)

    @property
    def text_positions(self) -> Tensor:
        """Integers [B, T] or [1, T], 0 where a sequence begins, and nowhere else in it."""
        positions = self.position_ids
        assert positions is not None, "asked for where there are any"
        if positions.ndim == 2:
            return positions
        # an image lies behind the tokens before it on one axis at least, and its pieces differ on one
        return positions[0] if len(positions) == 4 else positions.amax(0)

    @property
    def given(self) -> dict[str, Tensor]:
        """Those tensors that there are, by name, but for pixels."""
        every = {name: getattr(self, name) for name in ("input_ids", "mask", "position_ids", "cumulative")}
        return {name: each for name, each in every.items() if each is not None}

    def may_hold(self, num_sequences: int) -> bool:
        """Whether a batch of such shapes may hold this many sequences, one at least, and is on one device."""
        (rows, width), positions, cumulative = self.shape, self.position_ids, self.cumulative
        if not self.num_slots or any(each.device != self.device for each in self.given.values()):
            return False
        if cumulative is not None:
            return rows == 1 and len(cumulative) > num_sequences
        if positions is not None:
            return positions.shape[-1] == width and positions.shape[-2] in (1, rows)
        return num_sequences == rows

    def sequences_there(self, num_sequences: int) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """Where the sequences of a batch that may hold this many are, found on its device.

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
        if self.is_causal is not None:
            wrong.append(~self.is_causal)
        starts_BT = kept_BT & (kept_BT.cumsum(1) == 1)
        number_BT = torch.arange(rows, device=self.device)[:, None].expand(rows, width)
        if self.cumulative is not None:
            ends = self.cumulative.long()
            wrong.append((ends.diff() < 0).any() | (ends[0] != 0) | (ends[-1] != width))
            begins = torch.zeros(width + 1, dtype=torch.bool, device=self.device)
            starts_BT = starts_BT | (kept_BT & begins.scatter(0, ends.clamp(0, width), True)[:-1])
        elif self.position_ids is not None:
            if self.begins:
                wrong.append((starts_BT & (self.text_positions != 0)).any())
            starts_BT = starts_BT | (kept_BT & (self.text_positions == 0))
        if self.cumulative is not None or self.position_ids is not None:
            are_packed = (starts_BT.sum(1) > 1).any()
            number_R = starts_BT.reshape(-1).cumsum(0)
            wrong.append(torch.where(are_packed, number_R[-1], rows) != num_sequences)
            number_BT = torch.where(are_packed, number_R.view(rows, width) - 1, number_BT)
            number_BT = number_BT.clamp(0, num_sequences - 1)
        return ids_BT.reshape(-1), kept_BT.reshape(-1), starts_BT.reshape(-1), number_BT.reshape(-1), wrong

    def kept(self) -> ForwardTokens:
        """The batch, to be read later, when whoever gave it may have overwritten it. On the CPU it is read at once."""
        if self.device.type == "cpu":
            _ = self.host
        elif "host" not in self.__dict__:
            if self.mask is not None:
                self.mask = self.mask[:, max(0, self.mask.shape[1] - self.past - self.shape[1]) :].clone()
            _, self.pixels = self.digests_BT, {}
            self.input_ids = self.input_ids.clone()
            self.position_ids = None if self.position_ids is None else self.position_ids.clone()
            self.cumulative = None if self.cumulative is None else self.cumulative.clone()
        return self


def kept_widths(batches: Sequence[ForwardTokens]) -> list[int]:
    """How many positions of each forward of a recording are still there behind the last that continues it.

    The others were cut off at the end of the cache, as drafts that were rejected, and later forwards took their place.
    """
    widths = [batch.shape[1] for batch in batches]
    grown: list[int] = []  # forwards of the sequences that grow now, of which something is left
    for number, batch in enumerate(batches):
        if not batch.past:
            grown = []
        while grown and batch.cache_was_seen and batches[grown[-1]].past + widths[grown[-1]] > batch.past:
            last = grown[-1]
            widths[last] = max(0, batch.past - batches[last].past)
            if not widths[last]:
                grown.pop()
        grown.append(number)
    return widths


WANTED_PATTERN = (
    f"{WANTED_MASK}, or the causal pattern [batch, 1, tokens, keys] that `generate` makes of it for a static cache. A "
    'sliding window hides what is padding: generate with cache_implementation="dynamic"'
)
"""What a mask may be that says to what each token attends, for messages."""


def _read_pattern(pattern: Tensor, shape: tuple[int, int], past: int) -> tuple[Tensor, Tensor]:
    """The mask [B, past + T] that a causal pattern was made of; and bool [], whether it is the pattern of that mask.

    The last token of a row attends to all before it that are no padding. Whether others do just so is asked on the
    device; to what padding attends does not matter.
    """
    (rows, width), end = shape, past + shape[1]
    is_boolean = pattern.dtype == torch.bool
    if (
        pattern.shape[:3] not in ((rows, 1, width), (1, 1, width))
        or pattern.shape[3] < end
        or not (is_boolean or pattern.is_floating_point())
    ):
        raise BatchMismatchError(f"attention_mask is {_described(pattern)}; {WANTED_PATTERN}")
    attends_BTK = (pattern if is_boolean else pattern == 0)[:, 0]
    mask = attends_BTK[:, -1, :end]
    keys, queries = (torch.arange(num, device=pattern.device) for num in (pattern.shape[3], width))
    kept = functional.pad(mask, (0, pattern.shape[3] - end))[:, None]
    is_other_BTK = attends_BTK != (kept & (keys <= past + queries[:, None]))
    return mask.expand(rows, end), ~(is_other_BTK & mask[:, past:, None]).any()


def _require_shape(mask: Tensor, shape: tuple[int, int], past: int) -> None:
    if mask.ndim != 2 or mask.shape[0] != shape[0] or mask.shape[1] < shape[1]:
        raise BatchMismatchError(f"attention_mask is {tuple(mask.shape)}; {WANTED_MASK}")
    if not past and mask.shape[1] > shape[1]:
        raise BatchMismatchError(f"attention_mask is {tuple(mask.shape)} for {shape[1]} tokens a sequence, {NO_CACHE}")


def _require_beginning(positions: NDArray[Any], kept_BT: NDArray[np.bool_]) -> None:
    """Raise `BatchMismatchError` unless the first token of each row that is no padding is at position 0."""
    first_B = np.broadcast_to(positions, kept_BT.shape)[np.arange(len(kept_BT)), kept_BT.argmax(axis=1)]
    late = np.flatnonzero(kept_BT.any(axis=1) & (first_B != 0))
    if len(late):
        raise BatchMismatchError(
            f"position_ids begin at {first_B[late[0]]} in row {late[0]} of the batch, {NO_CACHE}; or the batch is a "
            "part of longer sequences, as under context parallelism: then say use_cache=False"
        )


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
