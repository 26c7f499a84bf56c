"""One default everywhere: on the command line, in Python, in files, and in docs/train.md and simulate.md."""

import inspect
from dataclasses import asdict

import pytest
from typer.main import get_command

from foreroute.capture import decode
from foreroute.cli.doctor import run_doctor
from foreroute.cli.main import app
from foreroute.cli.plan_inputs import read_step
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.files.config_file import Section
from foreroute.plan import PlanOptions
from foreroute.simulate.methods import PRESETS
from foreroute.simulate.steps import TOKEN_BUDGET
from foreroute.train import TrainConfig, parse_config, train
from make import config_reference


def of_command(name):
    """Defaults of a verb, by the name of the option."""
    return {
        parameter.name: parameter.default
        for parameter in get_command(app).commands[name].params
        # None or empty lists are for the verb to tell apart
        if not parameter.required and parameter.nargs != -1 and not getattr(parameter, "multiple", False)
    }


def of_function(function):
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


@pytest.mark.parametrize(
    ("verb", "python", "shared"),
    [
        ("plan", asdict(PlanOptions()), 6),
        ("plan", of_function(read_step), 3),
        ("convert", of_function(decode), 2),
        ("doctor", of_function(run_doctor), 7),
        ("train", of_function(train), 1),
    ],
)
def test_an_option_of_the_command_line_has_the_default_of_its_argument(verb, python, shared):
    options = of_command(verb)
    if "shared_slots" in options:  # which is another word in Python
        options["slots"] = {False: "layer", True: "shared"}[options.pop("shared_slots")]
    both = options.keys() & python.keys()
    assert {name: options[name] for name in both} == {name: python[name] for name in both}
    assert len(both) == shared, both


def test_the_trainer_and_the_simulator_plan_by_the_same_defaults():
    config: TrainConfig = parse_config({"name": "defaults"}, source="test")
    default = PlanOptions()
    for name in ("tolerance", "slots", "home_moves", "traffic", "pay_off"):
        assert getattr(config.parallel, name) == getattr(default, name), name
    transfers = TransferOptions()
    for name in ("paths", "prefetch"):
        assert getattr(config.parallel, name) == getattr(transfers, name), name
    assert config.parallel.shared_memory == str(transfers.shared_memory)
    assert PRESETS["ours"].method.options == default
    assert TOKEN_BUDGET == 16_384


class Silent(Section):
    """A key says nothing."""

    shown: int = 1
    """Something."""
    silent: int = 1


def test_the_keys_of_the_pages_are_up_to_date():
    for page, text in config_reference.pages().items():
        assert page.read_text(encoding="utf-8") == text, f"{page.name}: run make config-reference"


def test_a_key_without_a_text_is_refused():
    with pytest.raises(SystemExit, match=r"Silent\.silent says nowhere what it means"):
        list(config_reference.tables(Silent, "silent"))
