"""The schema of metrics.jsonl: what a trainer writes is in it, what is written is read, and its page is up to date."""

import importlib.util
import json
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import numpy as np
import pytest
from pydantic import ValidationError

from foreroute.records import StepRecord, parse_step
from tests.report.report_runs import execution, step_line
from tests.train.small_runs import small_config, trainer_of

ROOT = Path(__file__).parents[2]


def record_in(hint):
    """The record that a value is, or holds by name; or None."""
    if hasattr(hint, "__required_keys__"):
        return hint
    return next((found for each in get_args(hint) if (found := record_in(each))), None)


def undeclared(values, kind=StepRecord, path=""):
    """Keys of a record, and of all in it, that the schema does not have."""
    for key, value in values.items():
        hint = get_type_hints(kind, include_extras=True).get(key)
        if hint is None:
            yield path + key
        elif (inner := record_in(hint)) and value is not None:
            by_name = value if "dict" in str(get_origin(hint)) or "dict[" in str(hint) else {"": value}
            for each in by_name.values():
                yield from undeclared(each, inner, f"{path}{key}.")


def test_a_trainer_writes_nothing_that_is_not_in_the_schema():
    _, record = trainer_of(small_config()).run_step()
    assert list(undeclared(record)) == []
    read = parse_step(json.dumps(record).encode())
    assert read == json.loads(json.dumps(record))
    assert {"mismatch", "importance", "sampling", "device", "expert_load", "margins"} <= record.keys()


@pytest.mark.parametrize("key", ["loss", "reward_std", "weight_version", "staleness", "tokens", "sampling", "kl"])
def test_null_is_not_recorded(key):
    assert parse_step(json.dumps({"step": 0, key: None}).encode())[key] is None


def test_loads_that_no_integer_holds_are_named():
    stage = {name: [[[2**63]]] for name in ("at_home_MLG", "executed_MLG")}
    line = {"step": 0, "execution": {"ranks": 1, "stages": {"recompute": stage}}}
    with pytest.raises(ValidationError, match=r"at_home_MLG\.0\.0\.0\n.*less than 9223372036854775808"):
        parse_step(json.dumps(line).encode())


def test_what_is_written_is_read_and_other_keys_are_passed_over():
    line = step_line(3) | {"execution": execution(3), "kl": float("nan"), "of_tomorrow": 1}
    read = parse_step(json.dumps(line).encode())
    assert np.isnan(read.pop("kl"))
    assert read == {key: value for key, value in line.items() if key not in ("kl", "of_tomorrow")}


@pytest.mark.parametrize("key", ["0", "-4", "four", "4.0", "1" * 10])
def test_expert_load_is_by_a_number_of_ranks(key):
    with pytest.raises(ValidationError, match="expert_load"):
        parse_step(json.dumps({"step": 0, "expert_load": {key: 1.0}}).encode())


def test_its_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("config_reference", ROOT / "make" / "config_reference.py")
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    text = reference.METRICS.read_text(encoding="utf-8")
    assert text == reference.metrics_page(text), "run make config-reference"
