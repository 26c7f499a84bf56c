"""DeepSpeed's ZeRO on two processes: each replays its own sequences, and weights are those of one plain process."""

from contextlib import closing

import numpy as np
import pytest
import torch
import torch.distributed as dist

from foreroute.adapters import hf
from foreroute.errors import AttachError
from foreroute.testing.ranks import Workers
from tests.adapters.hf.model_runs import enable_checkpointing, force_by_hand, loss_of, random_routes
from tests.roundings import require_rounded, roundings
from tests.settings.comparing import (
    BATCH,
    GRADIENT_TERMS,
    TERMS,
    config,
    import_deepspeed,
    loss_of_batch,
    needs,
    policy,
)

pytestmark = [needs("deepspeed"), pytest.mark.slow]

CASES = [
    (2, "before", None),
    (2, "after", False),
    (3, "before", False),
    (3, "after", True),
    (3, "persistent", None),
    (3, "partitioned", None),
]
"""The stage; whether it is attached before or after `initialize`, the latter also with small parameters that stay whole
from the first forward on, and of a model that was made partitioned; how it checkpoints."""
STEPS, RATE = 2, 0.1


def train(rank, stage, when, use_reentrant, folder):
    """Losses on own routes, without replay and with; those of each step on foreign routes; and the weights after it."""
    deepspeed = import_deepspeed(rank)
    refusal = kept = None
    if when == "partitioned":
        from transformers import AutoModelForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        kept = HfDeepSpeedConfig(config(stage))  # transformers asks for it as long as it lives
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, use_safetensors=True)
        assert not any(parameter.numel() for parameter in model.parameters())
        with pytest.raises(AttachError) as refused:
            hf.attach(model)
        refusal = str(refused.value)
    else:
        model = policy()
    enable_checkpointing(model.train(), use_reentrant)
    routed = hf.attach(model) if when == "before" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    settings = config(stage)
    if when == "persistent":
        del settings["zero_optimization"]["stage3_param_persistence_threshold"]
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    routed = routed or hf.attach(model)
    mine = {name: value[rank::2] for name, value in BATCH.items()}
    with torch.no_grad():
        with routed.record() as recording:
            native = loss_of(engine, mine)
        with routed.replay(recording.trace()):
            own = loss_of(engine, mine)
    foreign, weights = [], []
    for step in range(STEPS):
        trace = random_routes(routed.spec, BATCH, seed=step).select(np.arange(rank, 4, 2))
        with routed.replay(trace):
            loss = loss_of(engine, mine)
            if step == 0:  # the other one's backward and step are not in a session
                engine.backward(loss)
                engine.step()
        if step == 1:
            engine.backward(loss)
            engine.step()
        foreign.append(loss.detach())
        partitioned = sum(parameter.numel() == 0 for parameter in model.parameters())
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            weights.append({name: each.detach().clone() for name, each in model.named_parameters()})
    del kept
    found = {"own": (native, own), "foreign": foreign, "partitioned": partitioned, "weights": weights}
    return found | {"refusal": refusal}


def every_case(rank, folder):
    results = []
    for case in CASES:
        results.append(train(rank, *case, folder))
        dist.barrier()
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    policy().save_pretrained(folder)
    with closing(Workers(2, timeout_s=300)) as workers:
        return workers.run(every_case, str(folder))


@pytest.fixture(scope="module")
def spec():
    return hf.attach(policy()).spec


def plain_step(spec, step, before):
    """The loss of one plain process whose experts are forced by hand, and its weights after a step from these."""
    model = policy().train()
    model.load_state_dict(before)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    force_by_hand(model, random_routes(spec, BATCH, seed=step).expert_ids_NLK)
    loss = loss_of_batch(model)
    loss.backward()
    optimizer.step()
    return loss.detach(), {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.shows("Hugging Face", "DeepSpeed ZeRO-2 and ZeRO-3, two processes")
@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_losses_and_weights_are_those_of_a_single_process(ranks, spec, case):
    """Each step is from the weights that the ranks had before it, so that what the first was off by does not count."""
    one, other = (rank[case] for rank in ranks)
    before = {name: each.detach() for name, each in policy().named_parameters()}
    for rank in (one, other):
        assert torch.equal(*rank["own"])
        assert (rank["partitioned"] == len(before)) == (CASES[case][0] == 3 and CASES[case][1] != "persistent")
    for step in range(STEPS):
        loss, after = plain_step(spec, step, before)
        require_rounded((one["foreign"][step] + other["foreign"][step]) / 2, loss, TERMS)
        away = abs((one["own"][0] + other["own"][0]) / 2 - loss)
        assert away > 100 * roundings(TERMS) * loss, "the control: other routes would be seen"
        for rank in (one, other):
            for name, weight in after.items():
                moved = roundings(GRADIENT_TERMS) * (weight - before[name]).abs().max()
                held = torch.finfo(weight.dtype).eps * weight.abs().max()  # half a unit, of either one
                torch.testing.assert_close(rank["weights"][step][name], weight, rtol=0, atol=float(moved + held))
        before = one["weights"][step]


@pytest.mark.shows(
    "Hugging Face",
    "a model made in parts for ZeRO-3, before `deepspeed.initialize`",
    refused="until then no forward gathers its weights",
)
def test_a_partitioned_model_is_attached_after_initialize(ranks):
    assert all("call deepspeed.initialize first" in rank[-1]["refusal"] for rank in ranks)
