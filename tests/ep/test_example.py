"""The example of a step under a plan."""

import re
from pathlib import Path

import pytest

from foreroute.testing.ranks import environment, torchrun

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_example_evens_out_the_ranks_and_leaves_the_loss_as_it_is():
    done = torchrun(4, "examples/expert_parallel/execute_plan.py", timeout=300, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    (at_home, loss_at_home), (planned, loss) = re.findall(r"mean (\S+)   loss (\S+)$", done.stdout, re.MULTILINE)
    assert loss == loss_at_home
    assert float(at_home) > 1.1
    assert float(planned) <= 1.02 + 0.01, "the planner's tolerance, and what whole rows leave"
