"""What the configuration of an engine of verl asks for. verl itself is not needed."""

from types import SimpleNamespace as Section

import pytest

from foreroute.errors import ConfigError
from foreroute.trainers.verl.settings import replay_of


def test_the_mode_is_read_from_a_section_and_what_is_none_is_refused():
    for stated in ({"mode": "R3"}, Section(mode="R3")):
        assert replay_of(Section(router_replay=stated)) == "R3"
    assert replay_of(Section(router_replay=None)) == "disabled"
    for stated in ("R3", {"mode": "r3"}, {"mode": "R3", "record_file": "routes.pt"}):
        with pytest.raises(ConfigError, match=r"router_replay|record_file"):
            replay_of(Section(router_replay=stated))
