"""What replaying indexers is for: a bfloat16 rollout of a tiny DeepSeek-V3.2 against a float32 trainer."""

from benchmarks.harness.indexers import mismatch


def test_routes_and_choices_together_close_the_gap_that_either_alone_leaves():
    """Each alone leaves the other to cascade. The prototype had 1.8e-1, 5.4e-2, 4.7e-2 and 9.2e-4."""
    kl = mismatch(num_sequences=1)
    assert 5e-2 < kl["neither"] < 5e-1
    assert 5e-3 < kl["routes"] < kl["neither"] / 1.5
    assert 5e-3 < kl["indexers"] < kl["neither"] / 1.5
    assert kl["both"] < 3e-3
