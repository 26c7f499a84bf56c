"""What the documentation says about Megatron runs: its code blocks, and the example."""

import re

import pytest

from tests.adapters.megatron.forked_ranks import ROOT, run

FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks_of(text):
    """(number of the line before it, code) of each Python block."""
    return [(text[: found.start(1)].count("\n"), found.group(1)) for found in FENCE.finditer(text)]


def test_every_block_of_the_page_runs():
    blocks = blocks_of((ROOT / "docs" / "megatron.md").read_text())
    assert len(blocks) == 8
    run("page_worker.run_blocks", "docs/megatron.md", blocks)


def test_a_block_that_fails_is_seen():
    with pytest.raises(AssertionError, match=r'File "docs/megatron.md", line 3(.|\n)*NameError'):
        run("page_worker.run_blocks", "docs/megatron.md", [(2, "no_such_name\n")])


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="experts"),
        pytest.param(("--pipeline", "2"), id="pipeline", marks=pytest.mark.exhaustive),
    ],
)
def test_the_example_trains_on_two_ranks(arguments):
    printed, other = run("page_worker.run_example", "--steps", "3", *arguments, ranks=2, timeout=300)
    seen = r"^step \d: .*k3 on own routes (\S+), k3 on the engine's (\S+),.* planned (\S+), executed (\S+)$"
    lines = re.findall(seen, printed + other, re.MULTILINE)
    assert len(lines) == 3, printed + other
    native, replayed, *_ = (sum(map(float, column)) for column in zip(*lines, strict=True))
    assert 0 < replayed < native / 2, lines
    assert all(planned == executed for *_, planned, executed in lines), lines
