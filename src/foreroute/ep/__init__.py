"""Expert-parallel execution of a MoE model, with a plan or without, on torch.distributed.

A framework spreads the experts of its model over ranks, and each runs it on its own rows. Under a plan a routed layer
sends rows to where their experts are served, and gets the results back. Adapters say where that is in their framework.
"""

from foreroute.ep.execution import PlanExecution
from foreroute.ep.model import ExpertParallelModel

__all__ = ["ExpertParallelModel", "PlanExecution"]
