"""Every block of docs/train.md: its configurations are run, on its prompts and its reward."""

import re
import tomllib
from pathlib import Path

import pytest

from foreroute.train import parse_config, train
from tests.train.small_runs import records
from tests.train.tiny_model import write_model, write_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "train.md").read_text(encoding="utf-8")
BASE, *VARIATIONS = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The reader's folder."""
    folder = tmp_path_factory.mktemp("page")
    write_model(folder / "model")
    write_tokenizer(folder / "model")
    (data,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (folder / "train.jsonl").write_text(2 * data, encoding="utf-8")
    for name, source in re.findall(r"<!--- file: (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL):
        (folder / name).write_text(source, encoding="utf-8")
    assert {path.name for path in folder.iterdir()} == {"model", "train.jsonl", "mine.py"}
    return folder


def test_the_whole_configuration_trains(place, monkeypatch):
    monkeypatch.chdir(place)
    run = train(parse_config(tomllib.loads(BASE), source="the page"), place / "runs" / "sums")
    assert len(records(run.path)) == 3
    assert {path.name for path in run.path.iterdir()} == set(re.findall(r"\n- `([\w.]+)/?`: ", PAGE)) - {"report.html"}


@pytest.mark.parametrize("block", VARIATIONS, ids=lambda block: block.strip().splitlines()[1])
def test_a_variation_trains(place, block, monkeypatch, tmp_path):
    monkeypatch.chdir(place)
    values = tomllib.loads(BASE)
    values["rl"]["steps"] = 1
    for name, section in tomllib.loads(block).items():
        kept = {} if "tokenizer" in section else values.get(name, {})
        values[name] = {**kept, **section}
    run = train(parse_config(values, source="the page"), tmp_path / "run")
    assert len(records(run.path)) == 1
