"""verl: routes to and from its data protocol, and rollout routing replay for its FSDP engine.

Importing this needs torch alone. The engine is in `foreroute.trainers.verl.fsdp`, which verl imports in its workers if
`actor_rollout_ref.model.external_lib` names it.
"""

from foreroute.trainers.verl.packed_batch import FIELD
from foreroute.trainers.verl.protocol import routed_experts, trace_of

__all__ = ["FIELD", "routed_experts", "trace_of"]
