"""Collectives on gloo by which ranks agree, and every rank learns of an error on any rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from foreroute import errors
from foreroute.ep.transfer.peers import collective_errors, own_group
from foreroute.errors import ForerouteError
from foreroute.files.container import blake2b_hex

TEXT_BYTES = 1024
"""Every rank sends as many, so that their texts need one collective and no exchange of lengths."""
FACTS, NUMBERS = 2, 4
"""Capacity of a vote. Every rank sends as many, whatever it has to say."""


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
        vote, mine = Vote(), None
        try:
            yield vote
        except BaseException as raised:
            mine = raised
        records = self.gather(torch.tensor(vote.record(refuses=mine is not None)), what)
        vote.numbers_GN = records[:, 1 + 2 * FACTS :].numpy()
        if records[:, 0].any():
            self._raise_alike(mine, what, error)
        for number in range(FACTS):
            among_G, digest_G = records[:, 1 + 2 * number : 3 + 2 * number].T.tolist()
            expected = dict(zip(among_G, digest_G, strict=True))
            wrong = {among for among, digest in zip(among_G, digest_G, strict=True) if digest != expected[among]}
            if wrong:
                texts = zip(self._names, self.texts(vote.facts[number].text, what), among_G, strict=True)
                listed = "; ".join(f"{name}: {text}" for name, text, among in texts if among in wrong)
                raise error(vote.facts[number].otherwise.replace("{}", listed))

    def _raise_alike(self, mine: BaseException | None, what: str, error: type[ForerouteError]) -> None:
        """Raise what some rank has refused, which may be this one."""
        builtin = tuple(each for each in error.__mro__ if each.__module__ == "builtins")[:-3]
        is_refusal = isinstance(mine, (ForerouteError, *builtin))
        text = str(mine) if is_refusal else f"{mine!r}, whose trace is in the log of that rank"
        sent = "" if mine is None else f"{type(mine).__name__}\n{text}"
        said = [each.partition("\n")[::2] for each in self.texts(sent, what)]
        if mine is not None and not is_refusal:
            raise mine
        first = getattr(errors, next(name for name, _ in said if name), error)
        texts = (f"{name}: {text}" for name, (refused, text) in zip(self._names, said, strict=True) if refused)
        raise first(f"{what}: " + "; ".join(texts)) from mine

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

    def from_first(self, mine: bytes, what: str) -> bytes:
        """Return the bytes of the first rank, on every rank."""
        content = torch.from_numpy(np.frombuffer(mine, np.uint8).copy())
        size, first = torch.tensor([len(content)]), dist.get_global_rank(self.group, 0)
        with collective_errors(what, self.group):
            dist.broadcast(size, first, group=self.group)
            sent = content if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(sent, first, group=self.group)
        return sent.numpy().tobytes()

    def texts(self, mine: str, what: str) -> list[str]:
        """Return what each rank says, cut to 1 KiB of UTF-8."""
        sent = np.zeros(TEXT_BYTES, np.uint8)
        encoded = np.frombuffer(mine.encode()[:TEXT_BYTES], np.uint8)
        sent[: len(encoded)] = encoded
        got = self.gather(torch.from_numpy(sent), what)
        return [bytes(text.numpy()).rstrip(b"\0").decode(errors="replace") for text in got]


class Fact(NamedTuple):
    """Something that ranks must say alike."""

    text: str
    otherwise: str  # the error, with "{}" where the texts of ranks go
    among: int  # ranks with one number compare their texts


@dataclass(eq=False)
class Vote:
    """Facts that a rank states beside its consent, and those of all."""

    facts: list[Fact] = field(default_factory=list)
    numbers: Sequence[int] = ()
    numbers_GN: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, NUMBERS), np.int64))  # when all agreed

    def same(self, text: str, otherwise: str, *, among: int = 0) -> None:
        """Have ranks compare texts, up to two times in a vote, on all ranks alike. See `Fact`."""
        self.facts.append(Fact(text, otherwise, among))

    def record(self, *, refuses: bool) -> list[int]:
        """Return what is sent, of a size that is the same on ranks that refuse before they have said everything."""
        facts = [
            number for each in self.facts for number in (each.among, int(blake2b_hex(each.text.encode())[:15], 16))
        ]
        room = [0] * (2 * FACTS - len(facts)), [0] * (NUMBERS - len(self.numbers))
        return [int(refuses), *facts, *room[0], *self.numbers, *room[1]]
