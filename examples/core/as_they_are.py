"""Replay what SkyRL and verl hold as it is: `rollout_expert_indices` and `routed_experts`, with `foreroute.core` alone.

Both fill rows that were never routed with zeros: padding, and the last token of a sequence. With two picks or more,
zeros in every pick are no route, since an expert is picked once.
"""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from foreroute.core import attach

torch.manual_seed(0)
sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 4, "num_experts": 8}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts_per_tok": 2}
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, **sizes, **heads))
routed = attach(model)


def without_zeros(routes):
    """-1 where a row holds zeros alone."""
    return torch.where((routes == 0).all(-1, keepdim=True), -1, routes)


tokens = torch.randint(1, 64, (2, 9))
mask = torch.ones_like(tokens)
mask[1, :3] = 0  # the second sequence is shorter, and padded on the left
with routed.record() as recording, torch.no_grad():
    model(input_ids=tokens, attention_mask=mask)
[recorded] = recording.ids()
recorded[:, -1] = 0
recorded[1, :3] = 0

training_input = {"sequences": tokens, "attention_mask": mask, "rollout_expert_indices": recorded.int()}  # SkyRL
batch = {"input_ids": tokens, "attention_mask": mask, "routed_experts": recorded.to(torch.uint8)}  # verl
losses = []
for ids, routes in (
    (training_input["sequences"], training_input["rollout_expert_indices"]),
    (batch["input_ids"], batch["routed_experts"].short()),
):
    with routed.replay(without_zeros(routes), mask):
        losses.append(model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss)
losses[0].backward()
report = routed.report()
print(f"losses {[round(loss.item(), 6) for loss in losses]}; {report[0].replayed} rows of each router were replayed")
