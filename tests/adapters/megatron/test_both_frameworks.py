"""One trace replayed by transformers and by Megatron on the same weights."""

from checks import checks_of

test_both_frameworks = checks_of("both_frameworks")
