"""The kit on our Hugging Face adapter: every check on a family of each kind of gate."""

import pytest

from foreroute.conformance import conformance_tests, gate_checks
from foreroute.conformance.huggingface import HuggingFaceUnderTest
from foreroute.testing.models import FAMILIES, GROUPED
from tests.attended import SIZES

ALL = {**FAMILIES, **GROUPED}
AT_ONCE = "qwen3_moe"
"""Whole without the mark `slow`: a softmax without groups."""
BY_GATE = [check.id for check in gate_checks.CHECKS]
"""What a sigmoid with a bias and groups is asked without it."""

test_conformance = conformance_tests(HuggingFaceUnderTest(AT_ONCE, ALL[AT_ONCE]))
test_gates_with_groups = conformance_tests(HuggingFaceUnderTest("deepseek_v3", ALL["deepseek_v3"]), only=BY_GATE)
test_conformance_of_other_gates = pytest.mark.slow(
    conformance_tests(*(HuggingFaceUnderTest(family, ALL[family]) for family in ALL if family != AT_ONCE))
)
test_conformance_with_indexers = conformance_tests(
    HuggingFaceUnderTest("deepseek_v32", SIZES),
    only=["routes-followed", "indexers-followed", "indexers-recorded", "indexers-refused"],
)
