"""Whole runs on several ranks, as worker processes do them."""

from foreroute.train import RunFolder, train
from foreroute.train.run import Watcher
from tests.train.expert_parallel_steps import TIMEOUT_S, parallel_steps, scored_by_tokens
from tests.train.small_runs import small_config


def run_config(num_ranks, **sections):
    sections["rl"] = {"steps": 2, "micro_step_tokens": 96, **sections.get("rl", {})}
    parallel = {"expert": num_ranks, "timeout_s": TIMEOUT_S, **sections.pop("parallel", {})}
    return small_config(rollout={"prompts": 8}, parallel=parallel if num_ranks > 1 else {}, **sections)


def run(rank, config, folder, resume=False, stop_after=None):
    """Rank 0 alone is asked to stop."""
    seen = []
    stopping = Watcher(on_step=seen.append, should_stop=lambda: stop_after is not None and len(seen) >= stop_after)
    with scored_by_tokens():
        train(config, folder, resume=resume, watcher=stopping)
    return len(seen)


def step_on(rank, config, folder, step):
    """Go on from a checkpoint in float64 for one step, and save the next; rank 0 tells of it."""
    steps = parallel_steps(rank, config, 1, path_of(folder, step))
    if rank == 0:
        RunFolder(folder).save_checkpoint(steps.state, data="", keep=99)
        return steps
    return None


def path_of(folder, step):
    return folder / "checkpoints" / f"step-{step:06d}.safetensors"
