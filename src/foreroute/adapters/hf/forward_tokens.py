"""Batch of a forward of a Hugging Face model: tokens, padding, where sequences begin and continue.

It is found on the device of the batch, the CPU among others. The host reads it for a recording, which has the rows of
each forward that are no padding and were not taken back, and to say what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from foreroute.adapters.hf.pixels import ARGUMENTS, ImageTokens, given_images, pixel_stream, warn_of_unbound
from foreroute.core.caches import NO_CACHE, given_cache
from foreroute.errors import BatchMismatchError
from foreroute.layout import starts_from_cumulative_lengths, starts_from_positions
from foreroute.replay.arguments import WANTED_MASK, kept_by
from foreroute.replay.rows import to_host
from foreroute.trace import INDEXER, PIXELS

if TYPE_CHECKING:
    from foreroute.adapters.hf.indexers import FoundIndexers
    from foreroute.replay import ForwardRows, RecordedPass

TEXT = ("input_ids", "attention_mask", "position_ids", "cu_seq_lens_q")
"""Arguments that tell which token is where; `pixels.ARGUMENTS` are the others."""
MASKED = ("eager", "sdpa", "flex_attention")
"""Implementations of attention that transformers makes masks for. These keep sequences of a row apart where it is given
`position_ids` without an attention mask and without a cache (`masking_utils._preprocess_mask_arguments`), and ignore
`cu_seq_lens_q`. Kernels of varying lengths look at positions or offsets themselves."""


@dataclass(eq=False, repr=False)
class ForwardTokens:
    """The arguments of one forward that tell which token is where, on their device."""

    input_ids: Tensor  # integers [B, T]
    # zeros and ones [B, T' >= T], or the causal pattern [B, 1, T, T' >= T] that `generate` makes of them for a static
    # cache: bool, or 0 where a token attends to another
    mask: Tensor | None
    # [B, T] or [1, T]; of images [A, B, T] or [A, 1, T], on three axes, or behind those of text on four
    position_ids: Tensor | None
    cumulative: Tensor | None  # offsets of packed sequences, `cu_seq_lens_q`
    past: int  # positions that the key-value cache held before
    images: ImageTokens | None = None  # None where it is not known how images stand among tokens
    pixels: dict[str, Tensor] = field(default_factory=dict)
    begins: bool = False  # whether the first token of each row must be at position 0: no cache holds any before
    cache_was_seen: bool = True  # whether the cache was compared with what the forward before left of it
    is_masked: bool = False  # whether attention is of `MASKED`
    keeps_cache: bool = False  # whether the model is given a key-value cache, or makes one
    given: dict[str, Any] = field(default_factory=dict)  # arguments of the call that tell all this, if known
    is_causal: Tensor | None = field(init=False, default=None)  # bool [], whether a pattern is that of a batch

    def __post_init__(self) -> None:
        self.pixel_names = tuple(self.pixels)
        self.shape = (self.input_ids.shape[0], self.input_ids.shape[1])
        self.num_router_rows = self.shape[0] * self.shape[1]
        self.device = self.input_ids.device
        if torch.compiler.is_compiling():  # nothing is read in a graph; `graph_ops.begin_pass` makes another of these
            return
        # What shapes say is read here. What only the values say is refused when they are asked for.
        self.past = int(self.past)
        if self.mask is not None:
            self._mask_shape = tuple(self.mask.shape)
            if self.mask.ndim == 4:
                self.mask, self.is_causal = _read_pattern(self.mask, self.shape, self.past)
            _require_shape(self.mask, self.shape, self.past)
        # whether arguments say where sequences begin, so that a row of the batch may hold several
        self.may_be_packed = not self.past and (self.cumulative is not None or self.position_ids is not None)

    @classmethod
    def of_call(
        cls,
        trunk: nn.Module,
        names: list[str],
        images: ImageTokens | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> ForwardTokens:
        """Find the arguments among those of a call whose parameters have these names. In a graph nothing is read."""
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
        has_past = (
            cache is not None if torch.compiler.is_compiling() else bool(past)
        )  # a number on the device in graphs
        return cls(
            input_ids,
            mask,
            positions,
            cumulative,
            past,
            images,
            {} if ARGUMENTS.isdisjoint(given) else given_images(given),
            # a part of longer sequences, as under context parallelism, is run without a cache
            begins=not has_past and given.get("use_cache") is not False,
            given={name: given[name] for name in (*TEXT, *ARGUMENTS) if given.get(name) is not None},
            is_masked=getattr(getattr(trunk, "config", None), "_attn_implementation", None) in MASKED,
            keeps_cache=cache is not None or _makes_cache(trunk, given),
        )

    def find_sequences(self) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Find bool [B, T], what is no padding; first tokens of sequences; and bool [] each, what is wrong."""
        # all on the device of the batch; no first tokens where a row of the batch holds one sequence
        (rows, width), cumulative, wrongs = self.shape, self.cumulative, list[Tensor]()
        if self.mask is None:
            kept_BT = torch.ones_like(self.input_ids, dtype=torch.bool)
        else:
            mask = self.mask.to(self.device, non_blocking=True)
            kept = mask == 1
            wrongs.append((mask != kept).any())
            kept_BT = kept[:, kept.shape[1] - width :]  # cached positions stand before them
        if self.is_causal is not None:
            wrongs.append(~self.is_causal)
        if not self.may_be_packed:
            return kept_BT, None, wrongs
        starts_BT = kept_BT & (kept_BT.cumsum(1) == 1)
        restarts = None  # by positions, where these are looked at
        if self.position_ids is not None and (cumulative is None or self.is_masked):
            positions = self.text_positions.to(self.device, non_blocking=True)
            if positions.shape[1] != width or positions.shape[0] not in (1, rows):
                self.raise_wrong()
            restarts = positions == 0
        if cumulative is not None:
            if rows != 1 or not len(cumulative):
                self.raise_wrong()
            ends = cumulative.to(self.device, non_blocking=True).long()
            wrongs.append((ends.diff() < 0).any() | (ends[0] != 0) | (ends[-1] != width))
            begins = torch.zeros(width + 1, dtype=torch.bool, device=self.device)
            begins = begins.scatter(0, ends.clamp(0, width), True)[:-1]
            if restarts is not None:
                wrongs.append((kept_BT & ~starts_BT & (restarts != begins)).any())
        else:
            assert restarts is not None, "a batch that may be packed has positions or offsets"
            begins = restarts
            if self.begins:
                wrongs.append((starts_BT & ~begins).any())
        starts_BT = starts_BT | (kept_BT & begins)
        if self._mixes:
            wrongs.append((starts_BT.sum(1) > 1).any())
        return kept_BT, starts_BT, wrongs

    @property
    def _mixes(self) -> str:
        """Reason that attention takes a row for one sequence, whatever is said of where others begin; or nothing."""
        if not self.is_masked:
            return ""
        if self.position_ids is None:
            return "without position_ids that restart at 0 with each of them; pass these too"
        if self.mask is not None:
            return "with an attention_mask; leave it out, or give each sequence a row"
        return "with a key-value cache; pass use_cache=False" if self.keeps_cache else ""

    def on_host(self) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_] | None]:
        """Copy tokens [B, T], what is no padding, and first tokens where rows hold several sequences, to the host."""
        kept_BT, starts_BT, wrongs = self.find_sequences()
        if any(wrongs):
            self.raise_wrong()
        starts = None if starts_BT is None else to_host(starts_BT)
        are_packed = starts is not None and bool((starts.sum(axis=1) > 1).any())
        return to_host(self.input_ids).astype(np.int64), to_host(kept_BT), starts if are_packed else None

    def raise_wrong(self) -> None:
        """Raise `BatchMismatchError` for arguments that are not those of a batch of whole sequences. Waits for them."""
        if self.is_causal is not None and not self.is_causal:
            raise BatchMismatchError(
                f"attention_mask is of shape {self._mask_shape}, another pattern than the causal one of a batch; "
                f"{WANTED_PATTERN}"
            )
        kept_BT = np.ones(self.shape, np.bool_)
        if self.mask is not None:
            kept_BT = kept_by(to_host(self.mask))[:, self.mask.shape[1] - self.shape[1] :]
        if not self.may_be_packed:
            return
        by_positions_BT = None
        if self.position_ids is not None and (self.cumulative is None or self.is_masked):
            by_positions_BT = starts_from_positions(to_host(self.text_positions), kept_BT)
        if self.cumulative is not None:
            starts_BT = starts_from_cumulative_lengths(to_host(self.cumulative), kept_BT)
            if by_positions_BT is not None and (by_positions_BT != starts_BT).any():
                raise BatchMismatchError(
                    "position_ids restart at 0 elsewhere than at the offsets in cu_seq_lens_q, at which transformers' "
                    "attention does not look here; pass positions that restart with each sequence"
                )
        else:
            assert by_positions_BT is not None, "a batch that may be packed has positions or offsets"
            starts_BT = by_positions_BT
            if self.begins:
                _require_beginning(to_host(self.text_positions), kept_BT)
        most = int(starts_BT.sum(axis=1).max(initial=0))
        if most > 1 and self._mixes:
            raise BatchMismatchError(
                f"a row of the batch holds {most} sequences, and transformers' attention takes it for one {self._mixes}"
            )

    def cached_padding_B(self) -> NDArray[np.int64]:
        """Count the cached positions of each row that are padding, on the left, int64 [B]. Waits for the mask."""
        if self.mask is None or not self.past:
            return np.zeros(self.shape[0], np.int64)
        return np.asarray((~kept_by(to_host(self.mask[:, : self.past]))).sum(axis=1))

    @cached_property
    def digests_BT(self) -> Tensor | None:
        """Digest the pixels behind each token, int64 [B, T]; None where it is not known how images stand among them."""
        return None if self.images is None else self.images.digests(self.input_ids, self.pixels)

    @property
    def text_positions(self) -> Tensor:
        """Positions of the text, integers [B, T] or [1, T]: 0 where a sequence begins, and nowhere else in it."""
        positions = self.position_ids
        assert positions is not None, "asked for where there are any"
        if positions.ndim == 2:
            return positions
        # an image lies behind the tokens before it on one axis at least, and its pieces differ on one
        return positions[0] if len(positions) == 4 else positions.amax(0)

    def kept(self) -> ForwardTokens:
        """Copy what was given, to be read later, when whoever gave it may have overwritten it."""
        # on the CPU nothing is waited for, and what is wrong is said at once
        if self.device.type == "cpu" and any(self.find_sequences()[2]):
            self.raise_wrong()
        return self.copied

    @cached_property
    def copied(self) -> ForwardTokens:
        """The same in memory of its own, but for pixels, of which it has the digests."""
        if self.images is not None:
            _ = self.digests_BT  # which the copy takes along
        kept = copy(self)
        kept.pixels, kept.given = {}, {}
        kept.input_ids = self.input_ids.clone()
        if self.mask is not None:
            kept.mask = self.mask[:, max(0, self.mask.shape[1] - self.past - self.shape[1]) :].clone()
        kept.position_ids = None if self.position_ids is None else self.position_ids.clone()
        kept.cumulative = None if self.cumulative is None else self.cumulative.clone()
        return kept

    def differs_from(self, before: ForwardTokens) -> Tensor:
        """Compare with the copy of a batch that was given by the same tensors: bool [], on the device."""
        differs = self.input_ids != before.input_ids
        for given, kept in (
            (self.mask, before.mask),
            (self.digests_BT, before.digests_BT),
            (self.position_ids, before.position_ids),
            (self.cumulative, before.cumulative),
        ):
            if given is not None and kept is not None:
                more = (given != kept).to(self.device, non_blocking=True)
                # one operator for each, but where shapes differ
                differs = differs | more if more.shape == differs.shape else differs.any() | more.any()
        return differs.any() if self.is_causal is None else differs.any() | ~self.is_causal


WANTED_PATTERN = (
    f"{WANTED_MASK}, or the causal pattern [batch, 1, tokens, keys] that `generate` makes of it for a static cache. A "
    'sliding window hides what is padding: generate with cache_implementation="dynamic"'
)


def _read_pattern(pattern: Tensor, shape: tuple[int, int], past: int) -> tuple[Tensor, Tensor]:
    """Find the mask [B, past + T] that a causal pattern was made of; and bool [], whether it is the pattern of that."""
    (rows, width), end = shape, past + shape[1]
    is_boolean = pattern.dtype == torch.bool
    if (
        pattern.shape[:3] not in ((rows, 1, width), (1, 1, width))
        or pattern.shape[3] < end
        or not (is_boolean or pattern.is_floating_point())
    ):
        raise BatchMismatchError(f"attention_mask is {_described(pattern)}; {WANTED_PATTERN}")
    attends_BTK = (pattern if is_boolean else pattern == 0)[:, 0]
    # The last token of a row attends to all before it that are no padding. Whether others do just so is asked on the
    # device; to what padding attends does not matter.
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
            f"position_ids begin at {first_B[late[0]]} in row {late[0]} of the batch, {NO_CACHE}. Where they "
            "count padding, count from the first token: (mask.cumsum(1) - 1).clamp(min=0). Where the batch is a part "
            "of longer sequences, as under context parallelism, say use_cache=False"
        )


def _makes_cache(trunk: nn.Module, given: dict[str, Any]) -> bool:
    """Say whether transformers makes a cache in this call; under checkpointing it makes none."""
    uses = given.get("use_cache")
    if uses is None:
        uses = getattr(getattr(trunk, "config", None), "use_cache", False)
    checkpoints = getattr(trunk, "gradient_checkpointing", False) and trunk.training and torch.is_grad_enabled()
    return bool(uses) and not checkpoints


def _require_offsets(cumulative: Any) -> None:
    if not isinstance(cumulative, Tensor):
        raise BatchMismatchError(f"cu_seq_lens_q is a {type(cumulative).__name__}; expected a tensor of integers")
    if cumulative.ndim != 1 or cumulative.is_floating_point() or cumulative.dtype == torch.bool:
        raise BatchMismatchError(f"cu_seq_lens_q are {_described(cumulative)}; expected integers [sequences + 1]")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def rows_of_passes(passes: Sequence[RecordedPass], indexers: FoundIndexers | None) -> list[ForwardRows]:
    """Give the rows of forwards one after the other, of which those that were taken back are left out."""
    widths = _kept_widths([each.args for each in passes])
    return [_rows_of_pass(each, width, indexers) for each, width in zip(passes, widths, strict=True) if width]


def _rows_of_pass(recorded: RecordedPass, width: int, indexers: FoundIndexers | None) -> ForwardRows:
    """Give the rows of its first positions, of which `width` are left."""
    from foreroute.replay import ForwardRows  # attaching records nothing

    batch: ForwardTokens = recorded.args
    ids_BT, kept_BT, starts_BT = batch.on_host()
    kept_BT = kept_BT & (np.arange(kept_BT.shape[1]) < width)
    kept_R = kept_BT.reshape(-1)

    def packed(of_rows: Tensor | None) -> Any:
        return None if of_rows is None else of_rows.cpu().numpy().swapaxes(0, 1)[kept_R]

    if starts_BT is None:
        lengths_S = np.asarray(kept_BT.sum(axis=1))
    else:
        lengths_S = np.diff(np.flatnonzero(starts_BT[kept_BT]), append=kept_BT.sum())
    streams = {}
    digests_BT = None if batch.digests_BT is None else to_host(batch.digests_BT)
    if digests_BT is not None:
        streams[PIXELS] = pixel_stream(digests_BT[kept_BT])
    warn_of_unbound(batch.pixel_names, digests_BT)
    if recorded.choices is not None and indexers is not None:
        streams[INDEXER] = indexers.stream(recorded.choices, lengths_S, kept_BT, batch)
    return ForwardRows(
        lengths_S,
        ids_BT[kept_BT],
        packed(recorded.ids_LRK),
        packed(recorded.values_LR),
        batch.past,
        width if starts_BT is None else None,
        streams,
    )


def _kept_widths(batches: Sequence[ForwardTokens]) -> list[int]:
    """Count the positions of each forward of a recording that are still there behind the last that continues it."""
    # the others were cut off at the end of the cache, as drafts that were rejected, and later forwards took their place
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
