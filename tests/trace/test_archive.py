"""Files written by released versions are read for ever. `python tests/trace/test_archive.py` writes those of this one.

Their content is made by plain arithmetic, so that it does not depend on any random generator.
"""

from math import gcd
from pathlib import Path

import numpy as np
import pytest

import foreroute as fr
from foreroute.trace import CODECS

DATA = Path(__file__).parent / "data"
SHAPES = {"128x8": (128, 8, 5), "512x4": (512, 4, 2), "6x1": (6, 1, 1)}
LENGTHS = {"128x8": [40, 900, 0, 1, 300], "512x4": [50, 3], "6x1": [7, 9]}


def archived(name):
    """Sequences of arithmetic routes; the first one thrice with other endings, as samples of one prompt."""
    num_experts, top_k, num_layers = SHAPES[name]
    kinds = [fr.LayerKind.MTP if layer == 4 else fr.LayerKind.DECODER for layer in range(num_layers)]
    layers = tuple(fr.RoutedLayer(3 + layer, kind) for layer, kind in enumerate(kinds))
    spec = fr.RoutingSpec(num_experts, top_k, layers, model=name)
    tokens = [np.arange(length) * 7 % 1000 for length in LENGTHS[name]]
    base = fr.RoutingTrace.from_sequences(
        spec, tokens, [routes(spec, max(0, length - 1), s) for s, length in enumerate(LENGTHS[name])], weight_version=4
    )
    prompt = base.select([0, 0, 0]).truncated([LENGTHS[name][0] - 1] * 3)
    endings = [routes(spec, 4, 50 + s) for s in range(3)]
    samples = fr.RoutingTrace.from_sequences(spec, [np.arange(5) + s for s in range(3)], endings, weight_version=5)
    trace = fr.concatenate([prompt.continued_by(samples), base])
    return trace.with_provenance(engine="archive", note="ünïcode")


def routes(spec, num_rows, seed):
    """Distinct picks: multiples of a step without common factor with E, in skewed places."""
    ids = np.zeros((num_rows, spec.num_layers, spec.top_k), np.int64)
    steps = [step for step in range(1, spec.num_experts + 1) if gcd(step, spec.num_experts) == 1]
    for row in range(num_rows):
        for layer in range(spec.num_layers):
            mixed = (row * 2654435761 + layer * 40503 + seed * 97) % 65521
            start, step = (mixed % 251) ** 2 // 251, steps[mixed % min(5, len(steps))]
            ids[row, layer] = (start + np.arange(spec.top_k) * step) % spec.num_experts
    return ids


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("codec", CODECS)
def test_version_2_is_read(name, codec):
    expected = archived(name)
    expected = expected.without_pick_order() if codec == "planes" else expected
    path = DATA / "v2" / f"{name}-{codec}.safetensors"
    read = fr.load(path)
    assert read.equals(expected)
    assert read.provenance == expected.provenance
    assert read.spec.model == name
    part = fr.load(path, sequences=[1, 3], layers=expected.spec.layers[-1:])
    assert part.equals(expected.select([1, 3]).select_layers(expected.spec.layers[-1:]))


def write() -> None:
    for name in SHAPES:
        for codec in CODECS:
            fr.save(archived(name), DATA / "v2" / f"{name}-{codec}.safetensors", codec=codec)


if __name__ == "__main__":
    write()
