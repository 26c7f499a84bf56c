"""The kit on our Hugging Face adapter: every check on a family of each kind of gate."""

import pytest

from foreroute.conformance import conformance_tests
from foreroute.conformance.huggingface import HuggingFaceUnderTest
from foreroute.testing.models import FAMILIES, GROUPED
from tests.attended import SIZES

ALL = {**FAMILIES, **GROUPED}
AT_ONCE = ("qwen3_moe", "deepseek_v3")
"""Without the mark `slow`: a softmax without groups, and a sigmoid with a bias and groups."""

test_conformance = conformance_tests(*(HuggingFaceUnderTest(family, ALL[family]) for family in AT_ONCE))
test_conformance_of_other_gates = pytest.mark.slow(
    conformance_tests(*(HuggingFaceUnderTest(family, ALL[family]) for family in ALL if family not in AT_ONCE))
)
test_conformance_with_indexers = conformance_tests(
    HuggingFaceUnderTest("deepseek_v32", SIZES),
    only=["routes-followed", "indexers-followed", "indexers-recorded", "indexers-refused"],
)
