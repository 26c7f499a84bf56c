"""Every family against transformers' own "all_to_all": logits and gradients are equal bit for bit until replicas serve.

Batches have a route for every row: others are not sent, and kernels may round in other tiles what is left.
"""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from foreroute.adapters import hf
from foreroute.errors import PlanError
from tests.adapters.hf.families import FAMILIES, build
from tests.ep.executor_properties import distance, require_said, said_by
from tests.ep.spread_steps import load_spread, run
from tests.ep.transfer.plans import loads_MLG, split_plan, static_plan
from tests.replay.session_subject import same
from tests.roundings import GRADIENT_TERMS, roundings

NOT_SPREAD = {"dbrx", "jetmoe", "llama4", "longcat_flash"}
"""Transformers has no plan of them."""
SHARED = {"tp_size": 2, "ep_size": 2}
"""One batch for both ranks: transformers' plan for these cuts dense layers too, where FSDP2 cannot cut them again."""
SIZES = {
    "gemma4": SHARED | {"tp_plan": {"lm_head": "colwise_gather_output"}},
    "diffusion_gemma": SHARED | {"tp_plan": {"norm": "replicated_with_grad_allreduce"}},
}
REFUSED = {
    "step3p7": "PlanError: agreeing on the plan of step 3: rank 0: the plan has replicas, and layers.1.mlp.experts is "
    "a FSDPStep3p7Experts, whose",
    "zaya": "AttachError: routers of this FSDPZayaForCausalLM choose among 9, and layers have 8 experts",
}
"""What cannot be replicas, and what plans do not know at all."""
SLOW = {"deepseek_v3", "gpt_oss", "openai_privacy_filter", "nemotron_h", "muse_spark", "inkling", "ernie4_5_vl_moe"}
"""Of other layouts each, as are those that are refused: in slow tests, all others by night."""
SOONER = {**dict.fromkeys(SLOW | REFUSED.keys(), pytest.mark.slow), "qwen3_moe": ()}


def on_rank(rank, model_class, folder, sizes, refused):
    tokens = torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(0 if sizes else rank))
    theirs, ours = (load_spread(folder, name, model_class=model_class, **sizes) for name in ("all_to_all", "foreroute"))
    routed, expected = hf.attach(ours), step(theirs, tokens)
    require_alike(step(ours, tokens), expected)
    with routed.record() as recording, torch.no_grad():
        ours(input_ids=tokens, use_cache=False)
    traces = [recording.trace()]

    def under(plan):
        with routed.execute(plan, counts_MLGE, traces) as execution:
            return step(ours, tokens, routed.replay(traces[0])), execution.executed_ML

    if refused.startswith("AttachError"):
        require_said(said_by(routed.gather_counts, traces), refused)
        return
    counts_MLGE = routed.gather_counts(traces)
    for plan in (None, static_plan(counts_MLGE)):
        require_alike(under(plan)[0], expected)
    split = split_plan(1, counts_MLGE, routed.home_LE)
    assert split.num_replicas_ML.any()
    if refused:
        require_said(said_by(under, split), refused)
        return
    found, executed_ML = under(split)
    assert (executed_ML == loads_MLG(split, counts_MLGE)[..., rank]).all()
    off = distance({"": found[0]}, {"": expected[0]}), distance(found[1], expected[1])
    assert max(off) < roundings(GRADIENT_TERMS), off


def step(model, tokens, *contexts):
    """Outputs, and gradients of a number in which all of them count; no family has a loss of all others."""

    def weigh(out):
        return (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).mean()

    return run(model, {"input_ids": tokens}, *contexts, weigh=weigh)


def require_alike(one, other):
    assert torch.equal(one[0], other[0])
    assert same(one[1], other[1])


@pytest.mark.shows(
    "Hugging Face",
    '`ep_implementation="foreroute"`, without a plan and under plans: every family that transformers spreads',
)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=SOONER.get(name, pytest.mark.exhaustive))
        for name in sorted(FAMILIES.keys() - NOT_SPREAD)
    ],
)
def test_bits_are_those_of_all_to_all_and_replicas_differ_by_roundings(workers, tmp_path, family):
    model = build(family, experts="eager" if family == "step3p7" else "grouped_mm")
    # transformers splits what is fused in files when it is whole, and not when it is sharded
    model.save_pretrained(tmp_path, save_original_format=False)
    workers(2).run(on_rank, type(model), tmp_path, SIZES.get(family, {}), REFUSED.get(family, ""))


def refused_replicas(rank, folder):
    """Experts with a parameter that no replica computes with, and with one that is not trained."""
    model = load_spread(folder)
    routed, tokens = hf.attach(model), torch.ones(1, 5, dtype=torch.long)
    with routed.record() as recording, torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    traces, path = [recording.trace()], "model.layers.1.mlp.experts"
    counts_MLGE, parameters = routed.gather_counts(traces), routed.spread.layers[1].experts._parameters
    plan = split_plan(1, counts_MLGE, routed.home_LE)
    for name, each, said in (
        ("scale", torch.ones(4), rf"{path}.scale .*no _bias"),
        ("down_proj", torch.ones(4, 32, 24, dtype=torch.int8), rf"{path}.down_proj .*torch\.int8; expected"),
    ):
        with patch.dict(parameters, {name: nn.Parameter(each, requires_grad=False)}):
            if name == "scale":
                step(model, tokens, routed.execute(None, counts_MLGE, traces), routed.replay(traces[0]))
            with pytest.raises(PlanError, match=said), routed.execute(plan, counts_MLGE, traces):
                raise AssertionError("it has begun")


@pytest.mark.slow
def test_experts_that_are_no_replicas_are_refused_by_name_and_run_at_home(workers, folder_of):
    workers(2).run(refused_replicas, folder_of())
