"""From traces to a plan file by `foreroute plan`, and from the file to a step on four processes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import foreroute as fr
from foreroute.adapters import hf
from foreroute.plan import load_plan
from foreroute.testing.ranks import Raised
from tests.cli.command import foreroute
from tests.ep.spread_models import load_spread
from tests.ep.transfer.plans import loads_MLG
from tests.roundings import TERMS, roundings

RANKS, SEQUENCES = 4, 9
TOML = """
[topology]
num_ranks = 4
ranks_per_node = 4
redundant_slots = 2
[hardware]
preset = "h100"
[model]
preset = "qwen3-30b-a3b"
num_experts = 8
top_k = {top_k}
"""


def loss_of(model, tokens, mask=None):
    logits = model(input_ids=tokens, attention_mask=mask).logits.double()
    terms = -logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
    return terms.sum() if mask is None else (terms * mask[:, 1:, None]).sum()


@pytest.fixture(scope="module")
def step(tmp_path_factory, folder_of):
    """A folder with the trace of nine sequences, its plan for four ranks; the loss of one process."""
    folder = tmp_path_factory.mktemp("step")
    model = AutoModelForCausalLM.from_pretrained(folder_of(), trust_remote_code=False, use_safetensors=True)
    routed = hf.attach(model)
    tokens = torch.randint(1, 30, (SEQUENCES, 12), generator=torch.Generator().manual_seed(0))
    with routed.record(weight_version=0) as recording, torch.no_grad():
        loss = loss_of(model, tokens)
    trace = recording.trace()
    fr.save(trace, folder / "step.safetensors")
    (folder / "cluster.toml").write_text(TOML.format(top_k=trace.spec.top_k))
    arguments = ("--token-budget", "12", "--no-baselines", "--set", "pay_off=false", "--output", "4.plan")
    made = foreroute("plan", "step.safetensors", "--topology", "cluster.toml", *arguments, cwd=folder)
    assert made.returncode == 0, made.stderr
    return folder, float(loss)


def executed(rank, model_folder, folder, damage=None):
    """The plan in force on the whole step's trace: this rank's loss, and the rows that it computed [M, L]."""
    model = load_spread(model_folder, fsdp_size=RANKS, ep_size=RANKS)
    routed = hf.attach(model)
    trace = fr.load(folder / "step.safetensors")
    tokens = torch.from_numpy(trace.token_ids_N.astype(np.int64)).reshape(SEQUENCES, 12)
    plan = routed.share_plan(lambda: load_plan(folder / "4.plan"))
    batches = []
    for micro_step in range(plan.shape[0]):
        mine = plan.packing.sequences(micro_step, rank)
        # a rank without sequences runs a row of padding
        part, batch = trace.select(mine), tokens[mine] if len(mine) else torch.zeros((1, 12), dtype=torch.int64)
        batches.append((part, batch, torch.ones_like(batch) if len(mine) else torch.zeros_like(batch)))
    planned, loss = trace if damage is None else damage(trace, rank), 0.0
    with routed.execute(plan, planned, [part for part, _, _ in batches]) as execution:
        for part, batch, mask in batches:
            with routed.replay(part, weight_version=trace.versions):
                micro_loss = loss_of(model, batch, mask)
            micro_loss.backward()
            loss += float(micro_loss.detach())
    return loss, execution.executed_ML


@pytest.mark.slow
def test_a_plan_file_is_executed_as_it_says(step, workers, folder_of):
    folder, loss = step
    plan = load_plan(folder / "4.plan")
    sizes = [len(plan.packing.sequences(m, rank)) for m in range(plan.shape[0]) for rank in range(4)]
    assert 0 in sizes
    outcomes = workers(RANKS).run(executed, folder_of(), folder)
    assert sum(part for part, _ in outcomes) == pytest.approx(loss, rel=roundings(TERMS))
    counts_MLGE = plan.counts_of(fr.load(folder / "step.safetensors"))
    executed_MLG = np.stack([rows_ML for _, rows_ML in outcomes], axis=-1)
    np.testing.assert_array_equal(executed_MLG, loads_MLG(plan, counts_MLGE))
    assert plan.num_replicas_ML.sum()


def _other_tokens(trace, rank):
    tokens_N = trace.token_ids_N.copy()
    tokens_N[5] += rank == 2  # on one rank alone
    return replace(trace, token_ids_N=tokens_N)


@pytest.mark.slow
def test_a_file_for_other_tokens_is_refused_by_all_ranks_with_one_message(step, workers, folder_of):
    outcomes = workers(RANKS).outcomes(executed, folder_of(), step[0], _other_tokens)
    assert all(isinstance(outcome, Raised) for outcome in outcomes)
    [message] = {outcome.message for outcome in outcomes}
    assert "rank 2: the plan was made for tokens with digest" in message
