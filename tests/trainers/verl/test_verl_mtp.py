"""verl's Megatron engine on a model with multi-token prediction: its layers route natively, and run at home."""

import pytest

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")
pytest.importorskip("mbridge", reason="there is no mbridge in this environment: run `make night PART=verl`")

# isort: off
from tests.trainers.verl import megatron_engines  # noqa: F401  before verl: no GPU

# isort: on
from tests.trainers.verl.mtp_bridge import save_predicting_policy
from tests.trainers.verl.verl_ranks import run_each

TENSOR, CONTEXT, PIPELINE = ({f"{kind}_parallel_size": 2} for kind in ("tensor_model", "context", "pipeline_model"))
SPLITS = {"data": {}, "tensor": TENSOR, "context": CONTEXT, "pipeline": PIPELINE}
PLANNED = {f"{name}, planned": split | {"plans": True} for name, split in SPLITS.items()}
CONTROL = "data, not replayed"
RUNS = SPLITS | PLANNED | {CONTROL: {"replay": "disabled"}}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    policy = save_predicting_policy(tmp_path_factory.mktemp("policy"), layers=4)
    return run_each(4, "megatron_worker.predict", policy, RUNS)


@pytest.mark.shows("verl, Megatron engine", "multi-token prediction (`model.mtp.enable`): its routers stay native")
@pytest.mark.parametrize("name", RUNS)
def test_the_decoder_is_replayed_and_layers_of_prediction_route_by_themselves(name, found):
    shares = [rank["native"] for rank in found[name]]
    assert {share["prediction"] for share in shares if "prediction" in share} == {1.0}
    replayed = name != CONTROL
    assert all((share["decoder"] < 0.95) == replayed for share in shares)
    logged = [rank["metrics"] for rank in found[name] if rank["metrics"]]
    assert any(metrics["mtp_losses/mtp_1_loss"][0] > 0 for metrics in logged if "mtp_losses/mtp_1_loss" in metrics)
    for metrics in logged if replayed else ():
        assert metrics["mismatch/disagreement"] == [0.0]
        assert metrics["mismatch/native_disagreement"][0] > 0.05
    for metrics in logged if "planned" in name else ():
        assert metrics["plan/rows_off"] == [0.0]
        assert metrics["plan/imbalance_executed"][0] < metrics["plan/imbalance_static"][0]
