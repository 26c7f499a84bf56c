"""Routers that do not select by one top-k of their own forward: how each selects, or why it cannot be replayed.

Everything else needs no entry here. Entries go by class name, so that no modelling file is imported; a class that
upstream changes under the same name is caught by the self-check on attach.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .passes import move_tensor
from .recompute import run_unnumbered
from .selection import FILLING, Selection, SelectionMode, SelectionRule

CLOSING_OUT = frozenset({torch.scatter, Tensor.scatter})
GATHER = frozenset({torch.gather, Tensor.gather})
MAX = frozenset({torch.max, Tensor.max})


class HashLookupMode(SelectionMode):
    """Hash layers of DeepSeek V4: the experts of a token are looked up in a fixed table.

    There is nothing to replay: the model's own selection is a function of the token. It stays native. The looked-up
    ids are seen where the router gathers its scores at them.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in GATHER:
            self.seen.append(Selection(args[0], args[2], args[2]))
            if self.now is not None:
                run_unnumbered(self.now.keep, args[2])
        return result


class SparseMixerMode(SelectionMode):
    """PhiMoE: `sparsemixer` picks its two experts one after the other, each within a band below the best score.

    For each pick the router finds the best score, closes out every expert further below it than a jitter allows, picks
    (the best one in eval mode, a random one in training), and takes a softmax over the band. Under replay the picks are
    the given ones, and an expert that is replayed from outside the band joins it; otherwise it would have weight zero.
    On its native picks, which lie in the band, nothing changes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scores: Tensor | None = None
        self._picks: list[Tensor] = []  # int64 [R, 1], one for each pick so far
        self._in_band = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FILLING and self._picks:
            scores, outside, value = args
            self._in_band = True
            return func(scores, outside.scatter(-1, self._picks[-1], False), value)
        if func in CLOSING_OUT:
            self._in_band = False
            return func(args[0], args[1], self._picks[-1], args[3])
        result = func(*args, **kwargs)
        if func not in MAX:
            return result
        if not self._in_band:  # the best score, and in eval mode the pick
            if self._scores is None:
                self._scores = args[0]
            self._picks.append(self._forced(result.indices))
            return torch.return_types.max((result.values, self._picks[-1]))
        if not kwargs.get("keepdim"):  # the random pick of training
            self._picks[-1] = self._forced(result.indices[:, None])
            return torch.return_types.max((result.values, self._picks[-1][:, 0]))
        return result

    def __exit__(self, *exc: Any) -> None:
        """Keep the selection, complete only now."""
        super().__exit__(*exc)
        if self._scores is None or len(self._picks) < 2:
            return
        ids_RK = native_RK = torch.cat(self._picks, dim=-1)
        if self.now is not None and self.asks:
            if self.now.absent_R1 is not None:  # a row that is forced says nothing of what would have been picked
                native_RK = torch.where(self.now.absent_R1, ids_RK, self._scores.detach().topk(2, dim=-1).indices)
            run_unnumbered(self.now.keep, native_RK)
        self.seen.append(Selection(self._scores, ids_RK, native_RK))

    def _forced(self, native_R1: Tensor) -> Tensor:
        if self.now is None:
            return native_R1
        pick = len(self._picks) - self._in_band
        of_pick = self.now.of_picks(slice(pick, pick + 1))
        return run_unnumbered(of_pick.choose, native_R1 if self.asks else None, native_R1.device)[0]


def grouped_by_expert(output: Any) -> Tensor:
    """Read int64 [R, K], ascending, from what JetMoE returns: picks sorted by expert, and how many each expert has."""
    _order, token_of_pick, _gates, picks_of_expert, logits_RE = output
    experts = torch.arange(len(picks_of_expert)).repeat_interleave(torch.tensor(picks_of_expert))
    by_token = move_tensor(experts, token_of_pick.device)[token_of_pick.sort(stable=True).indices]
    return by_token.view(len(logits_RE), -1)


TOP_K_RULE = SelectionRule()
BLOCK_RULE = SelectionRule(is_block=True)

RULES = {
    "DeepseekV4HashRouter": SelectionRule(mode=HashLookupMode, is_lookup=True),
    "JetMoeTopKGating": SelectionRule(read_back=grouped_by_expert),
    "PhimoeTopKRouter": SelectionRule(mode=SparseMixerMode),
    "ZayaRouter": SelectionRule(num_skip_classes=1),
}

ENCODER_DECODER = (
    "it is of an encoder-decoder, whose stacks are given different tokens, and one trace has one sequence of tokens"
)
REFUSED = {
    "NllbMoeTop2Router": ENCODER_DECODER,
    "SwitchTransformersTop1Router": ENCODER_DECODER,
    "DogeCDMoE": (
        "over a whole sequence it mixes the logits of different tokens, so that a rollout, made token by token, picks "
        "otherwise than a trainer"
    ),
    "VitPoseNaiveMoe": "its experts are chosen by the dataset of an image and not by a router",
}
