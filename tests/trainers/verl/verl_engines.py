"""Engines and batches of the released verl, on a CPU."""

import importlib
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask
from transformers.models.qwen3_moe import modeling_qwen3_moe
from verl.models.transformers import monkey_patch
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import EngineRouterReplayConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import left_right_2_no_padding

PACKED = "packed_on_cpu"
"""An attention that goes the way of flash attention, through verl's exchange between ranks of Ulysses."""
AttentionInterface.register(PACKED, flash_attention_forward)
AttentionMaskInterface.register(PACKED, flash_attention_mask)
FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def make(folder, replay="R3", *, whose=None, model=None, lr=1e-3, optimizer=None, **settings):
    """An engine, initialised: ours, or `whose="verl"` verl's own, for which nothing of ours is imported."""
    if whose is None:
        importlib.import_module("foreroute.trainers.verl.fsdp")  # what external_lib does
    strategy = settings.setdefault("strategy", "fsdp2")
    # the attention of Ulysses is in the way of flash attention
    attention = PACKED if settings.get("ulysses_sequence_parallel_size", 1) > 1 else "sdpa"
    model = {"fused_kernel_options": {"impl_backend": "torch"}} | (model or {})
    given = {"mixed_precision": FLOAT32, "use_torch_compile": False}
    given["router_replay"] = EngineRouterReplayConfig(mode=replay)
    engine_class = FSDPEngineWithLMHead if whose else EngineRegistry.get_engine_cls("language_model", strategy)
    engine = engine_class(
        model_config=HFModelConfig(path=folder, override_config={"attn_implementation": attention}, **model),
        engine_config=FSDPEngineConfig(**given | settings),
        optimizer_config=FSDPOptimizerConfig(lr=lr, total_training_steps=10, **(optimizer or {})),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def tensordict(batch, **settings):
    td = left_right_2_no_padding(TensorDict(dict(batch), batch_size=len(batch["input_ids"])))
    tu.assign_non_tensor(td, temperature=1.0, use_dynamic_bsz=True, max_token_len_per_gpu=40, use_remove_padding=True)
    tu.assign_non_tensor(td, **settings)
    return td


def full_weights(module):
    if isinstance(module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(module):
            return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return {name: parameter.full_tensor().detach() for name, parameter in module.named_parameters()}


def old_log_probs(engine, td):
    """Each sequence's log-probs [T - 1] of the next token, none but on the last stage, and what else came back."""
    with engine.eval_mode():
        output = engine.infer_batch(td, loss_function=None)
    if not output:
        return [], output
    return [row[:-1] for row in output["model_output"]["log_probs"].unbind()], output


def update(engine, td):
    """A mini-batch of training on the log-probs of responses."""
    with engine.train_mode():
        return engine.train_batch(td, loss_function=mean_log_prob)


def mean_log_prob(model_output, data, dp_group):
    rows = model_output["log_probs"].unbind()
    lengths = data["responses"].ne(0).sum(1).tolist()
    parts = [row[len(row) - 1 - n : len(row) - 1] for row, n in zip(rows, lengths, strict=True)]
    return -torch.cat(parts).sum() / 100, {"pg_loss": 0.0}


@contextmanager
def on_cpu():
    """While the context is open, FSDP1 takes states of the CPU, and what verl patches of a class is undone after it."""
    model = modeling_qwen3_moe.Qwen3MoeForCausalLM
    with ExitStack() as stack:
        stack.enter_context(patch.object(_init_utils, "_check_module_states_for_sync_module_states", lambda *_: None))
        stack.enter_context(patch.object(monkey_patch, "_flash_attention_forward", _attention))
        stack.enter_context(patch.object(model, "forward", model.forward))
        yield


def _attention(query_BTHD, key_BTHD, value_BTHD, mask, query_length, *args, position_ids, softmax_scale, **kwargs):
    """Of each packed sequence within itself, by what kernels of flash attention are given."""
    assert (mask, query_length) == (None, query_BTHD.shape[1])
    number_BT = (position_ids == 0).cumsum(-1)
    is_seen_BTT = (number_BT[:, :, None] == number_BT[:, None]).tril()
    heads_first = (each.transpose(1, 2) for each in (query_BTHD, key_BTHD, value_BTHD))
    out = F.scaled_dot_product_attention(
        *heads_first, attn_mask=is_seen_BTT[:, None], scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2)
