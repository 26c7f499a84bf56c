"""How ranks find out that all of them are well, and say the same when one is not. On the host, by gloo."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from foreroute.ep.transfer.peers import collective_errors, own_group
from foreroute.errors import PlanError
from foreroute.files.container import checksum
from foreroute.plan import StepPlan
from foreroute.plan.capabilities import Executor, warn_of_lacks

TEXT_BYTES = 1024
"""Every rank sends as many, so that their texts need one collective and no exchange of lengths."""


class RankConsensus:
    """A gloo group of its own for questions that all ranks answer. Every method is a collective call.

    Args:
        along, ranks, timeout_s: as in `own_group`, which it is made by. A rank that does not answer for so long is
            taken for dead.
        member: what one of them is called in messages, with its number behind.
    """

    def __init__(
        self,
        *along: dist.ProcessGroup,
        ranks: list[int] | None = None,
        timeout_s: float | None = None,
        member: str = "rank",
    ) -> None:
        self.member = member
        self.group = own_group(*along, ranks=ranks, timeout_s=timeout_s, backend="gloo")
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)

    def objections(self, mine: str | None, what: str) -> list[str]:
        """What is wrong, on any rank.

        Args:
            mine: what is wrong here, or None.
            what: the question in words, for errors.

        Returns:
            The same list on every rank, empty when all is well: a single integer is exchanged then.

        Raises:
            TransferError: when a rank does not answer.
        """
        count = torch.tensor([0 if mine is None else 1], dtype=torch.int32)
        with collective_errors(what, self.group):
            dist.all_reduce(count, group=self.group)
        if not count.item():
            return []
        return [f"{self.member} {rank}: {text}" for rank, text in enumerate(self.texts(mine or "", what)) if text]

    def most(self, mine: Tensor, what: str) -> Tensor:
        """The elementwise largest of a tensor of integers that every rank has.

        Raises:
            TransferError: when a rank does not answer.
        """
        largest = mine.clone()
        with collective_errors(what, self.group):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest

    def gather(self, mine: Tensor, what: str) -> Tensor:
        """The tensors of all ranks, which have one shape and dtype, stacked to [G, ...].

        Raises:
            TransferError: when a rank does not answer.
        """
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with collective_errors(what, self.group):
            dist.all_gather(parts, mine, group=self.group)
        return torch.stack(parts)

    def from_first(self, mine: bytes | None, what: str) -> bytes | None:
        """What the first rank hands in, on every rank; None where it hands in nothing.

        Raises:
            TransferError: when a rank does not answer.
        """
        content = np.frombuffer(mine or b"", np.uint8).copy()
        size = torch.tensor([-1 if mine is None else len(content)])
        first = dist.get_global_rank(self.group, 0)
        with collective_errors(what, self.group):
            dist.broadcast(size, first, group=self.group)
            if size.item() <= 0:
                return None if size.item() < 0 else b""
            sent = torch.from_numpy(content) if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(sent, first, group=self.group)
        return sent.numpy().tobytes()

    def texts(self, mine: str, what: str) -> list[str]:
        """What each rank says, cut to 1 KiB of UTF-8.

        Raises:
            TransferError: when a rank does not answer.
        """
        sent = np.zeros(TEXT_BYTES, np.uint8)
        encoded = np.frombuffer(mine.encode()[:TEXT_BYTES], np.uint8)
        sent[: len(encoded)] = encoded
        got = self.gather(torch.from_numpy(sent), what)
        return [bytes(text.numpy()).rstrip(b"\0").decode(errors="replace") for text in got]


def agree_on_plan(consensus: RankConsensus, step: int, plan: StepPlan, executor: Executor = "hf") -> None:
    """Make sure that all ranks are about to carry out the same plan, and that it is for these ranks.

    What the executor lacks for it is warned of.

    Raises:
        PlanError: on every rank alike, when plans or steps differ, or the plan is for other ranks.
        TransferError: when a rank does not answer.
    """
    mine = f"step {step}, {plan.topology.num_ranks} ranks, plan {plan_digest(plan)}"
    texts = consensus.texts(mine, f"agreeing on the plan of step {step}")
    if len(set(texts)) > 1:
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise PlanError(
            f"ranks hold different plans ({listed}); every rank must be given the same plan of the same step"
        )
    require_ranks(plan, consensus.size)
    warn_of_lacks(plan, executor)


def plan_digest(plan: StepPlan) -> str:
    """128 bit, hexadecimal, of everything that the executor reads in a plan."""
    facts = {
        "topology": repr(plan.topology),
        "shape": repr(plan.shape),
        "slots": plan.slots,
        "gains": repr(sorted(plan.gains.items())),
        "counts": plan.counts_digest,
        "tokens": plan.tokens_digest,
    }
    return checksum(facts, plan.hosts._asdict())


def require_ranks(plan: StepPlan, num_ranks: int) -> None:
    """Raise `PlanError` unless a plan was made for this many ranks."""
    if plan.topology.num_ranks != num_ranks:
        raise PlanError(
            f"the plan is for {plan.topology.num_ranks} ranks, and {num_ranks} are here; plan again for this world size"
        )
