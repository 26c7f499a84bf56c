"""The example of a step under a plan."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

EXAMPLE = Path(__file__).parents[2] / "examples" / "expert_parallel" / "execute_plan.py"


def run_example(rank):
    """Print what a process of torchrun prints, in the group that is there; of shorter sequences, for time."""
    source = EXAMPLE.read_text().replace("PROMPT, SAMPLED = 4, 2, 4, 28", "PROMPT, SAMPLED = 4, 2, 4, 8")
    assert "4, 8" in source
    with (
        redirect_stdout(io.StringIO()) as printed,
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
    ):
        exec(compile(source, EXAMPLE, "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.slow
def test_the_example_evens_out_the_ranks_and_leaves_the_loss_as_it_is(workers):
    printed, *others = workers(4).run(run_example)
    assert others == [""] * 3
    (at_home, loss_at_home), (planned, loss) = re.findall(r"mean (\S+)   loss (\S+)$", printed, re.MULTILINE)
    assert abs(float(loss) - float(loss_at_home)) < 5e-6, "ten units in the last place of 5.3"
    assert float(at_home) > 1.1
    assert float(planned) <= 1.02 + 0.01, "the planner's tolerance, and what whole rows leave"
