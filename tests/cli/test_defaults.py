"""One default everywhere: on the command line, in Python, in the trainer and in the simulator."""

import inspect
from dataclasses import MISSING, fields

import pytest
from typer.main import get_command

from foreroute.capture import decode
from foreroute.cli.doctor import run_doctor
from foreroute.cli.main import app
from foreroute.cli.plan_inputs import DEFAULT_BUDGET, read_step
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.plan import PlanOptions
from foreroute.simulate.methods import PRESETS
from foreroute.train import TrainConfig, parse_config, train

SHOWN_OTHERWISE = {
    "shared_slots": ("slots", {False: "layer", True: "shared"}),
}
"""Options of the command line that have another form in Python."""


def of_command(name):
    """Defaults of a verb, by the name of the option."""
    return {
        parameter.name: parameter.default
        for parameter in get_command(app).commands[name].params
        if not parameter.required and not _is_list(parameter)
    }


def _is_list(parameter):
    """None or empty, which is for the verb to tell from a list."""
    return parameter.nargs == -1 or getattr(parameter, "multiple", False)


def of_dataclass(kind):
    return {field.name: field.default for field in fields(kind) if field.default is not MISSING}


def of_function(function):
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


@pytest.mark.parametrize(
    ("verb", "python", "shared"),
    [
        ("plan", of_dataclass(PlanOptions), 6),
        ("plan", of_function(read_step), 3),
        ("convert", of_function(decode), 2),
        ("doctor", of_function(run_doctor), 7),
        ("train", of_function(train), 1),
    ],
)
def test_an_option_of_the_command_line_has_the_default_of_its_argument(verb, python, shared):
    options = of_command(verb)
    for name, (argument, values) in SHOWN_OTHERWISE.items():
        if name in options:
            options[argument] = values[options.pop(name)]
    both = options.keys() & python.keys()
    assert {name: options[name] for name in both} == {name: python[name] for name in both}
    assert len(both) == shared, both


def test_the_trainer_and_the_simulator_plan_by_the_same_defaults():
    config: TrainConfig = parse_config({"name": "defaults"}, source="test")
    default = PlanOptions()
    for name in ("tolerance", "slots", "home_moves", "traffic", "pay_off"):
        assert getattr(config.parallel, name) == getattr(default, name), name
    transfers = TransferOptions()
    for name in ("paths", "prefetch", "timeout_s"):
        assert getattr(config.parallel, name) == getattr(transfers, name), name
    assert config.parallel.shared_memory == str(transfers.directory)
    assert PRESETS["ours"].options == default
    assert DEFAULT_BUDGET == 16_384
