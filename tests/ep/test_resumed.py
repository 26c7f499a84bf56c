"""A run under plans whose homes move, saved by transformers' own means and resumed on other numbers of ranks."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed

from foreroute.adapters import hf
from tests.adapters.hf.model_runs import batch_of, log_probs, random_routes
from tests.ep.spread_steps import load_spread
from tests.ep.test_homes import LEAST, RATE, adamw, homes
from tests.ep.transfer.plans import split_plan
from tests.roundings import GRADIENT_TERMS, roundings

SEQUENCES = 4
"""Of a step, of equal lengths, so that losses are means of the same tokens on any number of ranks."""
WITHIN = roundings(GRADIENT_TERMS, torch.float64) * 3 * RATE / LEAST
"""Behind three updates of weights near 1: Adam divides what is left of a gradient, below 1, by no less than `LEAST`."""


def train(rank, folder, steps, *, moves=True, optimizer_from=None, save_to=None):
    """Losses of this rank's sequences, in steps with these numbers; saved behind them, experts at home again."""
    size = dist.get_world_size()
    model = load_spread(folder, dtype=torch.float64, fsdp_size=size, ep_size=2)
    if size == 2:  # FSDP2 divides gradients of float64 twice in a group of one rank: findings/fsdp2_divides_twice.sh
        for layer in model.model.layers:
            layer.mlp.experts.set_gradient_divide_factor(size**0.5)
    routed, optimizer, losses = hf.attach(model), adamw(model), []
    if optimizer_from is not None:
        load_optimizer_distributed(model, optimizer, str(optimizer_from))
    mine = np.arange(SEQUENCES).reshape(size, -1)[rank]
    for step in steps:
        if moves:
            routed.move_homes(homes(step, routed), optimizer)
        batch = batch_of(*[9] * SEQUENCES, seed=step)
        trace = random_routes(routed.spec, batch, seed=step).select(mine)
        batch = {name: tensor[mine] for name, tensor in batch.items()}
        counts_MLGE = routed.gather_counts([trace])
        with routed.execute(split_plan(step, counts_MLGE, routed.home_LE), counts_MLGE, [trace]), routed.replay(trace):
            loss = -log_probs(model, batch).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if moves:
        routed.move_homes(routed.block_home_LE, optimizer)
    if save_to is not None:
        model.save_pretrained(save_to, distributed_checkpoint=True)
        save_optimizer_distributed(model, optimizer, str(save_to / "optimizer"))
    return losses


@pytest.mark.slow
def test_losses_of_a_resumed_run_are_those_of_one_that_went_on(workers, folder_of, tmp_path):
    """And not where the optimizer begins anew, which the comparison sees."""
    saved = tmp_path / "saved"

    def losses(num_ranks, *given, **options):
        """By step, of all ranks together."""
        return torch.tensor(workers(num_ranks).run(partial(train, **options), *given), dtype=torch.float64).mean(dim=0)

    expected = losses(2, folder_of(), range(4), moves=False)
    found = losses(2, folder_of(), range(2), save_to=saved)
    torch.testing.assert_close(found, expected[:2], rtol=0, atol=WITHIN)
    resumed, anew = (losses(4, saved, range(2, 4), optimizer_from=each) for each in (saved / "optimizer", None))
    torch.testing.assert_close(resumed, expected[2:], rtol=0, atol=WITHIN)
    assert abs(anew[1] - expected[3]) > 1e6 * WITHIN
