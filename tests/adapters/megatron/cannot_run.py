"""What Megatron itself cannot run on the CPU, with its own words for it, and what stands in for it in the grid."""

from grid import Cell

CANNOT_RUN = {
    "packed sequences with the attention shipped for the CPU": (
        Cell(packed=True, as_shipped=True),
        "Packed sequence is not supported by DotProductAttention",
        "cpu_modules.PackedAttention",
    ),
    "context parallelism with the attention shipped for the CPU": (
        Cell(cp=2, as_shipped=True),
        "Context parallelism is only supported by TEDotProductAttention",
        "cpu_modules.PackedAttention; and the cut alone in test_cuts.py",
    ),
    "sequence parallelism with the norm shipped for the CPU": (
        Cell(tp=2, as_shipped=True),
        "sequence parallel not supported by torch LayerNorm",
        "cpu_modules.Norm; and the cut alone in test_cuts.py",
    ),
    "expert tensor parallelism with the all-to-all dispatcher": (
        Cell(ep=2, tp=2, etp=2),
        "ProcessGroupGloo::allgather: invalid tensor size",
        "the all-gather dispatcher: routers are cut by TP and never by ETP",
    ),
}
"""name: (cell, what Megatron or gloo says, what covers it)."""

TOO_MANY_RANKS = [Cell(tp=2, cp=2, pp=2, vpp=vpp, ep=ep) for vpp in (1, 2) for ep in (1, 2)]
"""Eight processes: the cut of their routers is in test_cuts.py, and their pipeline in the cells without CP or TP."""
