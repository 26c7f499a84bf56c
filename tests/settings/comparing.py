"""What every setting is held against: a twin of the model that foreroute never sees, its experts forced by hand."""

import os
from functools import partial
from importlib.util import find_spec

import peft
import pytest
import torch
from torch.nn.functional import linear

from foreroute.adapters import hf
from foreroute.testing.models import tiny
from tests.adapters.hf.family_checks import require_bit_equal
from tests.adapters.hf.model_runs import batch_of, gradients, loss_of, qwen3_gate, random_routes
from tests.roundings import gradient_terms_of, terms_of

BATCH = batch_of(9, 9, 9, 9)
"""Without padding: rows of the routers are those of the trace."""
SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
"""In whole blocks of every format."""
TERMS, GRADIENT_TERMS = terms_of(64), gradient_terms_of(64)


def needs(library):
    """A mark: the environment of `make settings-env` has the library, and that of `make test` does not.

    `make night PART=settings` sets FOREROUTE_SETTINGS: a test fails there for a library that is missing.
    """
    is_missing = find_spec(library) is None and "FOREROUTE_SETTINGS" not in os.environ
    return pytest.mark.skipif(is_missing, reason=f"no {library}; make night PART=settings has it")


def policy(family="qwen3_moe"):
    return tiny(family, **SIZES, **{"moe_intermediate_size": 32} if family == "qwen3_moe" else {})


def with_lora(model):
    """With adapters on the attention and on every expert, which change something from the first."""
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], target_parameters=experts, init_lora_weights=False
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return peft.get_peft_model(model, config)


def _qwen3(router, ids_NK, hidden):
    logits, weights = qwen3_gate(router, ids_NK, hidden)
    return logits, weights.to(logits.dtype), ids_NK


def _gpt_oss(router, ids_NK, hidden):
    logits = linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, router.bias)
    return logits, logits.gather(-1, ids_NK).softmax(-1), ids_NK


GATES = {"Qwen3MoeTopKRouter": _qwen3, "GptOssTopKRouter": _gpt_oss}
"""By class of the router: what it hands on at given experts, by its definition."""


def forced(model, ids_NLK):
    """The model, with routers that pick these experts whatever they see."""
    routers = [module for module in model.modules() if type(module).__name__ in GATES]
    for layer, router in enumerate(routers):
        ids_NK = torch.from_numpy(ids_NLK[:, layer].astype("int64"))
        router.forward = partial(GATES[type(router).__name__], router, ids_NK)
    return model


def require_replayed(make, make_twin=None):
    """Own routes change no bit of a model, and others give what a forced twin gives: its loss and gradients.

    Args:
        make: gives the same model each time, ready to be trained.
        make_twin: gives the twin, where it is made in another way.
    """
    make_twin = make_twin or make
    model = make().train()
    routed = hf.attach(model)
    require_bit_equal(make_twin().train(), model, routed, loss_of_batch)
    first, second = (_require_alike(model, routed, make_twin, seed) for seed in (1, 2))
    assert abs(first - second) > 1e-3, "the control: routes matter"


def _require_alike(model, routed, make_twin, seed):
    """The loss under foreign routes, which is the twin's."""
    trace = random_routes(routed.spec, BATCH, seed=seed)
    twin = forced(make_twin().train(), trace.expert_ids_NLK)
    expected = loss_of_batch(twin)
    expected.backward()
    model.zero_grad()
    with routed.replay(trace):
        loss = loss_of_batch(model)
    loss.backward()
    assert torch.equal(loss, expected)
    require_same_gradients(model, twin)
    return float(loss.detach())


def require_same_gradients(model, twin):
    """Bit by bit, and of every parameter that is trained."""
    seen, expected = gradients(model), gradients(twin)
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert {name for name, gradient in seen.items() if gradient.any()} == trained
    assert seen.keys() == expected.keys()
    assert not [name for name, gradient in expected.items() if not torch.equal(seen[name], gradient)]


def loss_of_batch(model):
    return loss_of(model, BATCH).float()
