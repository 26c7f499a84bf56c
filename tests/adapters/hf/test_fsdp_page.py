"""docs/huggingface.md under FSDP2: its loop and what it appends run on two ranks, whose batches differ in length."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.adapters.hf.model_runs import whole

PAGE = Path(__file__).parents[3] / "docs" / "huggingface.md"
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run_page(rank):
    """In the group that is there: the width of this rank's last batch, k3 of its micro-batches, and weights after."""
    blocks = [found.group(1) for found in FENCE.finditer(PAGE.read_text(encoding="utf-8"))]
    loop, (appended,) = blocks[0], [block for block in blocks if "fully_shard" in block]
    page = {"__name__": "__main__"}
    group = patch.multiple(dist, init_process_group=lambda backend: None, destroy_process_group=lambda: None)
    with group, redirect_stdout(io.StringIO()) as printed:
        exec(loop, page)
        before = [parameter.detach().clone() for parameter in page["model"].parameters()]
        exec(appended, page)
    after = [whole(parameter).detach() for parameter in page["model"].parameters()]
    moved = sum(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    return page["tokens"].shape[1], printed.getvalue(), moved / len(after), after


@pytest.mark.slow
def test_the_page_runs_on_two_ranks(workers):
    one, other = workers(2).run(run_page)
    assert (one[0], other[0]) == (20, 24)
    assert one[1].count("k3 ") == 2
    assert one[2] > 0.9, "weights were trained"
    assert all(torch.equal(a, b) for a, b in zip(one[3], other[3], strict=True)), "and are one model"
