"""The table of what is true of sessions of any framework's models: functions that take a kind of `Subject`."""

from tests.replay import (
    sessions_arguments,
    sessions_gate_weights,
    sessions_open_and_close,
    sessions_recomputation,
    sessions_rows,
    sessions_telemetry,
    sessions_threads,
)

PROPERTIES = {
    name.removeprefix("check_"): check
    for module in (
        sessions_open_and_close,
        sessions_recomputation,
        sessions_threads,
        sessions_arguments,
        sessions_rows,
        sessions_telemetry,
        sessions_gate_weights,
    )
    for name, check in vars(module).items()
    if name.startswith("check_")
}
