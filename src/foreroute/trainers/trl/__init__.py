# ruff: noqa: E402  versions are looked at before anything else of a peer is imported
"""TRL: rollout routing replay for its `GRPOTrainer`.

from foreroute.trainers.trl import GRPOTrainer   # instead of: from trl import GRPOTrainer
"""

from foreroute.adapters.versions import require_peers

require_peers("torch", "transformers", "trl")

from foreroute.engines.embedded import EmbeddedEngine
from foreroute.trainers.trl.rollout_func import rollout_output, rollout_with
from foreroute.trainers.trl.trainer import GRPOTrainer, RoutingReplay

__all__ = ["EmbeddedEngine", "GRPOTrainer", "RoutingReplay", "rollout_output", "rollout_with"]
