"""Pipeline stages: every routed decoder layer on exactly one stage, whatever stands between them."""

import numpy as np
import pytest

from foreroute import LayerKind, RoutedLayer, RoutingSpec, layout
from foreroute.conformance import oracle
from foreroute.errors import LayoutError
from foreroute.layout import PipelineStages
from tests.layout.layout_cases import draw_model


def spec_with(*layers):
    return RoutingSpec(8, 2, layers)


def named(layers):
    return [str(layer) for layer in layers]


@pytest.mark.parametrize("seed", range(300))
def test_stages_equal_a_walk_through_the_model(seed):
    spec, counts = draw_model(np.random.default_rng(seed))
    stages = PipelineStages(counts)
    stage_of = oracle.stage_of_layer(counts)
    for rank in range(stages.pp):
        for chunk in range(stages.vpp):
            here = [i for i, stage in enumerate(stage_of) if stage == (rank, chunk)]
            expected = [r for i in here for r in spec.layers if r.index == i and r.kind in ("decoder", "hash")]
            assert list(stages.layers(spec, rank, chunk)) == expected
            last = (rank, chunk) == (stages.pp - 1, stages.vpp - 1)
            mtp = sorted(r for r in spec.layers if r.kind == LayerKind.MTP)
            assert list(stages.mtp_layers(spec, rank, chunk)) == (mtp if last else [])


def test_virtual_chunks_take_turns():
    stages = PipelineStages.even(8, 2, 2)
    assert [list(stages.decoder_range(*at)) for at in ((0, 0), (1, 0), (0, 1), (1, 1))] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]


def test_first_and_last_ranks_may_differ():
    assert PipelineStages.even(61, 16, first=4, last=1).counts == ((4, *[4] * 14, 1),)
    assert PipelineStages.even(10, 3, 2, first=2, last=4).counts == ((1, 2, 2),) * 2
    assert PipelineStages.even(6, 1, first=6).counts == ((6,),)
    assert PipelineStages.even(5, 2, first=3).counts == ((3, 2),)


def test_dense_layers_take_up_their_place():
    spec = spec_with(*(RoutedLayer(i) for i in range(3, 8)), RoutedLayer(0, LayerKind.MTP))
    stages = PipelineStages.even(8, 2)
    assert named(stages.layers(spec, 0)) == ["decoder 3"]
    assert named(stages.layers(spec, 1)) == ["decoder 4", "decoder 5", "decoder 6", "decoder 7"]
    assert named(stages.mtp_layers(spec, 1)) == ["mtp 0"]
    assert stages.mtp_layers(spec, 0) == ()


def test_an_mtp_layer_is_never_the_decoder_layer_of_its_number():
    spec = spec_with(RoutedLayer(0, LayerKind.MTP), RoutedLayer(0), RoutedLayer(0, LayerKind.DRAFT))
    assert named(PipelineStages.even(1, 1).layers(spec, 0)) == ["decoder 0"]


def test_hash_routed_layers_stand_in_the_decoder_stack():
    spec = spec_with(RoutedLayer(1), RoutedLayer(0, LayerKind.HASH))
    assert named(PipelineStages.even(2, 1).layers(spec, 0)) == ["hash 0", "decoder 1"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PipelineStages.even(7, 2), "7 decoder layers .* do not divide over 2"),
        (lambda: PipelineStages.even(8, 2, 3), "with 3 chunks"),
        (lambda: PipelineStages.even(8, 2, 2, first=3, last=5), "do not divide"),
        (lambda: PipelineStages.even(8, 2, first=9), "do not divide"),
        (lambda: PipelineStages.even(8, 1, last=8), "leave `last` out"),
        (lambda: PipelineStages.even(8, 0), "expected at least 1"),
        (lambda: PipelineStages(()), "are no table"),
        (lambda: PipelineStages(((1, 2), (3,))), "are no table"),
        (lambda: PipelineStages(((1, -2),)), "are no table"),
        (lambda: PipelineStages.even(8, 2).decoder_range(2), "pipeline rank 2, chunk 0 is not one of 2 ranks"),
        (lambda: PipelineStages.even(8, 2).mtp_layers(spec_with(RoutedLayer(0)), 0, 1), "chunk 1"),
        (lambda: PipelineStages.even(2, 1).layers(spec_with(RoutedLayer(2)), 0), "run 2 decoder layers .* decoder 2"),
        (
            lambda: PipelineStages.even(2, 1).layers(spec_with(RoutedLayer(0), RoutedLayer(0, LayerKind.HASH)), 0),
            "of one index",
        ),
    ],
)
def test_stages_that_do_not_tile_are_refused(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


def test_the_room_exports_what_its_page_names():
    assert all(hasattr(layout, name) for name in layout.__all__)
