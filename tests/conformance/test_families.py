"""The kit on our Hugging Face adapter: every check on a family of each kind of gate."""

from foreroute.conformance import conformance_tests
from foreroute.conformance.huggingface import HuggingFaceUnderTest
from foreroute.testing.models import FAMILIES, GROUPED
from tests.attended import SIZES

test_conformance = conformance_tests(
    *(HuggingFaceUnderTest(family, sizes) for family, sizes in {**FAMILIES, **GROUPED}.items())
)
test_conformance_with_indexers = conformance_tests(
    HuggingFaceUnderTest("deepseek_v32", SIZES),
    only=["routes-followed", "indexers-followed", "indexers-recorded", "indexers-refused"],
)
