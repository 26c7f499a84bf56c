"""A small stand-in of the loop in Megatron-LM's megatron/rl: its names, order and calls, without arguments of a command
line, timers, environments and GPUs. The patch of examples/megatron/README.md is applied to this text. It is not
Megatron-LM's code.

Some lines stand here as they do there, so that the patch finds its places.
"""

import copy
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

TokenRollout = SimpleNamespace


class InferenceResponse(SimpleNamespace):
    completion_id: str | None = None


class RLRuntimeState:
    def __init__(self):
        self.packing_context = None


_state = RLRuntimeState()


def get_rl_runtime_state():
    return _state


def base_generate(response):
    choice = response.choices[0]
    return InferenceResponse(
            token_ids=choice.token_ids,
            prompt_length=choice.prompt_length,
            completion_id=response.id,
    )  # fmt: skip


def rollout_from_episode(responses):
    return TokenRollout(
                trajectory=[r.token_ids for r in responses],
                generation_mask=[[x >= r.prompt_length for x in range(len(r.token_ids))] for r in responses],
                completion_ids=[r.completion_id for r in responses],
    )  # fmt: skip


def get_logprobs(model, tokens, position_ids, no_grad=False, packed_seq_params=None):
    if True:
        if packed_seq_params is None:
            ends = torch.tensor([0, tokens.shape[1]], dtype=torch.int32)
            width = tokens.shape[1]
            packed_seq_params = PackedSeqParams("thd", ends, ends, max_seqlen_q=width, max_seqlen_kv=width)
        if True:
            with torch.no_grad() if no_grad else nullcontext():
                logits_or_hidden_states = model(
                    tokens, position_ids, None, packed_seq_params=packed_seq_params, runtime_gather_output=True
                )
    logits = logits_or_hidden_states[:, :-1].log_softmax(-1)
    return logits.gather(-1, tokens[:, 1:, None])[..., 0]


def logprobs_forward_step(data_iterator, model, packing_context=None):
    model.eval()
    tokens, positions, packed = batch_of(next(data_iterator), packing_context)
    logprobs = (get_logprobs(model, tokens, positions, no_grad=True, packed_seq_params=packed), None)
    model.train()
    return logprobs


def batch_of(data, packing_context):
    """Two tensors, or the number of a bin."""
    return (*data, None) if packing_context is None else packing_context[int(data[0])]


def compute_logprobs_batch(model, data_loader, packing_context, seq_length):
    forward = partial(logprobs_forward_step, packing_context=packing_context)
    return through_schedule(forward, model, data_loader, seq_length, forward_only=True, collect_non_loss_data=True)


def through_schedule(forward, model, data_loader, seq_length, **more):
    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(data_loader),
        model=model,
        num_microbatches=len(data_loader),
        seq_length=seq_length,
        micro_batch_size=1,
        **more,
    )


def prepare_data_for_update(model, ref_state_dict, rollouts, tokenizer, seq_length, bins=None):
    """Batches, and what policy and reference say of their tokens. `bins`: which rollouts are packed together."""
    runtime_state = get_rl_runtime_state()

    model = model[0]
    rollouts = [rollout for group in rollouts for rollout in group]
    rows = [rollout.trajectory[-1] for rollout in rollouts]
    has_inference_logprobs = False
    if True:
        if not has_inference_logprobs:
            pass
    if bins is None:
        padded = [row + [tokenizer.pad] * (seq_length - len(row)) for row in [*rows, []]]  # one inert row
        data_loader = [(torch.tensor([row]), torch.arange(seq_length)[None]) for row in padded]
    else:
        runtime_state.packing_context = [packed(of_bin, rows, tokenizer.pad, seq_length) for of_bin in bins]
        data_loader = [(torch.tensor(number),) for number in range(len(bins))]
    if True:
        if True:
            if True:
                old_logprobs = compute_logprobs_batch(model, data_loader, runtime_state.packing_context, seq_length)
                cur_st_dict = copy.deepcopy(model.state_dict())
                model.load_state_dict(ref_state_dict)
                ref_logprobs = compute_logprobs_batch(model, data_loader, runtime_state.packing_context, seq_length)
                # logprobs are [b, seq, h] now.
                model.load_state_dict(cur_st_dict)
    return data_loader, old_logprobs, ref_logprobs


def packed(of_bin, rows, pad, seq_length):
    """(tokens, positions, where each is) of a bin; each in slots of a multiple of four, what is left in one more."""
    slots = [-(-len(rows[number]) // 4) * 4 for number in of_bin]
    tokens = [rows[number] + [pad] * (n - len(rows[number])) for number, n in zip(of_bin, slots, strict=True)]
    tokens = [token for row in tokens for token in row]
    left = seq_length - len(tokens)
    # Megatron-LM has as many ends in every bin
    ends = torch.tensor([0, *slots, left, 0, 0]).cumsum(0).int()
    real = torch.tensor([0, *(len(rows[number]) for number in of_bin), left, 0, 0]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in (*slots, left)])
    packed_seq_params = PackedSeqParams("thd", real, real, ends, ends, max(slots), max(slots))
    return torch.tensor([tokens + [pad] * left]), positions[None], packed_seq_params


def forward_step(data_iterator, model):
    """Of train_rl.py, which the patch does not touch."""
    tokens, positions, packed = batch_of(next(data_iterator), get_rl_runtime_state().packing_context)
    return get_logprobs(model, tokens, positions, packed_seq_params=packed), lambda logprobs: (logprobs.mean(), {})


def train_step(model, data_loader, seq_length):
    through_schedule(forward_step, model, data_loader, seq_length, forward_only=False)
