# ruff: noqa: E402  versions are looked at before anything else of a peer is imported
"""Sampling masks of verl's rollouts with vLLM, which engines with routing replay then score on.

verl imports this module in each of its processes when it is told to, beside that of the engine:

    actor_rollout_ref.model.external_lib=[foreroute.trainers.verl.fsdp,foreroute.trainers.verl.sampling_masks]
    +actor_rollout_ref.rollout.engine_kwargs.vllm.return_sampling_mask=True

By the second line vLLM returns masks with each answer, which verl's server then has in `extra_fields`. verl's loop with
tools keeps only what the first request brought. So an agent loop is watched: the masks of all its requests are laid on
the tokens of its response, and travel as `sampling_mask` beside them, or in the batch's `extra_fields`
(`trainer.use_v1`). In the engine, also that of a reference, log-probs of sampled tokens are those on their sets;
log-probs of all other tokens, which no loss takes, are 0. Entropy stays verl's, over all tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from foreroute.adapters.versions import require_peers

require_peers("torch", "transformers", "verl")

from torch import Tensor
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.utils.tensordict_utils import get_non_tensor_data
from verl.workers.rollout.llm_server import LLMServerClient

from foreroute.errors import ReplayError
from foreroute.replay import masked_logprobs_of_logits
from foreroute.replay.rows import to_device
from foreroute.trace import DecisionStream
from foreroute.trace.checks import join_ranges
from foreroute.trainers.verl.packed_batch import PackedBatch
from foreroute.trainers.verl.registry import refuse_what_engines_pass_over

FIELD = "sampling_mask"
"""The field of a sequence: `counts` int32 [R], ids of the set of each token of the response, 0 for one that was not
sampled; and `ids` int32, those of all sets joined."""
SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"

Turn = tuple[list[int], list[int], Any]
"""A request of an agent loop: its prompt, what was answered, and the answer's field; None where it has none."""
_turns: ContextVar[list[Turn]] = ContextVar("_turns")


def packed_sets(batch: Any) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Read how many ids the set of each of N rows has, 0 for none, and all ids, of a batch without padding."""
    packed = PackedBatch(batch)
    trained_N, is_response_N = (each.cpu().numpy() for each in (packed.trained_N, packed.index_N >= 0))
    packed.require_true()
    offsets = packed.offsets.cpu().numpy()
    counts_N, ids = np.zeros(len(trained_N), np.int64), [np.zeros(0, np.int32)]
    for s, (begin, end, given) in enumerate(zip(offsets[:-1], offsets[1:], _read_fields(batch), strict=True)):
        trained = trained_N[begin:end][is_response_N[begin:end]]
        if not trained.any():  # a sequence that fills the batch up may have those of another
            continue
        counts = np.zeros(len(trained), np.int32) if given is None else given["counts"]
        if len(counts) != len(trained) or (trained & (counts == 0)).any():
            raise ReplayError(
                f"sequence {s} trains on {int(trained.sum())} tokens of a response of {len(trained)}, and its rollout "
                f"brought {int((counts > 0).sum())} sampling masks for {len(counts)} tokens. Sample with verl's own "
                "vLLM server and an agent loop that hands its answers on as they are, or without top_p and top_k"
            )
        counts_N[end - 1 - len(counts) : end - 1] = counts  # row p holds the set of token p + 1
        ids.append(given["ids"])
    return counts_N, np.concatenate(ids)


def _read_fields(batch: Any) -> list[Any]:
    if FIELD in batch.keys():  # noqa: SIM118  a TensorDict is no mapping
        return list(batch[FIELD])
    if "extra_fields" in batch.keys():  # noqa: SIM118
        return [(each or {}).get(FIELD) for each in batch["extra_fields"]]
    return [None] * len(batch["input_ids"])


@contextmanager
def scored_on_sets(
    module: Any,
    function: str,
    batch: Any,
    rows_of: Callable[[Tensor], NDArray[np.integer]],
    vocabulary_group: Any = None,  # of ranks that have parts of the vocabulary
) -> Iterator[None]:
    """While the context is open, have a function of a module of verl score labels of a micro-batch on its sets.

    `rows_of` finds the row of the batch without padding at each place of this rank's labels; others are padding.
    Raises `ReplayError` where no logits are scored.
    """
    counts_N, ids = packed_sets(batch)  # before it is on the device, which would be waited for
    calls = 0

    def on_sets(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        nonlocal calls
        calls += 1
        vocabulary_size = logits.shape[-1] * (1 if vocabulary_group is None else vocabulary_group.size())
        labels_R, sets = _sets_of_rows(counts_N, ids, rows_of(labels), labels.reshape(-1), vocabulary_size)
        logits_RV = logits.reshape(-1, logits.shape[-1])
        scores_R = masked_logprobs_of_logits(logits_RV, labels_R, sets, vocabulary_group=vocabulary_group)
        return scores_R.view(labels.shape)

    with patch.object(module, function, on_sets):
        yield
    if not calls and not get_non_tensor_data(batch, "distillation_only", default=False):
        raise ReplayError(
            "verl made log-probs past its logits, so that no sampling mask was replayed in them; leave "
            "use_fused_kernels off, or sample without top_p and top_k"
        )


def _sets_of_rows(
    counts_N: NDArray[np.int64],
    ids: NDArray[np.int32],
    row_R: NDArray[np.integer],
    labels_R: Tensor,
    vocabulary_size: int,
) -> tuple[Tensor, DecisionStream]:
    """Give labels and sets of R of the N rows; where none is, token 0 of the set of 0: log-prob 0."""
    row_R = np.minimum(row_R, len(counts_N))  # padding is the row behind the last, or -1
    counts_R = np.append(counts_N, 0)[row_R]
    has_set_R, sizes_R = counts_R > 0, np.maximum(counts_R, 1)
    starts_R = np.append(counts_N.cumsum() - counts_N, 0)[row_R]
    joined = np.zeros(sizes_R.sum(), np.int64)
    joined[has_set_R.repeat(sizes_R)] = ids[join_ranges(starts_R[has_set_R], counts_R[has_set_R])]
    sets = DecisionStream.from_sets(vocabulary_size, np.ones(len(sizes_R), np.bool_), sizes_R, joined)
    return labels_R.where(to_device(has_set_R, labels_R.device), 0), sets


def lay_masks_on(turns: list[Turn], prompt: list[int], response: list[int]) -> dict[str, NDArray[np.int32]]:
    """Make the field of a response: sets of requests whose prompt and answer stand in it, cut where it is cut."""
    tokens = [*prompt, *response]
    sets = [np.zeros(0, np.int32)] * len(response)
    for asked, answered, given in turns:
        first = len(asked) - len(prompt)
        kept = answered[: max(len(tokens) - len(asked), 0)]
        stands = first >= 0 and tokens[: len(asked) + len(kept)] == [*asked, *kept]
        if stands and given is not None and len(given["counts"]) == len(answered):
            ends = given["counts"].cumsum()
            sets[first : first + len(kept)] = np.split(given["ids"], ends)[: len(kept)]
    return _make_field(sets)


def _make_field(sets: Sequence[Any]) -> dict[str, NDArray[np.int32]]:
    empty = np.zeros(0, np.int32)
    joined = np.concatenate([empty, *sets], dtype=np.int32)
    return {"counts": np.array([len(each) for each in sets], np.int32), "ids": joined}


def _record_answer_masks(own: Callable[..., None]) -> Callable[..., None]:
    """Have the server's reader of an answer's prompt put the masks of the answer beside it."""

    @wraps(own)
    def extract(output: Any, num_prompt_logprobs: Any, result_dict: dict[str, Any]) -> None:
        own(output=output, num_prompt_logprobs=num_prompt_logprobs, result_dict=result_dict)
        mask = output.outputs[0].sampling_mask
        if mask is not None:
            result_dict[FIELD] = _make_field(mask.token_ids)

    return extract


def _record_requests(own: Callable[..., Any]) -> Callable[..., Any]:
    """Have the client of verl's servers note each request of the agent loop that asks."""

    @wraps(own)
    async def generate(self: Any, request_id: Any, *, prompt_ids: Any, **kwargs: Any) -> Any:
        output = await own(self, request_id, prompt_ids=prompt_ids, **kwargs)
        _turns.get([]).append((list(prompt_ids), list(output.token_ids), output.extra_fields.pop(FIELD, None)))
        return output

    return generate


def _attach_masks(own: Callable[..., None]) -> Callable[..., None]:
    """Have `run` of an agent loop lay the masks of its requests on what it returns."""

    @wraps(own)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        inner = self.run

        @wraps(inner)
        async def run(*args: Any, **kwargs: Any) -> Any:
            turns: list[Turn] = []
            outer = _turns.set(turns)
            try:
                result = await inner(*args, **kwargs)
            finally:
                _turns.reset(outer)
            for output in result if isinstance(result, list) else [result]:
                output.extra_fields[FIELD] = lay_masks_on(turns, output.prompt_ids, output.response_ids)
            return result

        self.run = run

    return initialize


def register() -> None:
    """Have verl's rollouts bring sampling masks, and make no engine that would leave a replay out."""
    refuse_what_engines_pass_over()
    LLMServerClient.generate = _record_requests(LLMServerClient.generate)
    AgentLoopBase.__init__ = _attach_masks(AgentLoopBase.__init__)
    server: Any = sys.modules.get(SERVER)  # loaded where it serves, and nowhere for its masks: vLLM takes seconds
    if hasattr(server, "extract_prompt_logprobs"):  # without it no masks arrive, and the engine says so
        # a global, and no method: Ray holds those of the server's class as they were when its actor was made
        server.extract_prompt_logprobs = _record_answer_masks(server.extract_prompt_logprobs)


register()
