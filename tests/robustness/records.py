"""Records of agents: each file of a record damaged, or forged so that compression and digests are right."""

import hashlib
import json

import numpy as np

from foreroute.capture import read_nemo_gym, read_skycap
from tests import scripted
from tests.robustness.mutations import damage, forge_json, forge_line
from tests.robustness.target import Target
from tests.robustness.traces import require_possible

SEED = 23
"""A script with a fork, an edit and updates of the weights."""


def record_targets(folder):
    made = scripted.script(SEED)
    graph = scripted.Skycap(made, masks=True)
    document = scripted.write_skycap(folder, graph.document(), graph.arrays())
    lines = scripted.write_gym(folder, [scripted.gym_entry(call, "0-0", i % 4) for i, call in enumerate(made)])
    state = lines.with_name("0-0.tokens.state.json")
    files = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def target(name, file, forge, read, **options):
        def make(rng):
            for path, content in files.items():
                path.write_bytes(content)
            return files[file]

        return Target(name, make, lambda _: read(), file=file, forge=forge, check=_require_rollout, **options)

    def skycap():
        return read_skycap(document, model=scripted.SPEC, weight_version=_version, vocabulary_size=scripted.VOCABULARY)

    def gym():
        return read_nemo_gym(lines, model=scripted.SPEC, weight_version=_version)

    def gym_with_right_digests():
        entries, content = {}, lines.read_bytes()
        for line in content.splitlines():
            try:
                entries[json.loads(line)["model_call_id"]] = hashlib.sha256(line.strip()).hexdigest()
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
        known = {name: digest for name, digest in entries.items() if isinstance(name, str)}
        stated = json.loads(files[state]) | {"entry_digests": known, "indexed_size": len(content)}
        state.write_text(json.dumps(stated))
        return gym()

    sides = [path for path in files if path.suffix == ".zst" and path != document]
    return [
        target("skycap document", document, _inside(forge_json), skycap, weight=3),
        *(target(f"skycap {path.name.split('.')[1]}", path, _inside(damage), skycap) for path in sides),
        target("gym lines", lines, None, gym, has_checksum=True),
        target("gym lines, right digests", lines, forge_line, gym_with_right_digests, weight=3),
        target("gym state", state, forge_json, gym),
    ]


def _version(call):
    made_at = call.get("t_start", call.get("created_at"))
    return 3 if isinstance(made_at, float) and made_at > 102 else 2


def _inside(change):
    return lambda raw, rng: scripted.compressed(change(scripted.content(raw), rng))


def _require_rollout(raw, rollout):
    generation = rollout.generation
    assert all(isinstance(sentence, str) for sentence in rollout.left_out)
    assert (generation is None) == (not rollout.ends)
    if generation is None:
        assert rollout.left_out
        return
    require_possible(raw, generation.trace)
    assert len(generation) == len(rollout.ends)
    assert generation.trace.valid_N.any()
    assert not generation.trace.valid_N[generation.trace.offsets[1:] - 1].any()
    assert np.isfinite(generation.logprobs_R).all()
    assert len(generation.logprobs_R) == int(generation.sampled_N.sum())
