"""Synthetic run folders for tests of the report: seeded, with every field that a trainer writes."""

import json

import numpy as np

from foreroute.mismatch import LOG10_EDGES

LAYERS = 8


def side(k3, f2=0.0, cells=0.0, tokens=0.0):
    """The figures of one side that a summary of runs looks at."""
    return {"k3": k3, "f2": f2, "differing_share": cells, "differing_tokens_share": tokens}


def mismatch(rng, share, k3):
    """One measured mismatch in which every cell differs with probability `share`."""
    by_layer = np.clip(share * rng.uniform(0.6, 1.4, LAYERS), 0, 1)
    differing = (rng.random((400, LAYERS)) < by_layer).sum(1)
    histogram = np.bincount(differing, minlength=LAYERS + 1)
    return {
        "response_tokens": 400,
        "k3": k3,
        "f2": min(1.0, 9 * k3),
        "max_abs_log_ratio": 3.0,
        "routed_rows": 500,
        "differing_share": float(by_layer.mean()),
        "differing_tokens_share": float(1 - histogram[0] / histogram.sum()),
        "differing_share_by_layer": {f"decoder {n}": share for n, share in enumerate(by_layer.tolist())},
    }


def step_line(step, *, seed=0, native=True, replayed=True, total=80):
    """One step with everything in it; drop keys from the answer to make a sparse one."""
    rng, drift, sides = np.random.default_rng([seed, step]), 1 + step / total, {}
    if native:
        sides["native"] = mismatch(rng, 0.1 * drift, 1e-3 * drift * float(rng.lognormal(0, 0.35)))
    if replayed:
        sides["replayed"] = mismatch(rng, 0.0, 3e-5 * float(rng.lognormal(0, 0.3)))
    shape = 1000 * np.exp(-0.5 * ((LOG10_EDGES[:-1] + 1.7) / 0.7) ** 2)
    return {
        "step": step,
        "weight_version": step,
        "seconds": {"rollout": 0.4, "recompute": 0.1, "update": 0.35, "measure": 0.08},
        "reward_mean": float(min(0.2 + 0.6 * step / total + rng.uniform(0, 0.1), 1)),
        "reward_std": 0.2,
        "exact_share": 0.3,
        "response_tokens_mean": 9.0,
        "entropy": 2.0 - step / total,
        "grad_norm": 0.8 + float(rng.lognormal(-1, 0.6)),
        "clip_share": 0.01,
        "loss": 0.0,
        "tokens": 4096,
        "mismatch": sides,
        "margins_LB": [(shape * rng.uniform(0.8, 1.2, len(shape))).astype(int).tolist() for _ in range(LAYERS)],
        "expert_load": {str(ranks): 1 + 0.12 * ranks**0.7 * drift for ranks in (4, 8, 16)},
    }


def execution(step):
    """What an expert-parallel run records: uneven with experts at their homes, even as executed."""
    rng = np.random.default_rng([7, step])
    at_home = rng.integers(40, 160, (3, 2, 4))
    executed = np.broadcast_to(at_home.sum(axis=2, keepdims=True) // 4, at_home.shape)
    loads = {"executed_MLG": executed.tolist(), "at_home_MLG": at_home.tolist()}
    passes = {
        name: loads | {"priced_options": {"pay_off": "on: where it saves time"}} for name in ("recompute", "update 0")
    }
    most = float(at_home.max(axis=2).sum() / at_home.mean(axis=2).sum())
    return {
        "ranks": 4,
        "max_over_mean": {"planned": 1.0, "executed": 1.0, "at_home": most},
        "replicas": 12,
        "bytes": {"host": 3_000_000, "direct": 1_000_000 * step, "gradients": 5_000_000},
        "exposed_transfer_s": 0.5,
        "planning_s": 0.2 + step,
        "forecast_memory_bytes": 1_500_000_000 + step,
        "packing": {"bound": 1000, "by_length": 1100 + 10 * step, "by_routes": 1004},
        "exposed_planning_s": 0.2,
        "passes": passes,
    }


def config(name="run", *, seed=0, precision="bfloat16", routing="none", **rl):
    return {
        "name": name,
        "seed": seed,
        "model": {"layers": LAYERS, "experts": 64, "top_k": 4, "norm": None},
        "rollout": {"precision": precision, "temperature": 1.0},
        "rl": {"routing": routing, "mini_steps": 4, "learning_rate": 0.001} | rl,
    }


def write_run(folder, settings, lines, tail=""):
    """A run folder with these steps; `tail` is appended to the metrics as it is."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + tail, encoding="utf-8")
    return folder
