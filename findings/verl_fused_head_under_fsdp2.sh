#!/usr/bin/env bash
# Guess, as verl's FSDP2 shards the output head by itself, and its fused forward of Qwen3-VL reads the weights of one that is
# sharded by `full_tensor()`: after the backward the head's gradient is the mean over ranks, as that of every other
# parameter is.
# Seen in verl 0.9.1 with `actor.strategy=fsdp2` and `model.use_fused_kernels=True` (kernels of torch), two ranks with a
# sequence each: 24 parameters have the gradients of one process, and the head's is 0.98 of its norm off. FSDP2 reduces the
# gradients of parameters that it gathered itself; those of `full_tensor()` it leaves on the rank whose tokens made them, so
# that each rank's part of the head learns from that rank's tokens alone. No error or warning is raised.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --quiet torch==2.13.0 numpy==2.3.5 transformers==5.10.4 tensordict==0.10.0 \
    omegaconf==2.3.1 hydra-core==1.3.4 ray==2.60.0 codetiming==1.4.0 packaging==25.0 pandas==3.1.1 datasets==5.2.0 \
    accelerate==1.14.0 peft==0.21.0
"$tmp/venv/bin/pip" install --quiet --quiet --no-deps verl==0.9.1
cat > "$tmp/measure.py" <<'PYTHON'
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.distributed.fsdp import FSDPModule
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

RANKS, TOKENS = 2, 12
TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
}


def model():
    torch.manual_seed(0)
    config = Qwen3VLMoeConfig(
        text_config=TEXT, vision_config=VISION, image_token_id=60, video_token_id=61, vision_start_token_id=62,
        vision_end_token_id=63, tie_word_embeddings=False,
    )
    return Qwen3VLMoeForConditionalGeneration(config).train()


def loss(output):
    return -output.log_probs.sum()


def step(rank, store, found):
    from verl.models.transformers import qwen3_vl
    from verl.utils.fsdp_utils import apply_fsdp2

    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    ids = torch.randint(2, 60, (RANKS, TOKENS), generator=torch.Generator().manual_seed(1))
    Qwen3VLMoeForConditionalGeneration.forward = qwen3_vl.forward_with_torch_backend
    whole = model()
    for row in range(RANKS):
        (loss(whole(ids[row : row + 1])) / RANKS).backward()
    wanted = {name: each.grad for name, each in whole.named_parameters() if each.grad is not None}
    sharded = model()
    apply_fsdp2(sharded, {"mesh": mesh, "reshard_after_forward": True}, {})
    print(rank, "head is sharded by itself:", isinstance(sharded.lm_head, FSDPModule))
    loss(sharded(ids[rank : rank + 1])).backward()
    apart = {}
    for name, each in sharded.named_parameters():
        if each.grad is not None:
            grad = each.grad.full_tensor()
            apart[name] = ((grad - wanted[name]).norm() / wanted[name].norm()).item()
    if rank == 0:
        torch.save(apart, found)
    dist.destroy_process_group()


if __name__ == "__main__":
    import verl

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(step, (f"{folder}/store", f"{folder}/found"), nprocs=RANKS)
        apart = torch.load(f"{folder}/found")
    head = apart.pop("lm_head.weight")
    print("verl", verl.__version__, "transformers", transformers.__version__, "torch", torch.__version__)
    others = max(apart.values())
    print(f"gradients off those of one process, relative: output head {head:.3f}, of {len(apart)} others at most {others:.0e}")
    seen = head > 0.5 and others < 1e-4
    print("behaviour: the output head's gradient is not reduced over ranks" if seen else "behaviour: changed")
    sys.exit(0 if seen else 1)
PYTHON
OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/measure.py"
