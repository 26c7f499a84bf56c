"""Collectives on gloo by which ranks agree, and every rank learns of an error on any rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from foreroute import errors
from foreroute.ep.transfer.peers import collective_errors, gather_objects, own_group
from foreroute.errors import ForerouteError


class RankConsensus:
    """A gloo group for what all ranks decide, made as by `own_group`.

    Every method is a collective call, and raises `TransferError` when a rank does not answer within `timeout_s`.
    """

    def __init__(
        self, *along: dist.ProcessGroup, ranks: list[int] | None = None, timeout_s: float | None = None
    ) -> None:
        self.group = own_group(*along, ranks=ranks, timeout_s=timeout_s, backend="gloo")
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._names = [f"rank {rank}" for rank in dist.get_process_group_ranks(self.group)]

    @contextmanager
    def agree(self, what: str, error: type[ForerouteError]) -> Iterator[Vote]:
        """Do the body on every rank; behind it all go on, having asked each other once, or all raise.

        All raise the class of the first rank that refuses: `error` where it raised what `error` derives from, such as
        `ValueError`, or says other things than the rest. A rank that fails otherwise raises its own error.
        """
        vote, mine, refusal = Vote(), None, None
        try:
            yield vote
        except BaseException as raised:
            mine = raised
        builtin = tuple(each for each in error.__mro__ if each.__module__ == "builtins")[:-3]
        is_refusal = isinstance(mine, (ForerouteError, *builtin))
        if mine is not None:
            text = str(mine) if is_refusal else f"{mine!r}, whose trace is in the log of that rank"
            refusal = type(mine).__name__, text
        said = self.objects((refusal, vote.facts, vote.numbers), what)
        if refused := [(name, *each) for name, (each, *_) in zip(self._names, said, strict=True) if each]:
            if mine is not None and not is_refusal:
                raise mine
            first = getattr(errors, refused[0][1], error)
            raise first(f"{what}: " + "; ".join(f"{name}: {text}" for name, _, text in refused)) from mine
        for facts_G in zip(*(facts for _, facts, _ in said), strict=True):
            expected = {fact.among: fact.text for fact in reversed(facts_G)}
            wrong = {fact.among for fact in facts_G if fact.text != expected[fact.among]}
            if wrong:
                pairs = zip(self._names, facts_G, strict=True)
                listed = "; ".join(f"{name}: {fact.text}" for name, fact in pairs if fact.among in wrong)
                raise error(facts_G[self.rank].otherwise.replace("{}", listed))
        vote.numbers_GN = np.array([numbers for _, _, numbers in said], np.int64)

    def most(self, mine: Tensor, what: str) -> Tensor:
        """Return the elementwise largest of a tensor of integers that every rank has."""
        largest = mine.clone()
        with collective_errors(what, self.group):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest

    def gather(self, mine: Tensor, what: str) -> Tensor:
        """Stack the tensors of all ranks, of one shape and dtype, to [G, ...]."""
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with collective_errors(what, self.group):
            dist.all_gather(parts, mine, group=self.group)
        return torch.stack(parts)

    def objects(self, mine: Any, what: str) -> list[Any]:
        """Return what each rank hands in."""
        return gather_objects(mine, self.group, what)

    def from_first(self, mine: bytes, what: str) -> bytes:
        """Return the bytes of the first rank, on every rank."""
        sent = [mine]
        with collective_errors(what, self.group):
            dist.broadcast_object_list(sent, group=self.group, group_src=0)
        return sent[0]


class Fact(NamedTuple):
    """Something that ranks must say alike."""

    text: str
    otherwise: str  # the error, with "{}" where the texts of ranks go
    among: int  # ranks with one number compare their texts


@dataclass(eq=False)
class Vote:
    """What a rank says beside its consent, and what all have said."""

    facts: list[Fact] = field(default_factory=list)
    numbers: Sequence[int] = ()  # as many on each rank
    numbers_GN: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # when all agreed

    def same(self, text: str, otherwise: str, *, among: int = 0) -> None:
        """Have ranks compare texts, in the same order on all of them. See `Fact`."""
        self.facts.append(Fact(text, otherwise, among))
