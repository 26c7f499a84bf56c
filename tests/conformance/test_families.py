"""The kit on our Hugging Face adapter: every check on a family of each kind of gate."""

import pytest

from foreroute.conformance import ALL_CHECKS, conformance_tests, gate_checks
from foreroute.conformance.huggingface import HuggingFaceUnderTest
from foreroute.testing.models import FAMILIES, GROUPED
from tests.attended import SIZES

UNDER_TEST = {family: HuggingFaceUnderTest(family, sizes) for family, sizes in {**FAMILIES, **GROUPED}.items()}
WHOLE = ("qwen3_moe", "deepseek_v3")
"""A softmax without groups, and a sigmoid with a bias and groups, behind a layer that is dense."""
BY_GATE = [check.id for check in gate_checks.CHECKS]
OF_LAYERS = ["layer-axis", "mtp-alias", "fused-bypass", "orphan-routers"]
"""What the dense layer, and other modules than routers, could mislead."""

SLOW = {"compiled-layers", "recompute-order", "wide-ids"}
test_conformance = conformance_tests(UNDER_TEST["qwen3_moe"], only={check.id for check in ALL_CHECKS} - SLOW)
test_conformance_that_takes_long = pytest.mark.slow(conformance_tests(UNDER_TEST["qwen3_moe"], only=SLOW))
test_gates_with_groups = conformance_tests(UNDER_TEST["deepseek_v3"], only=[*BY_GATE, *OF_LAYERS])
test_conformance_with_groups = pytest.mark.exhaustive(conformance_tests(UNDER_TEST["deepseek_v3"]))
OTHERS = [UNDER_TEST[family] for family in UNDER_TEST if family not in WHOLE]
test_other_gates = pytest.mark.slow(conformance_tests(*OTHERS, only=BY_GATE))
test_conformance_of_other_gates = pytest.mark.exhaustive(conformance_tests(*OTHERS))
test_conformance_with_indexers = pytest.mark.slow(
    conformance_tests(
        HuggingFaceUnderTest("deepseek_v32", SIZES),
        only=["routes-followed", "indexers-followed", "indexers-recorded", "indexers-refused"],
    )
)
