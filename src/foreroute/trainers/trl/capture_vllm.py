"""Routes and sampling masks from vLLM, in the trainer's process ("colocate"), and routes from behind its server.

TRL reads tokens and log-probs out of vLLM's answer and drops the rest. Watched is the answer itself: what the `LLM`
object, or the client's request, returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch.distributed as dist
from trl.generation import vllm_generation

from foreroute.adapters.checkpoint import ServedModel
from foreroute.capture import decode
from foreroute.core.hooks import overridden
from foreroute.errors import BatchMismatchError, CaptureError, ForerouteError, ReplayError
from foreroute.trace import RoutingTrace
from foreroute.trainers.trl.settings import cuts_of

COMPLETIONS = "/v1/completions"


@contextmanager
def colocated_vllm_returns_decisions(trainer: Any, replay: str) -> Iterator[None]:
    """Have TRL start its vLLM so that it returns routes and sampling masks, for which it has no setting (TRL 1.16)."""
    # nothing of R2 comes from the rollout; TRL imports LLM where vLLM is installed
    if replay == "R2" or not hasattr(vllm_generation, "LLM"):
        yield
        return

    make = vllm_generation.LLM

    def with_routes(*args: Any, **kwargs: Any) -> Any:
        # TRL has read its settings before it starts vLLM; masks are used in R3 alone
        masks = {"return_sampling_mask": True} if replay == "R3" and cuts_of(trainer) else {}
        return make(*args, **{"enable_return_routed_experts": True, **masks, **kwargs})

    with patch.object(vllm_generation, "LLM", with_routes):
        yield


class VLLMSource:
    """Watches what vLLM answers to TRL's `VLLMGeneration`."""

    def __init__(self, generation: Any, accelerator: Any, model: ServedModel) -> None:
        self._generation = generation
        self._accelerator = accelerator
        self._model = model
        self._serves = generation.mode == "server"
        self._answers: list[Any] = []  # of the turn that was watched last

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep what vLLM answers while the context is open, in a process that asks."""
        answers = self._answers = list[Any]()

        def keep_answer(ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            answer = ask(*args, **kwargs)
            if not self._serves or str(args[0]).endswith(COMPLETIONS):
                answers.append(answer)
            return answer

        if self._serves and not self._accelerator.is_main_process:
            yield
            return
        holder = self._generation.vllm_client if self._serves else self._generation.llm
        with overridden(holder, "_post" if self._serves else "generate", keep_answer):
            yield

    def read(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], weight_version: int
    ) -> tuple[RoutingTrace, None]:
        """Read routes of a turn. Raises where there are none. A collective call of processes that share a server."""
        answers, count = self._answers, len(prompts)
        asks = not self._serves or self._accelerator.is_main_process
        outcome = self._decode(answers, weight_version) if asks else None
        if self._serves and self._accelerator.num_processes > 1:
            outcome = self._scatter(outcome, count)
        if isinstance(outcome, ForerouteError):
            raise outcome
        assert outcome is not None, "a process that does not ask is given a share"
        if not self._serves and self._generation.tensor_parallel_size > 1:
            # ranks that share an engine are answered alike, and take their sequences in blocks
            outcome = _block(outcome, dist.get_rank(group=self._generation.tp_group), count)
        return outcome, None

    def _decode(self, answers: list[Any], weight_version: int) -> RoutingTrace | ForerouteError:
        """Decode what vLLM answered; an error is returned, as other processes have to learn of it too."""
        if len(answers) != 1:
            return ReplayError(
                f"vLLM was asked {len(answers)} times in one turn, expected once; this way of sampling is not "
                "known. Return the routes from a rollout_func, or take replay='R2'"
            )
        try:
            return decode(
                answers[0],
                model=self._model.spec,
                vocabulary_size=self._model.vocabulary_size,
                weight_version=weight_version,
            )
        except CaptureError as error:
            how = "vllm serve --enable-return-routed-experts" if self._serves else "TRL's vllm_mode='colocate'"
            return CaptureError(f"the answer of {how}: {error}")
        except ForerouteError as error:
            return error

    def _scatter(self, outcome: RoutingTrace | ForerouteError | None, count: int) -> RoutingTrace | ForerouteError:
        """Give each process its part of what the main process was answered; TRL deals sequences out in blocks."""
        size = self._accelerator.num_processes
        parts: list[Any] | None = None
        if isinstance(outcome, RoutingTrace) and len(outcome) != size * count:
            outcome = BatchMismatchError(f"vLLM returned {len(outcome)} sequences for {size} processes of {count}")
        if isinstance(outcome, RoutingTrace):
            parts = [_block(outcome, rank, count) for rank in range(size)]
        elif outcome is not None:
            parts = [outcome] * size
        received: list[Any] = [None]
        dist.scatter_object_list(received, parts, src=0)
        mine: RoutingTrace | ForerouteError = received[0]
        return mine


def _block(trace: RoutingTrace, number: int, count: int) -> RoutingTrace:
    return trace.select(np.arange(number * count, (number + 1) * count))
