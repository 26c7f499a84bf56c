"""The kit on our Hugging Face adapter: every check on a family of each kind of gate."""

from foreroute.conformance import conformance_tests
from foreroute.conformance.huggingface import HuggingFaceUnderTest
from tests.models import FAMILIES, GROUPED

test_conformance = conformance_tests(
    *(HuggingFaceUnderTest(family, sizes) for family, sizes in {**FAMILIES, **GROUPED}.items())
)
