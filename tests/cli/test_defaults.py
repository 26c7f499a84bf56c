"""One default everywhere: on the command line, in Python, in files, and in docs/train.md and simulate.md."""

from pathlib import Path

from typer.main import get_command

from foreroute.cli.main import app
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


def test_the_keys_of_the_pages_are_up_to_date():
    for page, text in config_reference.pages().items():
        assert page.read_text(encoding="utf-8") == text, f"{page.name}: run make config-reference"
