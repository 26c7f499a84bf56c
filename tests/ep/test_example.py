"""The example of a step under a plan."""

import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(rank, name, sizes, fewer, *arguments):
    """What a process of torchrun prints, in the group that is there; of fewer and shorter sequences, for time."""
    source = (EXAMPLES / name).read_text()
    assert sizes in source
    with (
        redirect_stdout(io.StringIO()) as printed,
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
        patch.object(sys, "argv", [name, *arguments]),
    ):
        exec(compile(source.replace(sizes, fewer), name, "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.slow
def test_the_example_evens_out_the_ranks_and_leaves_the_loss_as_it_is(workers):
    sizes = "PROMPT, SAMPLED = 4, 2, 4, "
    printed, *others = workers(4).run(run_example, "expert_parallel/execute_plan.py", f"{sizes}28", f"{sizes}8")
    assert others == [""] * 3
    (at_home, loss_at_home), (planned, loss) = re.findall(r"mean (\S+)   loss (\S+)$", printed, re.MULTILINE)
    assert abs(float(loss) - float(loss_at_home)) < 5e-6, "ten units in the last place of 5.3"
    assert float(at_home) > 1.1
    assert float(planned) <= 1.02 + 0.01, "the planner's tolerance, and what whole rows leave"
