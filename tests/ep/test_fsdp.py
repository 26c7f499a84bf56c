"""FSDP2 beside expert parallelism, in a loop of one's own: gradients of one process, or a refusal."""

from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from foreroute.adapters import hf
from foreroute.ep.model import ExpertParallelModel
from foreroute.errors import AttachError
from foreroute.testing.models import tiny
from foreroute.testing.ranks import Workers
from tests.adapters.hf.model_runs import batch_of, loss_of, random_routes
from tests.ep.transfer.plans import split_plan

BATCHES = [batch_of(9, 9, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def workers():
    with closing(Workers(2, timeout_s=300)) as workers:
        yield workers


def policy():
    return tiny("qwen3_moe", num_hidden_layers=2).double()


def sharded(model, placed, how):
    if how == "shard_dense":
        placed.shard_dense()
    elif how != "replicated":
        ignored = set() if how == "fully_shard of all" else set(placed.expert_parameters())
        for layer in model.model.layers:
            fully_shard(layer, ignored_params=ignored)
        fully_shard(model, ignored_params=ignored)


def gradients_on_rank(rank, how):
    model = policy()
    placed = hf.distribute(model)
    sharded(model, placed, how)
    (loss_of(model, BATCHES[rank]) / dist.get_world_size()).backward()
    placed.sum_gradients()
    return {name: placed.whole(each, each.grad) for name, each in model.named_parameters()}


@pytest.mark.shows("Hugging Face", "expert parallelism of `hf.distribute` with FSDP2, by `shard_dense()`")
@pytest.mark.parametrize("how", ["replicated", "shard_dense"])
def test_every_gradient_is_that_of_one_process(workers, how):
    model = policy()
    (sum(loss_of(model, each) for each in BATCHES) / 2).backward()
    for grads in workers.run(gradients_on_rank, how):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-10, atol=1e-14, msg=name)


def refusal_on_rank(rank, how, when):
    model = policy()
    routed, placed = hf.attach(model), hf.distribute(model)
    traces = [random_routes(routed.spec, BATCHES[rank])]
    counts_MLGE = routed.gather_counts(traces)
    sharded(model, placed, how)
    step = routed.execute(split_plan(5, counts_MLGE, placed.home_LE), counts_MLGE, traces)
    with pytest.raises(AttachError) as refused:
        step.__enter__() if when == "before a step" else placed.sum_gradients()
    return str(refused.value)


REFUSED = [
    ("fully_shard of all", "taken over the experts of model.layers.0"),
    ("fully_shard", "averages their gradients"),
]


@pytest.mark.shows(
    "Hugging Face",
    "expert parallelism of `hf.distribute` beside `fully_shard`",
    refused="it averages gradients, which those of experts are not",
)
@pytest.mark.parametrize("when", ["before a step", "after it"])
@pytest.mark.parametrize(("how", "said"), REFUSED)
def test_what_would_scale_gradients_unlike_is_refused(workers, how, said, when):
    assert all(said in message for message in workers.run(refusal_on_rank, how, when))


def unequal_on_rank(rank):
    """The control: without the refusal dense gradients are averages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertParallelModel, "_require_sums", lambda placed: None)
        return gradients_on_rank(rank, "fully_shard")


def test_without_the_refusal_dense_gradients_are_halves(workers):
    model = policy()
    (sum(loss_of(model, each) for each in BATCHES) / 2).backward()
    expected = dict(model.named_parameters())
    for grads in workers.run(unequal_on_rank):
        shares = {name: float((grads[name] / expected[name].grad).nanmedian()) for name in grads}
        assert shares["model.layers.0.self_attn.q_proj.weight"] == pytest.approx(0.5)
        assert shares["model.layers.0.mlp.experts.down_proj"] == pytest.approx(1.0)
