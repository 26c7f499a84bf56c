"""One model on one rank: what its sessions have alone, what is refused, and the same trace replayed by transformers.

The bodies are in the modules named here.
"""

from tests.adapters.megatron.forked_ranks import checks_of

test_exactness = checks_of("exactness_checks")
test_sessions = checks_of("session_checks")
test_calls = checks_of("forward_call_checks")
test_refusals = checks_of("refusal_checks")
test_statistics = checks_of("router_statistics_checks")
test_layers_and_rows = checks_of("layers_and_rows_checks")
test_both_frameworks = checks_of("both_frameworks_checks")
test_host_waits = checks_of("host_wait_checks")
