"""Configurations of docs/train.md: on its prompts and its reward, and its objectives on chains."""

import re
import tomllib
from pathlib import Path

import pytest

from foreroute.train import parse_config, train
from tests.train.small_runs import merged, records
from tests.train.tiny_model import write_model

PAGE = (Path(__file__).parents[2] / "docs" / "train.md").read_text(encoding="utf-8")
BASE, *VARIATIONS = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    write_model(folder / "model")
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


@pytest.mark.slow
@pytest.mark.parametrize("block", VARIATIONS, ids=lambda block: block.strip().splitlines()[1])
def test_a_variation_trains(place, block, monkeypatch, tmp_path):
    monkeypatch.chdir(place)
    given, values = tomllib.loads(block), merged(tomllib.loads(BASE), {"rl": {"steps": 1}})
    if "tokenizer" in given.get("model", {}):  # of a new model, in place of the folder
        del values["model"]
    values = merged(values, given)
    run = train(parse_config(values, source="the page"), tmp_path / "run")
    assert len(records(run.path)) == 1
