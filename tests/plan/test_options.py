"""Options that cannot be."""

import pytest

from foreroute.errors import ConfigError
from foreroute.plan import PlanOptions


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tolerance": 1}, "tolerance is 1; expected a share"),
        ({"tolerance": float("nan")}, "tolerance is nan; expected a share"),
        ({"home_moves": -1}, "home_moves is -1; expected a whole number from 0 to"),
        ({"threads": True}, "threads is True; expected a whole number from 1 to"),
        ({"slots": "both"}, "slots is 'both'; expected 'layer' or 'shared'"),
        ({"packing": "tokens"}, "packing is 'tokens'; expected 'length' or 'routes'"),
        ({"traffic": True, "replicas": False}, "traffic is on with replicas=False"),
    ],
)
def test_impossible_options_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        PlanOptions(**wrong)
