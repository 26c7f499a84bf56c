#!/usr/bin/env bash
# Guess, written down before: `router_jitter_noise` disturbs in training what routers see, and nothing else, in float32 as
# in bfloat16. So does the code of the Switch Transformer, which the option is from: it disturbs a copy.
# Seen in transformers 5.24.0: Mixtral and MiniMax multiply the input of routers in place, so that the experts work on the
# noise too, in both dtypes; DBRX (`moe_jitter_eps`) does so as well. In Switch Transformers it depends on the dtype: the
# router makes a copy where it casts to float32. Experts of a float32 model get the noise, those of a bfloat16 model do
# not. In PhiMoE the option leaves all inputs alone. Issue 33969 of transformers is about Switch alone; nothing is said of
# the dtype or of the others. So experts compute something else in training than in sampling, also on the same routes.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cat > "$tmp/noise.py" <<'PYTHON'
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, SwitchTransformersConfig
from transformers import SwitchTransformersForConditionalGeneration as Switch

NOISE = 0.1
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=4, head_dim=8, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
ATTENTION = dict(kv_n_heads=4, clip_qkv=8, rope_theta=1e4)
DBRX = dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=64, vocab_size=64, attn_config=ATTENTION)
T5 = dict(d_model=32, d_kv=8, d_ff=16, num_layers=2, num_sparse_encoder_layers=2, num_decoder_layers=2, num_heads=4)
IDS = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def make(kind, noise):
    """A model and the names of its blocks of experts and of the norms before them."""
    torch.manual_seed(0)
    if kind == "switch_transformers":
        more = dict(num_sparse_decoder_layers=2, num_experts=4, dropout_rate=0.0, vocab_size=64, decoder_start_token_id=0)
        model = Switch(SwitchTransformersConfig(**T5, **more, router_jitter_noise=noise))
    elif kind == "dbrx":
        experts = dict(hidden_size=32, ffn_hidden_size=16, moe_num_experts=4, moe_top_k=2, moe_jitter_eps=noise or None)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **DBRX, ffn_config=experts))
    else:
        more = dict(num_local_experts=4, router_jitter_noise=noise)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **more))
    return model.train()


def disturbed(kind, dtype, noise):
    """How far the inputs of the experts are from what the norm before them returned, relatively, at most."""
    model, normed, far = make(kind, noise).to(dtype), [], []
    names = {"dbrx": "norm_2", "switch_transformers": "layer_norm"}

    def after_norm(module, args, out):
        normed.append(out.detach().clone())

    def before_experts(module, args):
        shape = normed[-1].shape
        far.append(((args[0].reshape(shape) - normed[-1]).norm() / normed[-1].norm()).item())

    for name, module in model.named_modules():
        if name.endswith(names.get(kind, "post_attention_layernorm")):
            module.register_forward_hook(after_norm)
        if name.endswith(".experts"):
            module.register_forward_pre_hook(before_experts)
    with torch.no_grad():
        model(input_ids=IDS, **(dict(labels=IDS) if kind == "switch_transformers" else dict(use_cache=False)))
    assert far
    return max(far)


print(f"transformers {transformers.__version__}, torch {torch.__version__}, a noise of {NOISE}")
for kind in ("mixtral", "minimax", "dbrx", "switch_transformers", "phimoe"):
    for dtype in (torch.float32, torch.bfloat16):
        without, seen = disturbed(kind, dtype, 0.0), disturbed(kind, dtype, NOISE)
        print(f"{kind}, {dtype}: inputs of experts are {seen:.4f} off, without noise {without:.4f}")
        spared = kind == "phimoe" or (kind == "switch_transformers" and dtype == torch.bfloat16)
        assert without == 0
        assert seen == 0 if spared else NOISE / 2 < seen < NOISE
print("the noise of routers is in the inputs of experts, in Switch Transformers by the dtype")
PYTHON
OMP_NUM_THREADS=1 "$tmp/venv/bin/python" "$tmp/noise.py" 2> "$tmp/errors" || { tail -n 5 "$tmp/errors" >&2; exit 1; }
