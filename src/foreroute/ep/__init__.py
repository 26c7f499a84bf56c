"""Expert-parallel execution of a MoE model, with a plan or without, on torch.distributed.

Every rank runs the whole model on its own rows, and holds the experts that live on it. A routed layer sends rows to
where their experts are served and gets the results back. Models of a framework get here through its adapter:
`foreroute.adapters.hf.distribute`.
"""

from foreroute.ep.execution import PlanExecution
from foreroute.ep.model import ExpertParallelModel

__all__ = ["ExpertParallelModel", "PlanExecution"]
