"""veomni's hook for replay on its Qwen3-MoE, under verl's controller, driven as by verl's engine, on padded batches."""

import importlib.util
from contextlib import contextmanager

from veomni.models.transformers.qwen3_moe.generated import patched_modeling_qwen3_moe_gpu as patched

from foreroute.conformance import Unsupported
from foreroute.conformance.huggingface import KEEPING, HuggingFaceModel
from foreroute.errors import ReplayError
from tests.conformance.peers.ids_alone import OfTransformers

# alone: verl imports Ray
[FOLDER] = importlib.util.find_spec("verl").submodule_search_locations
FOUND = importlib.util.spec_from_file_location("verl_router_replay", f"{FOLDER}/utils/veomni/router_replay.py")
CONTROLLER = importlib.util.module_from_spec(FOUND)
FOUND.loader.exec_module(CONTROLLER)


class Peer(OfTransformers):
    name = "veomni under verl"
    fill = 0  # which its controller takes for rows without a route

    def model(self, case):
        if case.top_k == 1:
            raise Unsupported("verl's engine refuses top-1 with it")
        plain = super().model(case).model
        model = patched.Qwen3MoeForCausalLM(plain.config)
        model.load_state_dict(plain.state_dict())
        if case.checkpointing:
            model.gradient_checkpointing_enable(
                {"use_reentrant": False} | ({"context_fn": KEEPING} if case.selective else {})
            )
        return HuggingFaceModel(model.train(case.checkpointing))

    def enable(self, model):
        model.controller = CONTROLLER.VeOmniRouterReplay()
        model.controller.install(model.model)

    def arm(self, model, ids):
        model.controller.begin_replay()
        model.controller.begin_microbatch(targets=ids)

    def after_forward(self, model, grad):
        if model.records:
            model.recorded = model.controller.take_recorded()
        elif model.controller.num_fired != model.controller.num_targets:
            raise ReplayError("verl: as many routers must have fired as there are layers of routes")

    def close(self, model):
        model.controller.clear()

    @contextmanager
    def recording(self, model):
        model.controller.begin_record()
        model.controller.begin_microbatch()
        try:
            yield
        finally:
            model.controller.clear()

    def recorded(self, model):
        return model.recorded.unbind(1)
