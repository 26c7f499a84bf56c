"""verl's Megatron engine on a model with multi-token prediction: a Qwen3-MoE with one such layer.

mbridge reads such layers for other families alone.
"""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")
pytest.importorskip("mbridge", reason="there is no mbridge in this environment: run `make night PART=verl`")

# isort: off
from tests.trainers.verl.megatron_engines import CONTEXT, LAYERS, PIPELINE, SEQUENCES, TENSOR  # no GPU
from tests.trainers.verl.megatron_engines import each, make, share_of, sum_log_prob

# isort: on
from mbridge.core import register_model
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from safetensors.torch import load_file, save_file
from verl.workers.config import MtpConfig

from examples.verl.tiny_checkpoint import save_policy
from foreroute.testing import megatron_on_cpu
from tests.trainers.verl.verl_book import Book
from tests.trainers.verl.verl_engines import old_log_probs, tensordict
from tests.trainers.verl.verl_ranks import run_each

CONTROL = "data, not replayed"
OWN = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
"""Of a layer, by the names of Megatron and of DeepSeek's checkpoints."""
SPLITS = {"data": {}, "tensor": TENSOR, "context": CONTEXT, "pipeline": PIPELINE}
PREDICTING = SPLITS | {f"{name}, planned": split | {"plans": True} for name, split in SPLITS.items()}
PREDICTING |= {CONTROL: {"replay": "disabled"}}


@pytest.fixture(scope="module")
def predicting(tmp_path_factory):
    policy = save_predicting_policy(tmp_path_factory.mktemp("policy"))
    return run_each(4, "test_verl_predictions.predict", policy, PREDICTING)


@pytest.mark.shows("verl, Megatron engine", "multi-token prediction (`model.mtp.enable`): its routers stay native")
@pytest.mark.parametrize("name", PREDICTING)
def test_the_decoder_is_replayed_and_layers_of_prediction_route_by_themselves(name, predicting):
    shares = [rank["native"] for rank in predicting[name]]
    assert {share["prediction"] for share in shares if "prediction" in share} == {1.0}
    replayed = name != CONTROL
    assert all((share["decoder"] < 0.95) == replayed for share in shares)
    logged = [rank["metrics"] for rank in predicting[name] if rank["metrics"]]
    assert any(metrics["mtp_losses/mtp_1_loss"][0] > 0 for metrics in logged if "mtp_losses/mtp_1_loss" in metrics)
    for metrics in logged if replayed else ():
        assert metrics["mismatch/disagreement"] == [0.0]
        assert metrics["mismatch/native_disagreement"][0] > 0.05
    for metrics in logged if "planned" in name else ():
        assert metrics["plan/rows_off"] == [0.0]
        assert metrics["plan/imbalance_executed"][0] < metrics["plan/imbalance_static"][0]


def predict(policy, runs):
    """Of a pass and an update of each run, the share of rows that either stack's routers routed as they would."""
    whole = Book(policy, count=SEQUENCES).batch()

    def predicted(**settings):
        engine = make(policy, model={"mtp": MtpConfig(enable=True, enable_train=True)}, dtype="float32", **settings)
        td = tensordict(share_of(whole)[0], max_token_len_per_gpu=32)
        native, handles = {}, []
        for name, module in ((name, m) for chunk in engine.module for name, m in chunk.named_modules()):
            if name.endswith(".router"):
                router = "prediction" if ".mtp." in f".{name}" else "decoder"
                handles.append(module.register_forward_hook(partial(note_native, native.setdefault(router, []))))
        old_log_probs(engine, td)
        with engine.train_mode():
            output = engine.train_batch(td, loss_function=sum_log_prob)
        for handle in handles:
            handle.remove()
        shares = {router: torch.cat(shares).mean().item() for router, shares in native.items()}
        return {"native": shares, "metrics": output.get("metrics")}

    return each(runs, predicted)


def note_native(shares, router, args, out):
    logits_RE = args[0].reshape(-1, args[0].shape[-1]).float() @ router.weight.float().T
    own_RE = torch.zeros_like(out[1]).scatter(1, logits_RE.topk(router.topk, dim=-1).indices, True)
    shares.append((own_RE == out[1]).all(-1).float())


@register_model("qwen3_moe")
class PredictingBridge(Qwen3MoEBridge):
    """mbridge's own for Qwen3-MoE, with its way of DeepSeek-V3 for the layer of prediction."""

    def _build_base_config(self, **settings):
        return super()._build_base_config(**settings, mtp_num_layers=self.hf_config.num_nextn_predict_layers or None)

    def _get_gptmodel_args(self):
        found = super()._get_gptmodel_args()
        if self.config.mtp_num_layers:
            block = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False)
            megatron_on_cpu.use_norm(block, megatron_on_cpu.RMSNorm, of_heads=True)
            spec = found["mtp_block_spec"] = get_gpt_mtp_block_spec(self.config, block, use_transformer_engine=False)
            for layer in spec.layer_specs if spec else ():  # there is one on the last stage alone
                for norm in ("enorm", "hnorm", "layer_norm"):
                    setattr(layer.submodules, norm, megatron_on_cpu.RMSNorm)
        return found

    def _weight_name_mapping_mcore_to_hf(self, name):
        if not name.startswith("mtp."):
            return super()._weight_name_mapping_mcore_to_hf(name)
        number = self.config.num_layers
        if found := re.fullmatch(r"mtp\.layers\.0\.(\w+)\.weight", name):
            return [f"model.layers.{number}.{OWN[found[1]]}.weight"]
        name = name.replace("mtp.layers.0.transformer_layer", f"decoder.layers.{number}")
        return super()._weight_name_mapping_mcore_to_hf(
            name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        )


def save_predicting_policy(folder):
    """Write the checkpoint of `save_policy` with a layer more, whose weights are those of the last one."""
    save_policy(folder, mlp_only_layers=[], num_hidden_layers=LAYERS, num_nextn_predict_layers=1)
    path = Path(folder) / "model.safetensors"
    weights, last, mine = load_file(path), f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    weights |= {name.replace(last, mine): value.clone() for name, value in weights.items() if name.startswith(last)}
    size = weights["model.norm.weight"].numel()
    drawn = torch.Generator().manual_seed(1)
    weights |= {f"{mine}{OWN[norm]}.weight": torch.ones(size) for norm in ("enorm", "hnorm", "final_layernorm")}
    weights[f"{mine}eh_proj.weight"] = torch.randn(size, 2 * size, generator=drawn) * size**-0.5
    save_file(weights, path, {"format": "pt"})
    return str(folder)
