"""Whole runs on several ranks, as worker processes do them."""

import os
from contextlib import closing

from foreroute.adapters import hf
from foreroute.errors import EngineError
from foreroute.train import Watcher, train
from foreroute.train.loop import make_execution, make_policy, make_trainer
from foreroute.train.ranks import joined
from small_runs import small_config
from spreading import scored_by_tokens


def run_config(num_ranks, **sections):
    sections["rl"] = {"steps": 3, "micro_step_tokens": 96, **sections.get("rl", {})}
    return small_config(rollout={"prompts": 8}, parallel={"expert": num_ranks, "timeout_s": 30.0}, **sections)


def run(rank, config, folder, *, resume=False, stop_after=None, watcher=None):
    """Rank 0 alone is asked to stop."""
    seen = []
    stopping = Watcher(on_step=seen.append, should_stop=lambda: stop_after is not None and len(seen) >= stop_after)
    with scored_by_tokens():
        train(config, folder, resume=resume, watcher=watcher or stopping)
    return len(seen)


def resume(rank, config, folder):
    return run(rank, config, folder, resume=True)


def stop_early(rank, config, folder):
    return run(rank, config, folder, stop_after=1)


def restored_state(rank, config, checkpoint):
    with joined(config.parallel.expert, config.parallel.timeout_s) as ranks:
        policy = make_policy(config)
        engine = hf.EmbeddedEngine(policy.model, config.rollout.precision)
        with closing(make_execution(config, policy, ranks)) as execution:
            trainer = make_trainer(config, policy, execution, engine)
            trainer.restore(checkpoint)
            return {"step": trainer.step, **trainer.state()}


def fail_in_rollout(rank, config, folder):
    kept = hf.EmbeddedEngine.generate
    if rank == 1:
        hf.EmbeddedEngine.generate = _no_engine
    try:
        run(rank, config, folder)
    finally:
        hf.EmbeddedEngine.generate = kept


def die_in_update(rank, config, folder):
    """Rank 1 ends in the second step, in the middle of its backward pass."""
    from foreroute.train import loop

    kept, steps = loop.update, []

    def update(routed, *rest, **options):
        steps.append(1)
        if rank == 1 and len(steps) == 2:
            next(routed.model.parameters()).register_hook(lambda _: os._exit(1))
        return kept(routed, *rest, **options)

    loop.update = update
    run(rank, config, folder)


def _no_engine(*_):
    raise EngineError("the engine is gone")
