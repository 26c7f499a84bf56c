"""The kit on our TRL adapter."""

import pytest

from foreroute.conformance import conformance_tests
from foreroute.testing.models import FAMILIES
from tests.trainers.trl.presented import TRLUnderTest
from tests.trainers.trl.trl_runs import SCORES_ON_SETS

test_conformance = SCORES_ON_SETS(pytest.mark.slow(conformance_tests(TRLUnderTest("qwen3_moe", FAMILIES["qwen3_moe"]))))
