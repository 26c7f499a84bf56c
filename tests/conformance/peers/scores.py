"""What the kit says of an adapter, and on how few tokens it says the same."""

import re

import numpy as np

from foreroute.conformance import ALL_CHECKS, Batch, CheckResult, Outcome
from foreroute.conformance.check import CheckContext
from foreroute.conformance.kit import run_check


def scores_of(adapter):
    """{check: (outcome, reason, smallest input)} of an adapter; of a check that failed the reason on that input."""
    context, found = CheckContext(adapter), {}
    for check in ALL_CHECKS:
        if check.id.startswith(("masks-", "indexers-")):  # which none of them has
            continue
        result = run_check(check, context)
        failed = result.outcome is Outcome.FAILED
        reason, size = smallest(adapter, check, result.reason) if failed else (result.reason, "")
        found[check.id] = str(result.outcome), reason, size
    return found


class Small(CheckContext):
    """The context of a check whose batches are cut, and whose needs are met."""

    def __init__(self, adapter, *sizes):
        super().__init__(adapter)
        self.sizes = sizes
        self.results = {check.id: CheckResult(check, Outcome.PASSED) for check in ALL_CHECKS}

    def batch(self, *lengths, **given):
        whole, (sequences, tokens) = super().batch(*lengths, **given), self.sizes
        return Batch(tuple(each[:tokens] for each in whole.sequences[:sequences]), whole.padding)


def smallest(adapter, check, reason):
    """What a check says on the fewest tokens where only its numbers differ; and "2 x 1", sequences, tokens of each."""
    sizes = sorted(np.ndindex(4, 13), key=lambda size: (size[0] * size[1], size[0]))
    for sequences, tokens in sizes:
        if sequences and tokens:
            context = Small(adapter, sequences, tokens)
            del context.results[check.id]
            try:
                again = run_check(check, context)
            except Exception:  # a check that indexes what is not there
                continue
            if again.outcome is Outcome.FAILED and without_numbers(again.reason) == without_numbers(reason):
                return again.reason, f"{sequences} x {tokens}"
    return reason, "as the kit has it"


def without_numbers(text):
    return re.sub(r"[\d.,e\[\] -]+", "#", text)
