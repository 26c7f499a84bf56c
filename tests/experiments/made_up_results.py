"""Results that nobody measured, whose means are known."""

from experiments.runner import digest_of

K3 = {"none": 4e-3, "R3": 1e-4, "R3+weights": 9e-5, "shifted": 2.0}


def line(cell, reward=0.5):
    """Of a cell: figures that vary with the seed by a known factor."""
    factor = 1 + 0.1 * cell.seed
    return {
        "cell": cell.name,
        "digest": digest_of(cell),
        "arm": cell.arm,
        "seed": cell.seed,
        "figures": static(cell, factor) if cell.kind == "static" else run(cell, factor, reward),
        "processor_s": 36.0,
        "versions": {"torch": "2.13.0"},
    }


def static(cell, factor):
    dense = cell.start == "dense"
    names = ["none"] if dense else list(K3)
    share = 1e-3 if dense else 1e-2
    return {
        name: {"k3": (2e-4 if dense else K3[name]) * factor, "f2": share, "f1.5": share, "differing_share": 0.02}
        for name in names
    }


def run(cell, factor, reward):
    mean = {"k3": 1e-3 * factor, "f2": 1e-4, "clip_share": 0.01}
    mini_steps = cell.settings["rl"]["mini_steps"]
    stale = [] if cell.settings["rl"]["routing"] == "none" else [0.01 * n for n in range(mini_steps)]
    return {
        "reward": [reward] * 60,
        "reward_last": reward + 0.001 * cell.seed,
        "reward_mean": reward,
        "collapsed_at": None,
        "diverged": False,
        "spikes": 0.25,
        "mean": mean,
        "binned": {"k3": [1e-3] * 4 + [2e-3] * 4 + [3e-3 * factor] * 4},
        "stale_share_by_mini_step": stale,
    }
