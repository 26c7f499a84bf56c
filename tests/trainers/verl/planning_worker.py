"""A trainer's worker of verl as Ray starts it, with the page's configuration of Megatron and plans.

Usage: torchrun --nproc-per-node 1 -m tests.trainers.verl.planning_worker DEVICE POLICY [OVERRIDE...]
"""

import os
import sys

# isort: off
from examples.verl import verl_on_cpu  # noqa: F401  before verl

# isort: on
from hydra import compose, initialize_config_module
from verl.workers.engine_workers import ActorRolloutRefWorker

from tests.trainers.verl.test_verl_page import OTHERWISE, lines_of_page


def main(device, policy, *overrides):
    os.environ["VERL_ENGINE_DEVICE"] = device
    _, lines = lines_of_page()
    settings = [*OTHERWISE, *lines, f"actor_rollout_ref.model.path={policy}", *overrides]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=settings)
    ActorRolloutRefWorker(config.actor_rollout_ref, role="actor").init_model()


if __name__ == "__main__":
    main(*sys.argv[1:])
