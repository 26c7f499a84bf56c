"""Writes scripted rollouts by NeMo Gym's own code, and reads them back.

    python -m tests.capture.record_gym UNPACKED OUT [COUNT]

UNPACKED holds `nemo_gym/token_id_capture` of the wheel of nemo-gym 0.7.0, which wants a newer Python than ours: its
modules are imported below a package of ours, with pydantic and orjson. `recorded/` was made with COUNT = 8.
"""

import asyncio
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

from tests import scripted
from tests.capture.test_agents import expect_gym, read_gym


def own_code(unpacked):
    for name in ("nemo_gym", "nemo_gym.token_id_capture"):
        package = ModuleType(name)
        package.__path__ = [str(Path(unpacked, *name.split(".")))]
        sys.modules[name] = package
    from nemo_gym.token_id_capture import records, store

    return records, store


def write(code, folder, seed):
    """One rollout by Gym's code, calls in another order than that in which they were made."""
    records, store = code
    rng, rollout, made = np.random.default_rng([seed, 1]), f"{seed}-0", scripted.script(seed)
    sink = store.TokenCaptureStore(folder)
    for number in rng.permutation(len(made)):
        call = made[number]
        ours = scripted.gym_entry(call, rollout, int(rng.integers(5)))
        entry = records.TokenEntry(**{**ours, "digest": None, "cum_len": None})
        records.stamp_lineage(
            entry, entry.parent_call_id, parent_resolution=entry.parent_resolution, cumulative=call.tokens
        )
        assert entry.model_dump(mode="json") == ours
        asyncio.run(sink.begin_call(rollout, call.name))
        asyncio.run(sink.put(entry))
    snapshot = sink.freeze_now(rollout)
    assert not snapshot.incomplete
    sink.lock_path_for(rollout).unlink()
    return made, sink.path_for(rollout)


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    code = own_code(sys.argv[1])
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 8
    for seed in range(count):
        made, path = write(code, folder, seed)
        expect_gym(made, read_gym(path, made))
    sys.stdout.write(f"{count} rollouts by NeMo Gym's own code, equal to the engine's\n")
