"""What the configuration of an engine of verl asks for. verl itself is not needed."""

from types import SimpleNamespace as Section

import pytest

from foreroute.errors import ConfigError
from foreroute.trainers.verl.settings import replay_of


def test_the_mode_is_read_from_a_section_and_nothing_asked_for_is_no_replay():
    for stated in ({"mode": "R3"}, Section(mode="R3")):
        assert replay_of(Section(router_replay=stated)) == "R3"
    for config in (Section(), Section(router_replay=None), object()):
        assert replay_of(config) == "disabled"


FILES = [{"mode": "R3", name: "routes.pt"} for name in ("record_file", "replay_file")]


@pytest.mark.parametrize("stated", ["R3", 3, ["R3"], True, {"mode": "r3"}, {"mode": None}, {"mode": ["R3"]}, *FILES])
def test_what_is_no_mode_and_files_that_nothing_reads_are_refused(stated):
    named = "|".join(stated) if stated in FILES else "router_replay"
    with pytest.raises(ConfigError, match=named.removeprefix("mode|")):
        replay_of(Section(router_replay=stated))
