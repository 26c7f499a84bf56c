"""What the documentation says about Megatron runs: its code blocks, and the example."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from examples.megatron.rollout_routes import RolloutRoutes
from foreroute.ep.transfer.peers import gather_objects
from tests.adapters.megatron.forked_ranks import ROOT, on_ranks
from tests.adapters.megatron.grid import Cell
from tests.adapters.megatron.model_chunks import EXPERTS, TOP_K, VOCABULARY, attached, build, initialize
from tests.adapters.megatron.training_step import Dispatched
from tests.ep.test_example import run_example
from tests.replay.session_subject import batch_of, foreign

PAGE = "docs/megatron.md"
PAGE_WIDTH = 16
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@on_ranks(1)
def test_every_block_of_the_page_runs():
    text, namespace = (ROOT / PAGE).read_text(), a_users_things()
    blocks = list(FENCE.finditer(text))
    assert len(blocks) == 8
    for found in blocks:
        line = text[: found.start(1)].count("\n")
        exec(compile("\n" * line + found.group(1), PAGE, "exec"), namespace)


@pytest.mark.slow
@on_ranks(2)
def test_the_example_trains_on_two_ranks():
    seen = r"^step \d: .*k3 on own routes (\S+), k3 on the engine's (\S+),.* planned (\S+), executed (\S+)$"
    sizes = "WIDTH, GROUP, GROUPS = 32, 4, "
    printed = run_example(0, "megatron/grpo.py", f"{sizes}16, 8, 4", f"{sizes}9, 8, 2", "--steps", "2")
    printed = gather_objects(printed, dist.group.WORLD, "comparing")
    lines = re.findall(seen, "".join(printed), re.MULTILINE)
    assert len(lines) == 2, printed
    native, replayed, *_ = (sum(map(float, column)) for column in zip(*lines, strict=True))
    assert 0 < replayed < native / 2, lines
    assert all(planned == executed for *_, planned, executed in lines), lines


def a_users_things():
    """A model that is trained, its forward step, micro-batches, and what an engine recorded of them."""
    [model], routed = attached(Cell(as_shipped=True, recompute="uniform"))
    batches = [batch_of(PAGE_WIDTH, PAGE_WIDTH, seed=seed) for seed in range(2)]
    lasts = [(s, PAGE_WIDTH - 1) for s in range(2)]
    return {
        "torch": torch,
        "get_forward_backward_func": get_forward_backward_func,
        "model": model.train(),
        "optimizer": torch.optim.AdamW(model.parameters()),
        "forward_step": forward_step,
        "batches": [{"tokens": batch.ids_BT} for batch in batches],
        "traces": [foreign(routed.spec, batch, absent=lasts) for batch in batches],
        "schedule": {
            "num_microbatches": len(batches),
            "seq_length": PAGE_WIDTH,
            "micro_batch_size": 2,
            "forward_only": False,
        },
    }


def forward_step(batches, model):
    tokens = next(batches)["tokens"]
    positions = torch.arange(PAGE_WIDTH).expand_as(tokens)
    ahead = torch.ones(PAGE_WIDTH, PAGE_WIDTH, dtype=torch.bool).triu(1)[None, None]
    losses = model(tokens, positions, ahead, labels=tokens.roll(-1, 1))
    return losses, lambda losses: (losses.mean(), {"loss": losses.mean().item()})


@on_ranks(1)
def test_routes_of_rollouts_are_found_by_their_tokens():
    """As examples/megatron/README.md has Megatron-LM's loop call it: packed batches with padding; one that is inert."""
    initialize(Cell())
    [model], pad, lengths = build(Cell(layers=2, packed=True)), 0, (5, 8, 3)
    tokens = [torch.randint(1, VOCABULARY, (length,)).tolist() for length in lengths]
    routes = [torch.rand(length - 1, 2, EXPERTS).argsort(-1)[..., :TOP_K] for length in lengths]
    rollouts = [
        SimpleNamespace(trajectory=[each], routes=[of.tolist()]) for each, of in zip(tokens, routes, strict=True)
    ]
    known = RolloutRoutes()
    for numbers, follows in (((1, 0), False), ((1, 0), True), ((2,), True), ((), True)):
        if follows:
            known.remember(model, rollouts, pad)
        slots = [-(-lengths[n] // 4) * 4 for n in numbers]
        row = [t for n, width in zip(numbers, slots, strict=True) for t in tokens[n] + [pad] * (width - lengths[n])]
        row = torch.tensor([row + [pad] * (PAGE_WIDTH - len(row))])
        ends = torch.tensor([0, *slots, PAGE_WIDTH - sum(slots)]).cumsum(0).int()
        packed = PackedSeqParams("thd", ends, ends, ends, ends, PAGE_WIDTH, PAGE_WIDTH)
        with Dispatched([model]).watch() as seen, known.replayed(row, packed):
            model(row, torch.arange(PAGE_WIDTH)[None], None, packed_seq_params=packed)
        for layer, [(_, map_RE, *_)] in seen.calls.items():
            for n, begin in zip(numbers, ends.tolist(), strict=False):
                ran_RE = torch.from_numpy(map_RE[begin : begin + lengths[n] - 1])
                told_RE = torch.zeros(ran_RE.shape, dtype=torch.bool).scatter(1, routes[n][:, layer], True)
                assert torch.equal(ran_RE, told_RE) == follows, (numbers, layer)
    with pytest.raises(KeyError):
        known.replayed(torch.tensor([tokens[0][::-1]]), PackedSeqParams("thd", torch.tensor([0, 5])))
