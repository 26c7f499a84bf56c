"""Stand-ins on a CPU for what verl's FSDP engine finds on GPUs alone: FSDP1's states there, and flash attention."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch.nn.functional as F
from torch.distributed.fsdp import _init_utils
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask
from transformers.models.qwen3_moe import modeling_qwen3_moe
from verl.models.transformers import monkey_patch

PACKED = "packed_on_cpu"
"""An attention that goes the way of flash attention, through verl's exchange between ranks of Ulysses."""
AttentionInterface.register(PACKED, flash_attention_forward)
AttentionMaskInterface.register(PACKED, flash_attention_mask)


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
