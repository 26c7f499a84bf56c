"""What the configuration of an engine of verl asks for. verl itself is not needed."""

from types import SimpleNamespace

import pytest

from foreroute.errors import ConfigError
from foreroute.trainers.verl.settings import replay_of


@pytest.mark.parametrize("stated", [{"mode": "R3"}, SimpleNamespace(mode="R3")])
def test_the_mode_is_read_from_a_section(stated):
    assert replay_of(SimpleNamespace(router_replay=stated)) == "R3"


@pytest.mark.parametrize("engine_config", [SimpleNamespace(), SimpleNamespace(router_replay=None), object()])
def test_nothing_asked_for_is_no_replay(engine_config):
    assert replay_of(engine_config) == "disabled"


@pytest.mark.parametrize("stated", ["R3", 3, ["R3"], True, {"mode": "r3"}, {"mode": None}, {"mode": ["R3"]}])
def test_what_is_no_mode_is_refused(stated):
    with pytest.raises(ConfigError, match="router_replay"):
        replay_of(SimpleNamespace(router_replay=stated))


@pytest.mark.parametrize("name", ["record_file", "replay_file"])
def test_files_that_nothing_reads_are_refused(name):
    with pytest.raises(ConfigError, match=f"router_replay has {name}"):
        replay_of(SimpleNamespace(router_replay={"mode": "R3", name: "routes.pt"}))
