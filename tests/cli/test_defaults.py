"""One default everywhere: on the command line, in Python, in files, and in docs/train.md and simulate.md."""

from pathlib import Path

from typer.main import get_command

from foreroute.cli.main import app
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.plan import PlanOptions
from foreroute.simulate.methods import PRESETS
from foreroute.simulate.steps import TOKEN_BUDGET
from foreroute.train import TrainConfig, parse_config
from make import config_reference


def test_options_are_few_and_each_is_given_in_a_test():
    """What an option does, the test that gives it sees; one that no test gives to its verb is one too many."""
    files = [(path.name, path.read_text(encoding="utf-8")) for path in Path(__file__).parents[1].rglob("*.py")]
    # two empty lines are between tests, and a file may be named after its verb
    parts = [name + part for name, text in files for part in text.split("\n\n\n") if "--" in part]
    root = get_command(app)
    flags = [
        (name, [*parameter.opts, *parameter.secondary_opts])
        for name, command in {"": root, **root.commands}.items()
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name != "help"
    ]
    assert len(flags) <= 35
    given = {(verb, *names) for verb, names in flags if any(verb in p and any(n in p for n in names) for p in parts)}
    assert {(verb, *names) for verb, names in flags} == given


def test_the_trainer_and_the_simulator_plan_by_the_same_defaults():
    config: TrainConfig = parse_config({"name": "defaults"}, source="test")
    default = PlanOptions()
    assert config.parallel.plan == default
    transfers = TransferOptions()
    for name in ("paths", "prefetch"):
        assert getattr(config.parallel, name) == getattr(transfers, name), name
    assert config.parallel.shared_memory == str(transfers.shared_memory)
    assert PRESETS["ours"].method.options == default
    assert TOKEN_BUDGET == 16_384


def test_the_keys_of_the_pages_are_up_to_date():
    for page, text in config_reference.pages().items():
        assert page.read_text(encoding="utf-8") == text, f"{page.name}: run make config-reference"
