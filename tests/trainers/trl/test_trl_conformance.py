"""The kit on our TRL adapter."""

import os

from foreroute.conformance import conformance_tests
from foreroute.conformance.trl import TRLUnderTest
from tests.models import FAMILIES

os.environ["TOKENIZERS_PARALLELISM"] = "false"

test_conformance = conformance_tests(TRLUnderTest("qwen3_moe", FAMILIES["qwen3_moe"]))
