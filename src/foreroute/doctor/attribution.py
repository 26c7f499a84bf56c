"""Layers and flips that make a gap, as `doctor.explain` finds it, in words. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreroute.trace import RoutedLayer

TRUSTED = 0.1
"""Error of the first order from which its amounts are said to be no more than an order."""


@dataclass(frozen=True, eq=False)
class SequenceFlips:
    """A sequence with much of k3.

    Attributes:
        sequence: its number.
        k3_TL: float64 [T, L], what each flip adds to the sum of k3 over the batch, in first order; T without the last
            token.
        share: of the batch's k3.
    """

    sequence: int
    k3_TL: NDArray[np.float64]
    share: float


@dataclass(frozen=True)
class WorstToken:
    """The token of a sequence whose log-prob replay moves most.

    Attributes:
        sequence: its number.
        position: of the token.
        gap: the trainer's log-prob less the engine's, in nats.
        routing: the part of it that replay takes away.
        own: the part of `routing` that flips at the token's own input make, exactly.
        flip: position and layer of the flip that adds most, in first order, at its input or before.
        is_root: whether that flip is a root.
        of_flip: what that flip alone makes of the gap, from a pass without it: what it carries.
        num_flips: how many flips there are at its input and before.
    """

    sequence: int
    position: int
    gap: float
    routing: float
    own: float
    flip: tuple[int, int] | None
    is_root: bool
    of_flip: float
    num_flips: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Attribution:
    """The routing part of k3 by layer and flip.

    Attributes:
        carried_L: float64 [L], nats of k3 per token that flips of each layer carry, in first order.
        began_L: float64 [L], of these the nats of roots: what began there. Consequences are left out, so that it adds
            up to less.
        k3: of the trainer on its own routes, in nats per token.
        routing: its routing part, exactly.
        error: of the first order: the sum over sequences of |sum over flips - routing part|, over that of the parts.
        own_share: of the routing part in the sequences of `worst`: what the flips of tokens themselves make, exactly;
            the rest is of earlier tokens. None where the model's attention does not allow to tell.
        worst: sequences with most of k3.
        tokens: one of each of these.
        forwards, backwards: what it took, in passes over the batch.
    """

    carried_L: NDArray[np.float64]
    began_L: NDArray[np.float64]
    k3: float
    routing: float
    error: float
    own_share: float | None
    worst: tuple[SequenceFlips, ...]
    tokens: tuple[WorstToken, ...]
    forwards: float
    backwards: float


def sentences(found: Attribution, layers: Sequence[RoutedLayer]) -> list[str]:
    """Say which layers carry and began the gap, whose flips it is, and what made the worst token's."""
    carries, began = int(np.argmax(found.carried_L)), int(np.argmax(found.began_L))
    if found.routing <= 0:
        return [f"Flips make no part of k3: together they add {found.routing:.2e} to {found.k3:.2e} nats."]
    if found.carried_L[carries] > 0:
        said = [
            f"Flips of {layers[carries]} carry the most of routing's part of k3, {found.carried_L[carries]:.2e} of "
            f"{found.routing:.2e} nats; flips that no other made began the most of it in {layers[began]}, "
            f"{found.began_L[began]:.2e}. First order, {found.error:.1%} off the exact sums"
            + ("." if found.error < TRUSTED else ": names hold longer than amounts, which are not to be relied on.")
        ]
    else:
        said = [
            f"Flips make {found.routing:.2e} of {found.k3:.2e} nats of k3; first order, {found.error:.1%} off the "
            "exact sums, does not say in which layer."
        ]
    share = sum(each.share for each in found.worst)
    if found.own_share is not None:
        said.append(
            f"In the {len(found.worst)} worst sequences, with {share:.0%} of k3, flips at a token's own input make "
            f"{found.own_share:.0%} of routing's part, and those of earlier tokens the rest."
        )
    token = found.tokens[0]
    if token.flip is None:
        return said
    position, layer = token.flip
    where = (
        f"Replay moves the token at position {token.position} of sequence {token.sequence} most: of its gap of "
        f"{token.gap:+.3f} nats {token.routing:+.3f} are routing's. "
    )
    flip = f"in {layers[layer]} at position {position}, {'a root' if token.is_root else 'a consequence of others'},"
    if abs(token.of_flip) >= abs(token.routing) / 2:
        said.append(f"{where}The flip {flip} carries {token.of_flip:+.3f} of it, as one more pass shows.")
    else:
        said.append(
            f"{where}No single flip is the cause: the first of {token.num_flips}, {flip} carries {token.of_flip:+.3f}, "
            "as one more pass shows."
        )
    return said
