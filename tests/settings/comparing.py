"""What every setting is held against: a twin of the model that foreroute never sees, its experts forced by hand."""

import os
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from foreroute.adapters import hf
from foreroute.testing.models import tiny
from tests.adapters.hf import model_runs
from tests.adapters.hf.family_checks import require_bit_equal
from tests.adapters.hf.model_runs import batch_of, force_by_hand, gradients, loss_of, random_routes
from tests.replay.session_subject import same
from tests.roundings import gradient_terms_of, terms_of

BATCH = batch_of(9, 9, 9, 9)
"""Without padding: rows of the routers are those of the trace."""
SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
"""In whole blocks of every format."""
TERMS, GRADIENT_TERMS = terms_of(64), gradient_terms_of(64)


def needs(library):
    """A mark: skipped without the library, but by `make night PART=settings`, which sets FOREROUTE_SETTINGS."""
    is_missing = find_spec(library) is None and "FOREROUTE_SETTINGS" not in os.environ
    return pytest.mark.skipif(is_missing, reason=f"no {library}; make night PART=settings has it")


def policy(family="qwen3_moe"):
    return tiny(family, **SIZES, **{"moe_intermediate_size": 32} if family == "qwen3_moe" else {})


def with_lora(model):
    """On the attention and on every expert."""
    return model_runs.with_lora(model, **model_runs.EXPERTS)


def require_replayed(make, make_twin=None):
    """Own routes change no bit of a model, and others give what a forced twin gives: its loss and gradients."""
    make_twin = make_twin or make
    model = make().train()
    routed = hf.attach(model)
    require_bit_equal(make_twin().train(), model, routed, loss_of_batch)
    first, second = (_require_alike(model, routed, make_twin, seed) for seed in (1, 2))
    assert abs(first - second) > 1e-3, "the control: routes matter"


def _require_alike(model, routed, make_twin, seed):
    """The loss under foreign routes, which is the twin's."""
    trace = random_routes(routed.spec, BATCH, seed=seed)
    twin = make_twin().train()
    force_by_hand(twin, trace.expert_ids_NLK)
    expected = loss_of_batch(twin)
    expected.backward()
    model.zero_grad()
    with routed.replay(trace):
        loss = loss_of_batch(model)
    loss.backward()
    assert torch.equal(loss, expected)
    seen = gradients(model)
    assert same(seen, gradients(twin))
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert {name for name, gradient in seen.items() if gradient.any()} == trained
    return float(loss.detach())


def loss_of_batch(model):
    return loss_of(model, BATCH).float()


def import_deepspeed(rank):
    """Import it in a worker as torchrun's processes do, over the group that the worker has."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    os.environ |= {name: str(value) for name, value in environment.items()} | {"DS_ACCELERATOR": "cpu"}
    import deepspeed

    # gloo takes its place; building it takes a compiler, and most of a minute. `deepspeed.comm.torch` is torch itself
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    return deepspeed


def config(stage):
    """A step as torch has it: every parameter is taken apart at stage 3, and no gradient is clipped."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
