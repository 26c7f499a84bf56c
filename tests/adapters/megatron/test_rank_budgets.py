"""Factors made of known rows, in the code of Megatron-Core that sizes HybridEP's budget and the paged stash."""

from importlib.metadata import version

import numpy as np
import pytest

from foreroute.layout import pack_sequences
from foreroute.plan import known_rows
from foreroute.testing import megatron_on_cpu
from foreroute.testing.routes import synthetic_trace
from tests.traces import spec_of

if version("megatron-core") < "0.19":
    pytest.skip("this release has no budget of ranks: run `make test-megatron-newest`", allow_module_level=True)

megatron_on_cpu.install()  # for the whole process, in which nothing compiles any more

import torch  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe import token_dispatcher  # noqa: E402

RANKS, PAGE, HIDDEN = 4, 64, 3
TRACE = synthetic_trace(spec_of(), [2400, 2000, 1600, 2800, 1200, 2200, 2640, 800, 1400], seed=0, correlation=0.7)
ROWS = known_rows(TRACE, np.tile(np.arange(8) // 2, (3, 1)), packing=pack_sequences(TRACE.lengths, RANKS, 2800))


def config(arguments):
    sizes = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "num_moe_experts": 8}
    backend = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    backend |= {"use_transformer_engine_op_fuser": True}  # so that budgets are multiples of 256
    stash = {"moe_router_topk": 2, "moe_paged_stash": True, "moe_paged_stash_page_size": PAGE}
    return TransformerConfig(**megatron_on_cpu.CONFIG, **sizes, **backend, **stash, **arguments)


def budget(config, tokens):
    """Rows that HybridEP has room for on each rank, whose ranks send so many tokens each."""
    manager = object.__new__(token_dispatcher._HybridEPManager)
    manager.config, manager.num_experts, manager.group, manager.drop_and_pad = config, 8, None, False
    manager.moe_expert_rank_capacity_factor = config.moe_expert_rank_capacity_factor
    manager.setup_metadata(torch.zeros(tokens, 8, dtype=torch.bool), torch.zeros(tokens, 8))
    return manager.num_permuted_tokens


def pages(config, budgets):
    """Pages of the stash that the layers of a captured micro-step with these budgets make Megatron allocate."""
    from megatron.core.transformer.moe.paged_stash import PagedStashManager

    stash = PagedStashManager()
    stash.status, stash.page_size, stash.device = "capture", PAGE, "cpu"
    for rows in budgets:
        stash.max_num_tokens, stash.num_tokens_tensor = rows, torch.tensor(rows)
        stash.avg_num_tokens = int(rows // config.moe_expert_rank_capacity_factor)  # as TEGroupedMLP.forward has it
        saved = torch.zeros(rows, HIDDEN)
        saved.grouped_tensor_scale_inv = False
        stash.on_save_for_backward(saved)
    stash.allocate_stash_buffers(config.moe_paged_stash_buffer_size_factor_cuda)
    return stash.stash_buffers[torch.float32][HIDDEN].num_cuda_pages


def test_budgets_and_stash_hold_every_row():
    given = ROWS.megatron_arguments(PAGE)
    made, tokens_M = config(given), ROWS.sent_MG.max(axis=1) // 2
    budget_M = np.array([budget(made, int(tokens)) for tokens in tokens_M])
    assert (ROWS.reserved_MLG.max(axis=(1, 2)) <= budget_M).all()
    ROWS.require_room(budget_M[:, None, None])
    needed = (-(-ROWS.reserved_MLG // PAGE)).sum(axis=1).max()
    largest = int(tokens_M.argmax())
    assert pages(made, [int(budget_M[largest])] * 3) - needed in range(needed // 20)
    # a tenth less, and rows are dropped
    for name, size in (
        ("moe_expert_rank_capacity_factor", lambda made: [budget(made, int(tokens)) for tokens in tokens_M]),
        ("moe_paged_stash_buffer_size_factor_cuda", lambda made: pages(made, [int(budget_M[largest])] * 3)),
    ):
        smaller = size(config(given | {name: given[name] * 0.9}))
        rows = ROWS.reserved_MLG.max(axis=(1, 2)) if name.startswith("moe_expert") else needed
        assert (np.array(smaller) < rows).any()
