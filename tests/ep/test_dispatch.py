"""Rows and their gate weights travel in one message, in which every row begins where a GPU loads 16 bytes at once."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from foreroute.ep.dispatch import CellRows, DispatchHandle, RowGroups

TOKENS, TOP_K, EXPERTS, ALIGNED = 5, 2, 3, 16
SENT = TOKENS * TOP_K


def one_rank(ids_NK):
    """Every expert at home, and one row of padding."""
    sizes = [*ids_NK.flatten().bincount(minlength=EXPERTS).tolist()]
    every, groups = torch.arange(SENT), RowGroups(sizes, torch.tensor(sizes).cumsum(0).to(torch.int32))
    empty = RowGroups([], torch.empty(0, dtype=torch.int32))
    padded = torch.cat([every, torch.tensor([SENT])])
    return DispatchHandle(None, "a cell", CellRows([SENT], [SENT], groups, empty, every, padded, every, padded), ids_NK)


@pytest.mark.parametrize("width", [64, 7, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rows_begin_at_multiples_of_16_bytes_and_bring_their_gates_unrounded(dtype, width):
    buffers = []

    def exchange(arrived, sent, *_, group):
        buffers.extend([arrived, sent])
        arrived.copy_(sent)

    ids_NK = torch.rand(TOKENS, EXPERTS).topk(TOP_K, dim=1).indices
    hidden_ND = torch.randn(TOKENS, width).to(dtype).requires_grad_()
    gates_NK = torch.rand(TOKENS, TOP_K, requires_grad=True)  # float32, as routers give them
    with patch.object(dist, "all_to_all_single", exchange):
        handle = one_rank(ids_NK)
        rows, gates = handle.dispatch(hidden_ND, gates_NK)
        order = ids_NK.flatten().argsort(stable=True)
        assert torch.equal(rows, torch.cat([hidden_ND[order // TOP_K], hidden_ND.new_zeros(1, width)]))
        assert torch.equal(gates[:-1], gates_NK.flatten()[order])
        output = handle.combine(rows)
        assert torch.equal(output, torch.stack([hidden_ND] * TOP_K).sum(0))
        (output.sum() + (gates * torch.arange(SENT + 1)).sum()).backward()
    assert torch.equal(gates_NK.grad.flatten()[order], torch.arange(SENT).float())
    assert torch.equal(hidden_ND.grad, torch.full_like(hidden_ND, TOP_K))
    assert len(buffers) == 2 * 4
    gate_bytes = max(4, dtype.itemsize)
    for number, buffer in enumerate(buffers):
        row_bytes = buffer.stride(0) * dtype.itemsize
        assert buffer.is_contiguous()  # what is sent and filled lies in one piece
        assert (buffer.data_ptr() % ALIGNED, row_bytes % ALIGNED) == (0, 0)
        has_gate = number // 2 in (0, 3)  # dispatch, and its backward
        assert row_bytes < width * dtype.itemsize + has_gate * gate_bytes + ALIGNED
