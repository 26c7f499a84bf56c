"""The kit on our verl adapter."""

import pytest

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

from foreroute.adapters import hf
from foreroute.conformance import conformance_tests
from foreroute.testing.models import FAMILIES
from tests.trainers.verl.presented import VerlUnderTest

test_conformance = conformance_tests(VerlUnderTest("qwen3_moe", FAMILIES["qwen3_moe"]))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_attached_with_the_transformers_that_verl_pins(family):
    routed = hf.attach(hf.build_model(family, seed=0, experts_implementation="eager", **FAMILIES[family]))
    assert routed.spec.num_layers == (2 if family == "deepseek_v3" else 3)
