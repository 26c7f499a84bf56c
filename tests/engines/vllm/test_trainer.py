"""The trainer with vLLM as its engine: configuration, a run on the fake, and what is left when a run fails."""

from foreroute.train import train
from tests.train.small_runs import records, small_config


def config(settings, **rollout):
    place = {"python": str(settings.python), "options": dict(settings.options), "timeout_s": 60.0}
    return small_config(
        warm_start={"max_steps": 1, "batch_size": 2},
        rollout={"engine": "vllm", "prompts": 2, "group_size": 2, "server": place, **rollout},
        rl={"steps": 2, "warmup_steps": 0},
    )


def test_a_run_steps_with_the_weights_of_each_step(fake_settings, tmp_path):
    run = train(config(fake_settings()), tmp_path / "run")
    assert [record["weight_version"] for record in records(run.path)] == [0, 1]
    # R3 forces the routes that the engine returned, whatever they are
    assert all(record["mismatch"]["replayed"]["differing_share"] == 0 for record in records(run.path))
    assert all(record["mismatch"]["native"]["differing_share"] > 0 for record in records(run.path))
