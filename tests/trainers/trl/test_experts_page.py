"""docs/experts.md runs on two processes, and its Trainer trains the same weights under plans as without."""

import io
import re
from contextlib import chdir, closing, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from foreroute.ep.compute import StackedReplicas
from foreroute.testing.models import tiny
from tests.adapters.hf.model_runs import whole
from tests.tiers import grid
from tests.trainers.trl.trl_runs import as_torchrun_does, two_processes

ROOT = Path(__file__).parents[3]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
READERS = """
from datasets import Dataset
from examples.trl.tiny import tokenizer, vowels as reward
dataset, tokenizer = Dataset.from_dict({"prompt": [f"many vowels {n}: " for n in range(8)]}), tokenizer()
"""
"""What a reader has before the first line."""


def run_page(rank, folder, blocks, compares):
    """What a process of torchrun prints, in the group that is there; and whether plans changed its weights."""
    as_torchrun_does(rank)
    page = {"__name__": "__main__"}
    with redirect_stdout(io.StringIO()) as printed, chdir(folder), patch.object(dist, "init_process_group") as begun:
        for block in [READERS, *blocks]:
            exec(block, page)
        begun.assert_called_once_with("gloo")
        if compares:
            require_same_weights(page)
    return printed.getvalue()


@pytest.mark.shows("Hugging Face", "Trainer with gradient accumulation on spread experts, under plans, two processes")
@grid("compares", [False, True], quick=0, day=1)
def test_the_page_runs_and_plans_change_no_weights(tmp_path, compares):
    """Weights are compared by night, and in test_trl_ranks.py by day."""
    page = (ROOT / "docs" / "experts.md").read_text()
    blocks = [found.group(1) for found in FENCE.finditer(page)]
    assert len(blocks) == 6
    # of the page's sizes, with weights that make experts count
    sharp = {"vocab_size": 300, "num_experts": 16, "moe_intermediate_size": 32, "initializer_range": 0.2}
    tiny("qwen3_moe", hidden_size=64, num_hidden_layers=2, num_experts_per_tok=4, **sharp).save_pretrained(
        tmp_path / "sharp"
    )
    with closing(two_processes()) as workers:
        printed = workers.run(run_page, tmp_path, blocks, compares)
    rows = [int(*re.findall(rf"^rank {rank} computed (\d+) rows$", printed[rank], re.MULTILINE)) for rank in (0, 1)]
    assert abs(rows[0] - rows[1]) <= 0.04 * sum(rows), "replicas even the ranks out"


def require_same_weights(page):
    """On each rank: three steps of SGD under plans, on EP of transformers without, and with gradients dropped.

    Args:
        page: what the page has defined.
    """
    planned, without = _trained(page, page["PlannedTrainer"]), _trained(page, _replaying(page))
    torch.testing.assert_close(planned, without, rtol=0, atol=1e-6)
    with patch.object(StackedReplicas, "add_returned", lambda self, returned, grads: list(grads)):
        dropped = _trained(page, page["PlannedTrainer"])
    assert (dropped - without).abs().max() > 1e-4, "the control: gradients of replicas count"


def _trained(page, kind):
    model = page["model"] = page["load"]("sharp")
    page["routed"] = page["hf"].attach(model)
    settings = page["settings"] | {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1, "seed": 0}
    arguments = page["TrainingArguments"]("checked", **settings)
    kind(model, arguments, page["collate"], train_dataset=range(len(page["sequences"]))).train()
    return torch.cat([whole(each).detach().flatten() for each in model.parameters()])


def _replaying(page):
    """A Trainer that replays, its experts at home as transformers has them."""

    class Replaying(page["Trainer"]):
        def training_step(self, model, inputs, num_items_in_batch=None):
            with page["routed"].replay(inputs.pop("trace")):
                return super().training_step(model, inputs, num_items_in_batch)

    return Replaying
