"""The sparse-attention indexers of transformers: which modules they are, and in which form they hand on their choices.

An indexer returns what it chose, and the attention around it scatters that into its mask. So its forward runs
unchanged, and what it returns is read, or rewritten where a choice is replayed. The forms differ: ids of tokens, of
tokens that make up whole pools, or of blocks, or a mask. All but the tail of tokens that no unit holds yet, which every
query attends to, comes down to units (`foreroute.trace.IndexerSpec`).

Letters: R rows of a batch [B, T], padding included, N those that are none, H heads, W or K units that one chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foreroute.adapters.hf.forward_tokens import ForwardTokens
from foreroute.core.hooks import SelectionHook
from foreroute.core.passes import Pass
from foreroute.core.recompute import run_unnumbered
from foreroute.errors import BatchMismatchError
from foreroute.replay import IndexerPass, ReplayRows
from foreroute.replay.indexers import IndexerRows, find_positions
from foreroute.trace import DecisionStream, IndexerSpec, RoutedLayer
from foreroute.trace.checks import as_offsets
from foreroute.trace.streams import MOST_CHOICES


@dataclass(frozen=True)
class IndexerForm:
    """Return values of one class of indexer. The names are those of attributes of the module."""

    top_k: str = "index_topk"  # how many it chooses
    unit: str | None = None  # how many tokens make up a unit; None where units are tokens
    heads: str | None = None  # how many heads choose for themselves; None where one choice serves all
    counts_tokens: bool = False  # whether `top_k` counts tokens, and not units
    sees_begun: bool = False  # as in `IndexerSpec`
    # ids of tokens [B, T, ...], ids of units [B, T, ...] or [B, H, T, ...], or a mask of tokens [B, 1, T, keys]
    returns: Literal["tokens", "units", "mask"] = "tokens"
    tail: bool = False  # whether tokens behind the last whole unit are among those of the output
    fills: bool = True  # whether ids behind the last one are -1; else they name keys that are masked
    # where sequences must be, for upstream to cut units where they begin
    sequences: Literal["anywhere", "one a row", "one a row from its first column"] = "anywhere"

    def spec_of(self, module: nn.Module, layers: tuple[RoutedLayer, ...]) -> IndexerSpec:
        """Read the facts of an indexer."""
        unit = 1 if self.unit is None else int(getattr(module, self.unit))
        top_k = int(getattr(module, self.top_k)) // (unit if self.counts_tokens else 1)
        heads = 1 if self.heads is None else int(getattr(module, self.heads))
        return IndexerSpec(top_k, layers, unit, heads, self.sees_begun)


OF_TOKENS = (
    *("AXK2Indexer", "DeepseekV32Indexer", "Dots3NoteTextIndexer", "GlmMoeDsaIndexer", "HYV4Indexer"),
    *("HYV4VLIndexer", "MistralLarge4TextIndexer"),
)
FORMS = dict.fromkeys(OF_TOKENS, IndexerForm(fills=False)) | {
    "Glm5NextTextIndexer": IndexerForm(unit="index_kpool", counts_tokens=True, tail=True, sequences="one a row"),
    "DeepseekV4Indexer": IndexerForm(
        unit="compress_rate", returns="units", sequences="one a row from its first column"
    ),
    "MiniMaxM3VLIndexer": IndexerForm(
        top_k="topk_blocks",
        unit="block_size",
        heads="num_heads",
        sees_begun=True,
        returns="units",
        sequences="one a row from its first column",
    ),
    "Qwen4ExpTextQSAIndexer": IndexerForm(top_k="block_topk", unit="compress_ratio", returns="mask", tail=True),
}
"""By class name."""


class FoundIndexers:
    """The indexers of one model: path, module and layer of each, in layer order; one at least, all of one class."""

    def __init__(self, sites: list[tuple[str, nn.Module, RoutedLayer]]) -> None:
        self.modules = [module for _, module, _ in sites]
        self.form = FORMS[type(self.modules[0]).__name__]
        layers = tuple(layer for *_, layer in sites)
        self.spec = self.form.spec_of(self.modules[0], layers)
        self.hooks = [ChoosingIndexer(path, module, self.form) for path, module, _ in sites]

    def passes(self, current: Pass, num_routers: int) -> list[tuple[IndexerPass, IndexerPass]]:
        """Say what each does in a pass, and in its recomputation."""
        chosen = current.rows.indexers if isinstance(current.rows, ReplayRows) else None
        kept = current.returned if current.options.others else None
        opened = []
        for number, calls_1 in enumerate(current.calls_L.split(1)[num_routers:]):
            first = IndexerPass(num_routers + number, number, chosen, kept, calls_1)
            opened.append((first, replace(first, observed=None)))
        return opened

    def misplaced(self, rows: IndexerRows, row_R: Tensor, width: int) -> Tensor:
        """Say bool [], on their device, whether `find_positions` or `require` would raise for rows of a batch."""
        is_first_column = torch.arange(len(row_R), device=row_R.device) % width == 0
        inside = (rows.position_R > 0) & (is_first_column | (row_R.roll(1) != row_R - 1))
        several, behind = self._cut_elsewhere(rows.position_R, rows.first_R, width)
        wrong: Tensor = inside.any() | several | behind
        return wrong

    def _cut_elsewhere(self, position_R: Any, first_R: Any, width: int) -> tuple[Any, Any]:
        """Say whether upstream cuts units elsewhere than at sequences: as several are in a row, or behind padding."""
        wanted = self.form.sequences
        several = ((position_R == 0).reshape(-1, width).sum(1) > 1).any()
        return several & (wanted != "anywhere"), first_R.any() & (wanted == "one a row from its first column")

    def require(self, position_R: NDArray[np.int64], first_R: NDArray[np.int64], width: int) -> None:
        """Raise `BatchMismatchError` if upstream would not cut the units of these sequences where they begin."""
        several, behind = self._cut_elsewhere(position_R, first_R, width)
        if several or behind:
            seen = "a row of the batch holds several sequences" if several else "a sequence begins behind padding"
            sides = (
                "on either side"
                if self.form.sequences == "one a row"
                else "on the right; prompts of one length need none"
            )
            raise BatchMismatchError(
                f"{seen}, and {type(self.modules[0]).__name__} of transformers cuts units of {self.spec.unit} tokens "
                f"by their place in the batch; expected one sequence per row, padded {sides}"
            )

    def stream(
        self,
        choices: dict[int, Tensor],
        lengths_S: NDArray[np.int64],
        kept_BT: NDArray[np.bool_],
        batch: ForwardTokens,
    ) -> DecisionStream:
        """Make a stream of what each indexer returned in one forward, for its rows without padding."""
        kept_R, width = kept_BT.reshape(-1), kept_BT.shape[1]
        row_R = np.where(kept_R, np.cumsum(kept_R) - 1, -1)
        offsets, padding_B = as_offsets(lengths_S), batch.cached_padding_B()
        position_R, first_R = find_positions(offsets, row_R, width, past=batch.past, padding_B=padding_B)
        self.require(position_R, first_R, width)
        position_N, first_N = position_R[kept_R], first_R[kept_R]
        visible_N = self.spec.num_visible(position_N)

        def chosen() -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32]]]:
            for number in range(len(self.modules)):
                returned = choices[number].cpu().numpy()
                if self.form.returns == "mask":
                    row_N, key_N = np.nonzero(returned.reshape(len(kept_R), -1)[kept_R])
                    unit_N = self._units(key_N, first_N[row_N])
                    seen = (unit_N >= 0) & (unit_N < visible_N[row_N])
                    yield np.bincount(row_N[seen], minlength=len(position_N)), unit_N[seen].astype(np.int32)
                    continue
                by_row = returned.swapaxes(1, 2) if returned.ndim == 4 else returned  # heads stand before rows
                unit_NHK = by_row.reshape(len(kept_R), self.spec.heads, -1)[kept_R].astype(np.int64)
                if self.form.returns == "tokens":
                    unit_NHK = self._units(unit_NHK, first_N[:, None, None])
                seen_NHK = (unit_NHK >= 0) & (unit_NHK < visible_N[:, None, None])
                ids_NHK = unit_NHK * self.spec.heads + np.arange(self.spec.heads)[:, None]
                num_ids = self.spec.heads * ids_NHK.shape[2]
                sets = np.sort(np.where(seen_NHK, ids_NHK, MOST_CHOICES).reshape(len(position_N), num_ids), axis=1)
                is_id = sets < MOST_CHOICES
                is_id[:, 1:] &= sets[:, 1:] != sets[:, :-1]  # what was replayed may fill up with the first one
                yield is_id.sum(axis=1), sets[is_id].astype(np.int32)

        return self.spec.stream(position_N, chosen())

    def _units(self, keys: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.int64]:
        """Name the units that begin with tokens of some key columns; -1 for a token that begins none, or is none."""
        units, within = np.divmod(keys - first, self.spec.unit)
        return np.where((within == 0) & (keys >= 0), units, -1)

    @contextmanager
    def choosing_one(self) -> Iterator[None]:
        """Let each choose one unit, while the context is open, so that a few tokens show what a choice does."""
        name, one = self.form.top_k, self.spec.unit if self.form.counts_tokens else 1
        before = [getattr(module, name) for module in self.modules]
        spec = self.spec
        try:
            self.spec = replace(spec, top_k=1)
            for module in self.modules:
                setattr(module, name, one)
            yield
        finally:
            self.spec = spec
            for module, value in zip(self.modules, before, strict=True):
                setattr(module, name, value)


class ChoosingIndexer(SelectionHook):
    """The hook on one indexer, which hands on `now.rows` and keeps what it returned in `now.observed`."""

    noun = "indexer"
    now: IndexerPass | None

    def __init__(self, path: str, module: nn.Module, form: IndexerForm) -> None:
        super().__init__(path, (module, "forward"))
        self.module = module
        self._form = form

    def select(self, now: IndexerPass, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        returned = forward(*args, **kwargs)
        if now.rows is not None:
            returned = self._replayed(returned, now.rows, now.indexer)
        if now.observed is not None:
            run_unnumbered(self._keep_choices, now.observed, now.indexer, returned)
        return returned

    @staticmethod
    def _keep_choices(observed: dict[int, Tensor], indexer: int, returned: Tensor) -> None:
        kept = returned if returned.dtype == torch.bool else returned.to(torch.int32)
        observed[indexer] = kept.detach().clone()

    def _replayed(self, native: Tensor, rows: IndexerRows, indexer: int) -> Tensor:
        """Put the choices to replay into what it returned, in the rows that have one."""
        form, keys_RHW = self._form, rows.units_RHW(indexer)
        if form.returns != "units":
            keys_RHW = self._tokens_of(keys_RHW, rows)
        # the layer may be on another device than the batch
        keys_RHW, decided_R = keys_RHW.to(native.device), rows.decided_R.to(native.device)
        if form.returns == "mask":
            num_keys = native.shape[-1]
            columns = torch.where(keys_RHW < 0, num_keys, keys_RHW).long()
            mask = native.new_zeros(len(columns), 1, num_keys + 1).scatter(-1, columns, True)[..., :num_keys]
            forced = mask.view(native.shape[0], native.shape[2], 1, num_keys).transpose(1, 2)
            return torch.where(decided_R.view(native.shape[0], 1, native.shape[2], 1), forced, native)
        missing = native.shape[-1] - keys_RHW.shape[-1]
        keys_RHW = nn.functional.pad(keys_RHW, (0, missing), value=-1).to(native.dtype)
        if not form.fills:  # the first key of the sequence, which a query with too few keys attends to
            first_R11 = rows.first_R.to(native.device)[:, None, None]
            keys_RHW = torch.where(keys_RHW < 0, first_R11, keys_RHW).to(native.dtype)
        by_row = native.transpose(1, 2) if native.ndim == 4 else native
        forced = torch.where(decided_R[:, None, None], keys_RHW, by_row.reshape(keys_RHW.shape)).view(by_row.shape)
        return forced.transpose(1, 2).contiguous() if native.ndim == 4 else forced

    def _tokens_of(self, units_RHW: Tensor, rows: IndexerRows) -> Tensor:
        """Name the key columns of the tokens of units, with those of the tail if any; -1 where there is none."""
        unit, first_R11, position_R11 = rows.spec.unit, rows.first_R[:, None, None], rows.position_R[:, None, None]
        if unit == 1:
            return torch.where(units_RHW < 0, -1, units_RHW + first_R11)
        within_U = torch.arange(unit, device=units_RHW.device)
        tokens = (units_RHW[..., None] * unit + within_U).flatten(-2) + first_R11
        keys_RHW = torch.where((units_RHW < 0).repeat_interleave(unit, dim=-1), -1, tokens)
        if self._form.tail and getattr(self.module, "index_kpool_always_select_tail", True):
            tail = (position_R11 + 1) // unit * unit + within_U[:-1]
            keys_RHW = torch.cat([keys_RHW, torch.where(tail > position_R11, -1, tail + first_R11)], dim=-1)
        return keys_RHW
