"""nemo-automodel's `RouterReplay` on its Qwen3-MoE: one handle in each gate, all of them in one list of the process."""

import copy
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from nemo_automodel.components.models.common.utils import BackendConfig
from nemo_automodel.components.models.qwen3_moe import model as qwen3_moe
from nemo_automodel.components.moe.experts import GroupedExperts
from nemo_automodel.components.moe.layers import Gate
from nemo_automodel.components.moe.parallelizer import apply_ac
from nemo_automodel.components.moe.router_replay import RouterReplay
from transformers import Qwen3MoeConfig

from foreroute import RoutedLayer, RoutingSpec
from foreroute.conformance import Fault, Seen, Unsupported
from foreroute.conformance.torch_model import TorchModel, TorchStep, padded, raise_once
from tests.conformance.peers.ids_alone import IdsAlone

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16}
HEADS = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "router_aux_loss_coef": 0.0}
PLAIN = {"attn": "sdpa", "linear": "torch", "rms_norm": "torch", "experts": "torch", "dispatcher": "torch"}


class Peer(IdsAlone):
    name = "nemo-automodel"
    gradient_tolerance = 1e-4  # a compiled layer rounds otherwise

    def model(self, case):
        given = {"num_experts": case.num_experts, "num_experts_per_tok": case.top_k}
        config = Qwen3MoeConfig(
            **SIZES, **HEADS, **EXPERTS | {name: n for name, n in given.items() if n}, dtype="float32"
        )
        torch.cuda.current_device = lambda: 0  # the model asks for the device by this name
        rotary, qwen3_moe.RotaryEmbedding = qwen3_moe.RotaryEmbedding, on_cpu(qwen3_moe.RotaryEmbedding)
        model = qwen3_moe.Qwen3MoeForCausalLM(config, backend=BackendConfig(**PLAIN, rope_fusion=False))
        qwen3_moe.RotaryEmbedding = rotary
        generator = torch.Generator().manual_seed(0)
        for name, weight in model.named_parameters():
            weight.data = weight.data.float()
            scale = 0.6 if weight.ndim == 3 else 0.3
            weight.data.copy_(
                torch.ones_like(weight) if "norm" in name else torch.randn(weight.shape, generator=generator) * scale
            )
        if case.checkpointing:
            apply_ac(
                model, hidden_size=32, num_experts=config.num_experts, ignore_router=case.selective, selective=False
            )
        if case.compiled:
            for layer in model.model.layers.values():
                layer.compile(backend="eager")
        return AutomodelModel(model.train(case.checkpointing))

    def enable(self, model):
        RouterReplay.clear_registry()  # "before building a second model in the same process"
        for gate in model.gates:
            gate.router_replay = RouterReplay()

    def spec(self, model):
        gate, layers = model.gates[0], len(model.router_weights)
        return RoutingSpec(gate.n_experts, gate.topk, tuple(RoutedLayer(i) for i in range(layers)))

    def arm(self, model, ids):
        self.close(model)
        model.session = RouterReplay.replay(ids)
        model.session.__enter__()

    def close(self, model):
        session, model.session = getattr(model, "session", None), None
        if session is not None:
            session.__exit__(None, None, None)

    @contextmanager
    def recording(self, model):
        with RouterReplay.record():
            yield

    def recorded(self, model):
        return RouterReplay.collect()


class AutomodelModel(TorchModel):
    """With a probe at what experts are given."""

    @property
    def gates(self):
        return [module for module in self.model.modules() if isinstance(module, Gate)]

    @property
    def router_weights(self):
        names = [name for name, _ in self.model.named_parameters() if name.startswith("model.layers.")]
        return [name for name in names if name.endswith("gate.weight")]

    def gradients(self):
        return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in super().gradients().items()}

    def forward(self, batch, *, grad=True):
        input_ids, real_BT = padded(batch)
        given = []
        note = lambda _, args: given.append([args[3].detach().clone(), args[2].detach().float().clone()])  # noqa: E731
        ahead = torch.ones(batch.width, batch.width, dtype=torch.bool).triu(1)
        unseen = (ahead | ~real_BT[:, None, :]) & ~torch.eye(batch.width, dtype=torch.bool)
        positions = (real_BT.long().cumsum(1) - 1).clamp(min=0)
        with ExitStack() as stack:
            for module in self.model.modules():
                if isinstance(module, GroupedExperts):
                    stack.enter_context(module.register_forward_pre_hook(note))
            stack.enter_context(torch.set_grad_enabled(grad))
            output = self.model(
                input_ids, position_ids=positions, attention_mask=~unseen[:, None], padding_mask=~real_BT
            )
            logits = getattr(output, "logits", output)
            wanted = real_BT[:, 1:] & real_BT[:, :-1]
            logprobs_R = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0][wanted]
            loss = -logprobs_R.mean()
        ids, gates = (torch.stack(parts, 1).numpy() for parts in zip(*given, strict=True))
        kept = real_BT.flatten().numpy()
        padding = None if kept.all() else ids[~kept]
        return TorchStep(Seen(ids[kept], logprobs_R.detach().numpy(), float(loss.detach()), gates[kept], padding), loss)

    def inject(self, fault):
        trunk = self.model.model
        *_, last = trunk.layers.values()
        if fault is Fault.FORWARD_RAISES:
            raise_once(last.mlp)
        elif fault is Fault.FUSED_ROUTER:
            last.mlp.gate.forward = partial(without_handle, last.mlp.gate)
        elif fault is Fault.ORPHAN_ROUTERS:
            live = trunk._modules.pop("layers")
            trunk.add_module("vision_layers", copy.deepcopy(live))
            trunk.add_module("layers", live)
        else:
            raise Unsupported("its models have no such head")


def without_handle(gate, *args):
    """The gate's own forward, past its handle for replay."""
    handle, gate.router_replay = gate.router_replay, None
    try:
        return Gate.forward(gate, *args)
    finally:
        gate.router_replay = handle


def on_cpu(rotary):
    return lambda **given: rotary(**given | {"device": torch.device("cpu")})
