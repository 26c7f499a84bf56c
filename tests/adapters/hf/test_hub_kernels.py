"""`use_kernels=True`: other forwards on instances, anew at each change of mode, as the library kernels puts them there.

Stand-ins: real ones run on a GPU. `train()` and `eval()` put kernels for inference, some without a backward, there.
"""

from types import MethodType

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.errors import AttachError
from foreroute.testing.models import tiny
from tests.adapters.hf.model_runs import batch_of, experts_log, gradients, loss_of, random_routes
from tests.replay.session_subject import same

BATCH = batch_of(9, 6)


def norm_without_backward(norm, rows):
    return type(norm).forward(norm, rows.detach()).detach()


def routed_in_the_block(block, rows):
    """As Unsloth's FastQwen3MoeModel has it (read at 0050c73): the selection is seen, and is not the router's."""
    rows_NH = rows.reshape(-1, rows.shape[-1])
    weights, ids = (rows_NH @ block.gate.weight.T).softmax(-1).topk(2)
    return block.experts(rows_NH, ids, weights / weights.sum(-1, keepdim=True)).view_as(rows)


def with_kernels(family="qwen3_moe", **kernels):
    """A model in train mode; by the end of a class's name, what its instances run while it is not in train mode."""
    model = tiny(family)

    def put_kernels(use_kernels=True):
        for module in model.modules():
            for name, kernel in kernels.items():
                if type(module).__name__.endswith(name):
                    run = type(module).forward if model.training else kernel
                    module.forward = MethodType(run, module)

    model.set_use_kernels = model.kernelize = put_kernels
    model._use_kernels = True
    return model.eval().train()


@pytest.mark.shows("Hugging Face", "`use_kernels`, of norms (stand-ins)")
def test_attaching_leaves_the_kernels_of_training():
    seen = []
    for model in (tiny("qwen3_moe").train(), with_kernels(RMSNorm=norm_without_backward)):
        routed = hf.attach(model)
        with routed.replay(random_routes(routed.spec, BATCH)):
            loss_of(model, BATCH).backward()
        seen.append(gradients(model))
    assert same(*seen)


@pytest.mark.shows("Hugging Face", "Unsloth's fast blocks (a stand-in)")
def test_a_block_that_selects_in_the_place_of_its_router_takes_other_routes():
    model = with_kernels(SparseMoeBlock=routed_in_the_block).eval()
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    rows = torch.from_numpy(trace.expert_ids_NLK.astype(np.int64))
    with routed.replay(trace), experts_log(model) as log:
        loss_of(model, BATCH)
    real_R = BATCH["attention_mask"].bool().reshape(-1)
    assert len(log) == rows.shape[1]
    for layer, (_, ids_RK) in enumerate(log):
        assert torch.equal(ids_RK[real_R].sort(-1).values, rows[:, layer].sort(-1).values)


@pytest.mark.shows("Hugging Face", "`use_kernels`, of routers", refused="replay cannot reach into a kernel")
def test_kernels_that_route_are_refused():
    with pytest.raises(AttachError, match=r"GptOssTopKRouter.*fused"):
        hf.attach(with_kernels("gpt_oss", GptOssMLP=lambda block, rows: (rows, None)))
