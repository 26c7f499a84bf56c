"""Means over sequences, a correction and gate weights on two ranks: as on one process."""

import pytest

from foreroute.train.config import RLConfig
from tests.train.expert_parallel_steps import config_of
from tests.train.test_expert_parallel import learn_alike


@pytest.mark.parametrize(
    "rl",
    [
        {"method": "gspo", "correction": {"kind": "tis", "high": 1.01}},
        {"routing": "R3+weights", "router": "frozen"},
    ],
    ids=["gspo", "gate weights"],
)
def test_two_ranks_learn_what_one_process_learns(workers, rl):
    config = config_of(2)
    config = config.model_copy(update={"rl": RLConfig(micro_step_tokens=96, **rl)})
    for record in learn_alike(workers, config):
        assert 0 < record["importance"]["effective_share"] < 1
        assert (0 < record["importance"]["cut_share"] < 1) == ("correction" in rl)
