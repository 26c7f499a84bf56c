"""One model on one rank: exactness, sessions, and what is refused. The bodies are in the modules named here."""

from checks import checks_of

test_exactness = checks_of("exactness")
test_sessions = checks_of("sessions")
test_calls = checks_of("calls")
test_checkpoints = checks_of("checkpoints")
test_refusals = checks_of("refusals")
test_statistics = checks_of("statistics_of_routers")
test_layers_and_rows = checks_of("layers_and_rows")
test_gate_weights = checks_of("gate_weights")
