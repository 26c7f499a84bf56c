"""Models that are another when training begins: compiled by torch, or with kernels of Liger.

Liger needs a GPU: a stand-in binds methods to instances, as Liger-Kernel does at ead96b6.
"""

import sys
from types import MethodType, ModuleType

import pytest
import torch
from transformers.integrations import liger as of_transformers
from trl.trainer import utils

from examples.trl.tiny import policy
from foreroute.errors import AttachError
from tests.trainers.given_experts import follows, watched
from tests.trainers.trl.routes_book import Book
from tests.trainers.trl.trl_runs import logged, make, trained

pytestmark = pytest.mark.slow


def weights_of(trainer):
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.shows("TRL", "`torch_compile`")
@pytest.mark.usefixtures("no_graphs_left")
@pytest.mark.exhaustive  # tests/adapters/hf/test_compile.py has compiled models by day
def test_a_compiled_model_replays_to_the_same_weights(folder):
    """test_trl_passes.py holds the run that is not compiled against the routes of the book."""
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    runs = {}
    for name, own in {"R3": {}, "compiled": compiled, "none": {"replay": "none"}}.items():
        model = policy()
        runs[name] = trained(folder, model=model, rollout_func=Book(model), max_steps=1, **own)
    assert torch.equal(weights_of(runs["compiled"]), weights_of(runs["R3"]))
    assert not torch.equal(weights_of(runs["none"]), weights_of(runs["R3"]))  # the control
    for name in ("loss", "mismatch/disagreement", "mismatch/native_disagreement", "mismatch/k3"):
        assert logged(runs["compiled"], name) == logged(runs["R3"], name)


def one_by_one(experts, hidden, ids, weights):
    """The experts of Qwen3-MoE, each on all tokens."""
    experts.fused_calls = True
    result = torch.zeros_like(hidden)
    for number, (gate_up, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
        gate, up = (hidden @ gate_up.T).chunk(2, dim=-1)
        result = result + ((ids == number) * weights).sum(-1, keepdim=True) * ((experts.act_fn(gate) * up) @ down.T)
    return result


def sorting(gate, hidden):
    """A router in one kernel, in which nobody sees a selection."""
    scores = (hidden.reshape(-1, gate.hidden_dim) @ gate.weight.T).softmax(-1)
    weights, ids = (each[:, : gate.top_k] for each in scores.sort(descending=True))
    return scores, weights / weights.sum(-1, keepdim=True), ids


@pytest.fixture
def liger(monkeypatch):
    """Has the methods of modules, by the end of their class's name, that Liger replaces."""
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("Liger under this TRL is refused")
    methods = {"Experts": one_by_one}

    def apply(model, **kernels):
        assert kernels == {"fused_linear_cross_entropy": False}
        for module in model.modules():
            for name, method in methods.items():
                if type(module).__name__.endswith(name):
                    module.__dict__["forward"] = MethodType(method, module)

    package, part = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    part._apply_liger_kernel_to_instance = apply
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", part)
    monkeypatch.setattr(of_transformers, "is_liger_kernel_available", lambda: True)
    return methods


@pytest.mark.shows("TRL", "`use_liger_kernel` (a stand-in for its kernels)")
def test_experts_of_liger_are_given_the_routes_of_the_rollout(liger, folder):
    losses = []
    for fuses in (True, False):
        model = policy()
        book = Book(model)
        trainer = make(folder, model=model, rollout_func=book, max_steps=2, use_liger_kernel=fuses)
        with watched(model) as batches:
            trainer.train()
        assert all(follows(batch, book.routes) for batch in batches if batch.grad)
        assert any(hasattr(module, "fused_calls") for module in model.modules()) == fuses
        losses.append(logged(trainer, "loss"))
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.shows(
    "TRL", "Liger kernels that hold the router", refused="replay cannot reach a selection inside of a kernel"
)
def test_a_router_in_one_kernel_is_refused_at_construction(liger, folder):
    liger["Router"] = sorting
    with pytest.raises(AttachError, match="Router"):
        make(folder, use_liger_kernel=True)
