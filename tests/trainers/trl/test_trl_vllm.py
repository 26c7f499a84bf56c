"""vLLM in TRL's own two modes, on stand-ins that answer with vLLM's fields; and what comes back wrong is refused."""

import pytest

from foreroute.errors import CaptureError
from tests.trainers.trl import tools_runs
from tests.trainers.trl.trl_runs import logged, trained
from tests.trainers.trl.vllm_fakes import COLOCATE, SERVER, as_they_are, colocated, served

pytestmark = pytest.mark.slow

MODES = {"colocate": (colocated, COLOCATE), "server": (served, SERVER)}


@pytest.mark.shows("TRL", "vLLM, served and colocated (stand-ins; real vLLM in `make night`)")
@pytest.mark.parametrize("mode", MODES)
def test_routes_of_vllm_are_replayed_turn_by_turn_and_measured(mode, folder, monkeypatch):
    fake, settings = MODES[mode]
    first = {}
    for replay in ("none", "R3"):
        with monkeypatch.context() as patch:
            fake(patch, as_they_are)
            trainer = tools_runs.trained(folder, replay=replay, **settings)
        assert sum(not sampled[20:].all() for _, sampled, _ in tools_runs.sequences_of(trainer)) > 1
        first[replay] = {name: logged(trainer, f"mismatch/{name}")[0] for name in ("k3", "disagreement")}
    assert first["R3"]["disagreement"] == 0
    assert first["none"]["disagreement"] > 0.005
    assert first["R3"]["k3"] < first["none"]["k3"] / 2


def test_a_server_that_returns_no_routes_is_refused_with_the_flag_to_start_it_with(folder, monkeypatch):
    served(monkeypatch, as_they_are, returns_routes=False)
    with pytest.raises(CaptureError, match="--enable-return-routed-experts"):
        trained(folder, **SERVER)
    assert logged(trained(folder, replay="R2", max_steps=1, **SERVER), "mismatch/k3")  # which needs no routes
