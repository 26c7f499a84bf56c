"""Replay an engine's routes in a plain training loop: torch, a model, and `foreroute.core` alone.

The engine here is the same model in bfloat16. Its routes are replayed in the trainer, activations recomputed.
Three steps take seconds; each prints its loss, and the rows where the trainer would pick other experts (0 to 10).
"""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from foreroute.core import attach

torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
)
model = Qwen3MoeForCausalLM(config)
model.gradient_checkpointing_enable()
routed = attach(model)  # finds the routers, and proves replay on this very model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    engine = Qwen3MoeForCausalLM(config).bfloat16()
    engine.load_state_dict(model.state_dict())
    prompts = torch.randint(0, 64, (4, 6))
    with attach(engine).record() as rollout:
        tokens = engine.generate(prompts, max_new_tokens=10, do_sample=True, temperature=1.0, top_p=1.0, top_k=0)
    [routes] = rollout.ids()  # [B, T - 1, L, K]: the last token was sampled, and never an input
    routes = torch.cat([routes, torch.full_like(routes[:, :1], -1)], 1)
    model.train()
    with routed.replay(routes):
        logits = model(input_ids=tokens, use_cache=False).logits
        logprobs = logits[:, 5:-1].log_softmax(-1).gather(-1, tokens[:, 6:, None])[..., 0]
        loss = -(logprobs.mean(1) * (tokens[:, 6:] % 2).float().mean(1)).mean()  # reward: odd tokens
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    differing = sum(line.differing for line in routed.report())  # waits for the device; raises for wrong ids
    print(f"step {step}: loss {loss.item():.4f}, {differing} rows where the trainer would have picked other experts")
