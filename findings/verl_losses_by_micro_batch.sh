#!/usr/bin/env bash
# Guess, as verl's engines hand every loss the tokens and sequences of the whole mini-batch (`global_batch_info`): how a
# mini-batch is split into micro-batches, whose gradients are added up, changes no gradient, whatever the `loss_mode`.
# Seen in verl 0.9.1: so it is for vanilla, gspo and sapo. The gradient of geo_mean is 2, 4 and 12 times as large where 12
# sequences are split into 2, 4 and 12 micro-batches, as the loss is the mean over the sequences of its micro-batch and
# those of all micro-batches add up. kl_cov picks its tokens in each micro-batch: its gradient points elsewhere.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --quiet torch==2.13.0 numpy==2.3.5 transformers==5.10.4 tensordict==0.10.0 \
    omegaconf==2.3.1 hydra-core==1.3.4 ray==2.60.0 codetiming==1.4.0 packaging==25.0 pandas==3.1.1 datasets==5.2.0
"$tmp/venv/bin/pip" install --quiet --quiet --no-deps verl==0.9.1
cat > "$tmp/measure.py" <<'PYTHON'
import sys

import torch
import verl
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

SEQUENCES, TOKENS = 12, 8
random = torch.Generator().manual_seed(0)
old, new, advantage = (torch.rand(SEQUENCES, TOKENS, generator=random, dtype=torch.float64) for _ in range(3))
mask = torch.ones(SEQUENCES, TOKENS, dtype=torch.bool)


def gradient(mode, micro_batches):
    """Of the log-probs of one mini-batch, added up over micro-batches of equally many sequences."""
    settings = PolicyLossConfig(loss_mode=mode, kl_cov_ratio=0.2)
    config = ActorConfig(strategy="fsdp", rollout_n=4, use_dynamic_bsz=True, policy_loss=settings)
    whole = {"dp_size": 1, "batch_num_tokens": SEQUENCES * TOKENS, "global_batch_size": SEQUENCES, "loss_scale_factor": None}
    config.global_batch_info.update(whole)
    log_probs = (-0.1 * new).requires_grad_()
    for rows in torch.arange(SEQUENCES).chunk(micro_batches):
        loss, _ = get_policy_loss_fn(mode)(
            old_log_prob=-0.1 * old[rows], log_prob=log_probs[rows], advantages=advantage[rows], response_mask=mask[rows],
            loss_agg_mode="token-mean", config=config,
        )
        loss.backward()
    return log_probs.grad.flatten()


print("verl", verl.__version__, "torch", torch.__version__)
seen = True
for mode in ("vanilla", "gspo", "sapo", "geo_mean", "kl_cov"):
    once = gradient(mode, 1)
    ratios, cosines = {}, {}
    for number in (2, 4, 12):
        split = gradient(mode, number)
        ratios[number] = (split.norm() / once.norm()).item()
        cosines[number] = torch.cosine_similarity(split, once, dim=0).item()
    told = ", ".join(f"x {ratios[n]:.3f} (cosine {cosines[n]:.3f}) over {n}" for n in ratios)
    print(f"{mode}: gradient {told} micro-batches")
    if mode == "geo_mean":
        seen &= all(abs(ratio / number - 1) < 1e-9 for number, ratio in ratios.items())
    elif mode == "kl_cov":
        seen &= cosines[4] < 0.999
    else:
        seen &= all(abs(ratio - 1) < 1e-9 for ratio in ratios.values())
print("behaviour: geo_mean grows with micro-batches, kl_cov turns" if seen else "behaviour: changed")
sys.exit(0 if seen else 1)
PYTHON
"$tmp/venv/bin/python" "$tmp/measure.py"
