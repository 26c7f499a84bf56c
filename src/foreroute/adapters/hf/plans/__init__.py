"""Routers that do not select by one top-k of their own forward: how each selects, or why it cannot be replayed.

Everything else needs no entry here. Entries go by class name, so that no modelling file is imported; a class that
upstream changes under the same name is caught by the self-check on attach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foreroute.adapters.hf.plans.arg_max import ArgMaxMode
from foreroute.adapters.hf.plans.hash_lookup import HashLookupMode
from foreroute.adapters.hf.plans.read_back import grouped_by_expert
from foreroute.adapters.hf.plans.sparse_mixer import SparseMixerMode
from foreroute.adapters.hf.selection_mode import SelectionMode


@dataclass(frozen=True)
class Plan:
    """How one class of router selects.

    Attributes:
        mode: what watches and forces its selection.
        num_skip_classes: how many of its last ids stand for no expert at all.
        is_lookup: whether the selection is a function of the token alone; it is checked and never forced.
        read_back: the ids in what it hands on, [R, K] in ascending order, where they are not there as they are.
    """

    mode: type[SelectionMode] = SelectionMode
    num_skip_classes: int = 0
    is_lookup: bool = False
    read_back: Callable[[Any], Tensor] | None = None


TOP_K = Plan()

PLANS = {
    "DeepseekV4HashRouter": Plan(mode=HashLookupMode, is_lookup=True),
    "JetMoeTopKGating": Plan(read_back=grouped_by_expert),
    "PhimoeTopKRouter": Plan(mode=SparseMixerMode),
    "SwitchTransformersTop1Router": Plan(mode=ArgMaxMode),
    "ZayaRouter": Plan(num_skip_classes=1),
}

REFUSED = {
    "NllbMoeTop2Router": (
        "transformers hands a 0/1 mask to its experts as if it held expert ids, so that only experts 0 and 1 ever "
        "run, whatever was selected"
    ),
    "DogeCDMoE": (
        "in a forward over a whole sequence it mixes the logits of different tokens (upstream keeps this for the sake "
        "of its checkpoints), so that the picks of a rollout, made token by token, are not those of a trainer's rows"
    ),
    "VitPoseNaiveMoe": "its experts are chosen by the dataset of an image and not by a router",
}
