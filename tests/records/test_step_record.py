"""The schema of metrics.jsonl: what a trainer writes is in it, what is written is read, and its page is up to date."""

import json
import math

import pytest

from foreroute.errors import RunFolderError
from foreroute.files.json_form import to_json
from foreroute.records import Alarm, StepRecord
from foreroute.records.runs import parse_step
from foreroute.records.step_record import DeviceRecord, MismatchRecord
from tests.train.small_runs import small_config, trainer_of


def line_of(record):
    return json.dumps(record).encode()


def test_what_a_trainer_writes_is_read_whole():
    """A key that is not in the schema would be refused."""
    _, record = trainer_of(small_config()).run_step()
    line = line_of(to_json(record))
    assert parse_step(line) == record
    assert {"mismatch", "importance", "sampling", "device", "expert_load", "margins_LB"} <= json.loads(line).keys()


def test_a_record_is_written_by_its_keys_and_read_again():
    sides = {"native": MismatchRecord(k3=0.5, f2=0.1, f1_5=0.2, differing_share=0.3, differing_tokens_share=1.0)}
    alarms = [Alarm(kind="f2", since=2, value=0.2, threshold=0.1)]
    device = DeviceRecord(kind="cpu", name="x86")
    record = StepRecord(step=3, loss=math.inf, mismatch=sides, alarms=alarms, device=device)
    written = to_json(record)
    assert written["mismatch"]["native"]["f1.5"] == 0.2
    assert written["device"] == {"kind": "cpu", "name": "x86"}
    assert not {"margins_LB", "execution"} & written.keys(), "what was not recorded has no key"
    assert parse_step(line_of(written)) == record


def test_null_is_not_recorded_and_numbers_are_read_as_they_are():
    for key in ("loss", "weight_version", "sampling"):
        assert getattr(parse_step(line_of({"step": 0, key: None})), key) is None
    for value in (math.inf, -math.inf, 0, 1e-320):
        assert parse_step(line_of({"step": 0, "loss": value})).loss == value
    assert math.isnan(parse_step(line_of({"step": 0, "loss": math.nan})).loss)


HUGE = {name: [[[2**63]]] for name in ("at_home_MLG", "executed_MLG")}
EXECUTED = {"ranks": 1, "max_over_mean": {"at_home": 1.0, "executed": 1.0}, "passes": {"recompute": HUGE}}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"of_tomorrow": 1}, "it has the unknown keys of_tomorrow; expected no other than alarms, "),
        ({"step": True}, "step is True; expected an integer"),
        ({"execution": EXECUTED}, r".*executed_MLG and at_home_MLG of pass recompute need .* numbers below 2\^63"),
        ({"tokens": 2**63}, "tokens is 9223372036854775808; expected an integer of 64 bits"),
        ({"loss": -(10**400)}, "loss is -1000000.*; expected a number"),
        ({"live_agreement": [1.0, None]}, r"live_agreement\.1 is None; expected a number"),
        ({"trained_with": "sideways"}, "trained_with is 'sideways'; expected one of native, replayed"),
        ({"device": {"kind": "\ud800", "name": ""}}, r"device\.kind is .*; expected text"),
    ],
)
def test_what_no_trainer_writes_is_refused_with_its_place(values, reason):
    with pytest.raises(RunFolderError, match=f"^{reason}"):
        parse_step(line_of({"step": 0} | values))
