"""Between trainer and engine: rollouts one way, weights the other, and a canary that sees whether these arrived.

The first rank alone speaks with the engine. What fails there ends all ranks, with one message, and so does a rank that
is gone.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from examples.pipeline.passes import micro_batches, replayed_logprobs
from examples.pipeline.policy import VOCABULARY, WIDTH, Policy
from foreroute.adapters.checkpoint import Weights
from foreroute.capture import Generation, Sampling, load_generation, save_generation
from foreroute.errors import EngineError, ForerouteError

CANARIES, PROMPT = 16, 4
NOISE = 1e-4
"""Nats that log-probabilities in float32 may differ. Healthy syncs of this policy stay below 1e-5."""

Done = TypeVar("Done")
StartEngine = Callable[[Path], Any]
"""Starts one of `foreroute.engines` on a checkpoint."""


ENDED = "ended"
"""In the folder of a run: the rank that made it has said why the run ended."""


@contextmanager
def ending_together(folder: Path) -> Iterator[None]:
    """Where a rank fails or is gone, have all end, and one of them say why: the first that noticed.

    The others see that it is gone in whatever they wait for, or are told by torchrun (SIGTERM).
    """
    on_first_rank(lambda: (folder / ENDED).unlink(missing_ok=True))
    before = signal.signal(signal.SIGTERM, _told_to_end)
    try:
        yield
    except Exception as error:
        try:
            (folder / ENDED).touch(exist_ok=False)
        except FileExistsError:
            raise SystemExit(1) from None
        if not isinstance(error, ForerouteError | RuntimeError):
            raise  # a mistake in this program, whose place matters
        print(
            f"the run ends: rank {dist.get_rank()} lost another rank, or failed itself ({type(error).__name__}: "
            f"{error}); the same command goes on from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(1) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _told_to_end(*_: Any) -> None:
    raise RuntimeError("told to end by SIGTERM, as torchrun does when a rank is gone")


def on_first_rank(work: Callable[[], Done]) -> Done | None:
    """What the first rank does; None on the others. Where it fails, all ranks end, and the first says why."""
    done, problem = None, None
    if dist.get_rank() == 0:
        try:
            done = work()
        except ForerouteError as error:
            problem = f"{type(error).__name__}: {error}"
    said = [problem]
    dist.broadcast_object_list(said)
    if said[0] is not None:
        if dist.get_rank() == 0:
            print(f"the run ends: {said[0]}", file=sys.stderr, flush=True)
        raise SystemExit(1)
    return done


def shared(path: Path, sample: Callable[[], Generation]) -> Generation:
    """What the first rank samples, on every rank, by way of a file that all can read."""

    def save() -> None:
        path.parent.mkdir(exist_ok=True)
        save_generation(sample(), path, overwrite=True)

    on_first_rank(save)
    return load_generation(path)


@contextmanager
def started(start: StartEngine, checkpoint: Path) -> Iterator[Any]:
    """An engine while the context is open, on the first rank; None on the others."""
    engine = on_first_rank(lambda: start(checkpoint))
    try:
        yield engine
    finally:
        if engine is not None:
            engine.close()


def hand_over(weights: Iterable[Any], take: Callable[[Weights], object]) -> None:
    """Have the first rank take the weights that all ranks export."""

    def taken() -> None:
        try:
            take(weights)
        finally:
            # the other ranks wait until their last tensor is taken, even where it is of no use any more
            for _ in weights:
                pass

    if dist.get_rank():
        for _ in weights:
            pass
    on_first_rank(taken)


def check_canary(policy: Policy, engine: Any, folder: Path) -> dict[str, float]:
    """Sample after fixed prompts, and compare the log-probabilities of engine and trainer token by token.

    The trainer replays the engine's routes, so that no tie between experts raises an alarm.

    Returns:
        The largest difference, in nats, and the share of all experts that were picked: weights of the others were not
        looked at.
    """
    rng = np.random.default_rng(0)
    prompts = list(rng.integers(0, VOCABULARY, (CANARIES, PROMPT), dtype=np.int32))
    sampling = Sampling(max_new_tokens=WIDTH - PROMPT, end_token=-1)
    seeded = torch.Generator().manual_seed(0)
    generation = shared(folder / "canary.safetensors", lambda: engine.generate(prompts, sampling, seeded))
    batches = micro_batches(generation, policy, CANARIES // mpu.get_data_parallel_world_size())
    logprobs_R = replayed_logprobs(policy, batches, generation)
    apart_R = np.abs(logprobs_R - generation.logprobs_R)

    def judge() -> None:
        if not apart_R.max() <= NOISE:
            raise EngineError(
                f"engine and trainer are {apart_R.max():.2g} nats apart at a token of the canary, after the sync of "
                f"version {engine.weight_version}; float32 noise stays below {NOISE:g}. Weights did not all arrive: "
                "look for tensors that were not exported, that the engine skipped, or that it did not pack again"
            )

    on_first_rank(judge)
    trace = generation.trace
    picked = [np.unique(trace.expert_ids_NLK[trace.valid_N, layer]).size for layer in range(trace.spec.num_layers)]
    return {"canary_nats": float(apart_R.max()), "canary_experts": sum(picked) / len(picked) / trace.spec.num_experts}
