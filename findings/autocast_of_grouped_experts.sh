#!/usr/bin/env bash
# Guess, written down before: in a step of a float32 Mixture-of-Experts model under autocast to bfloat16, which is what
# `bf16=True` of Trainer does, the products of the experts are in bfloat16, forward and backward, whatever the
# `experts_implementation`.
# Seen in transformers 5.24.0 with torch 2.13.0, on a CPU: so it is under eager and batched_mm. Under grouped_mm, which
# these models have by themselves, autocast does not reach the experts: all their products are in float32, and on the same
# inputs their outputs are, bit for bit, those without autocast. All other layers are in bfloat16, the router of GLM-4.5
# too, which casts to float32 in its code. So mixed precision leaves the largest part of the model in full precision, and
# who compares implementations under it compares dtypes: outputs of experts are some thousandths apart. Nothing is warned of.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cat > "$tmp/products.py" <<'PYTHON'
import warnings

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=4, head_dim=16, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GROUPS = dict(n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=0, n_shared_experts=1)
KINDS = {
    "qwen3_moe": dict(num_experts=8, moe_intermediate_size=32),
    "glm4_moe": dict(**GROUPS, moe_intermediate_size=32),
    "mixtral": dict(num_local_experts=8),
    "olmoe": dict(num_experts=8),
    "gpt_oss": dict(num_local_experts=8),
}
IDS = torch.randint(3, 64, (4, 64), generator=torch.Generator().manual_seed(0))


class Products(TorchDispatchMode):
    """Dtypes of matrix products: those that are counted while `where` is a key."""

    def __init__(self):
        super().__init__()
        self.where, self.seen = "elsewhere", {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        # Rotary embeddings are a bmm, which models keep in float32 on purpose.
        if operator.overloadpacket.__name__ in ("mm", "addmm", "_grouped_mm") + ("bmm",) * (self.where != "elsewhere"):
            self.seen.setdefault(self.where, set()).add(str(out.dtype).removeprefix("torch."))
        return out


def step(kind, implementation):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **KINDS[kind]))
    if implementation is not None:
        model.set_experts_implementation(implementation)
    products, calls = Products(), []

    def before(*_):
        products.where = "experts"

    def after(module, args, out):
        products.where = "elsewhere"
        calls.append((module, args))

    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(before)
        layer.mlp.experts.register_forward_hook(after)
    with products, torch.autocast("cpu", torch.bfloat16):
        model(input_ids=IDS, labels=IDS, use_cache=False)
    # The experts of the first layer by themselves, on the inputs of that step.
    experts, args = calls[0]
    args = [each.detach() for each in args]
    alone = experts.forward(*args).detach()
    with torch.autocast("cpu", torch.bfloat16):
        out = experts.forward(*args)
    products.where = "experts, backward"
    with products:
        out.float().square().sum().backward()
    return model.config._experts_implementation, products.seen, float((out.float() - alone).norm() / alone.norm())


print("torch", torch.__version__, "transformers", transformers.__version__)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for kind in KINDS:
        for implementation in (None, "eager", "batched_mm"):
            name, seen, off = step(kind, implementation)
            print(f"{kind}, {name}: {seen}; outputs of experts {off:.1e} off those without autocast")
            expected, asked = ("float32", "grouped_mm") if implementation is None else ("bfloat16", implementation)
            assert name == asked and seen == {
                "elsewhere": {"bfloat16"}, "experts": {expected}, "experts, backward": {expected}
            }
            assert off == 0 if implementation is None else 1e-3 < off < 1e-2
assert not [each for each in told if "autocast" in str(each.message) or "float32" in str(each.message)]
print("autocast leaves grouped_mm experts in float32")
PYTHON
OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/products.py"
