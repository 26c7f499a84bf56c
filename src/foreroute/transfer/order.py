"""Which cell comes next, as far as the last two different ones tell. Pure; a wrong guess costs time alone."""

from __future__ import annotations

from foreroute.transfer.cell import Cell


def next_cell(previous: Cell | None, cell: Cell, shape: tuple[int, int], *, updating: bool) -> Cell | None:
    """The cell after `cell`.

    Forward goes up through the layers. In an update it turns back at the last one: backward asks for every cell again,
    and activation checkpointing more than once, before the next micro-step begins.

    Args:
        previous: the last one that ran before `cell` and was another, of the same step; None for the first.
        cell: the cell that runs now.
        shape: M micro-steps and L layers of the step.
        updating: whether backward passes follow; False in recompute.

    Returns:
        None after the last cell of the step.
    """
    num_micro_steps, num_layers = shape
    is_backward = updating and previous is not None and previous.micro_step == cell.micro_step and cell < previous
    if is_backward or (updating and cell.layer == num_layers - 1):
        if cell.layer > 0:
            return cell._replace(layer=cell.layer - 1)
    elif cell.layer < num_layers - 1:
        return cell._replace(layer=cell.layer + 1)
    return Cell(cell.step, cell.micro_step + 1, 0) if cell.micro_step < num_micro_steps - 1 else None
