"""The summary rows, against numbers worked out by hand."""

import pytest

from foreroute.report import Sides, read_runs, summary_rows
from report_runs import config, write_run


def side(k3, f2=0.0, cells=0.0, tokens=0.0):
    return {"k3": k3, "f2": f2, "differing_share": cells, "differing_tokens_share": tokens}


def row_of(tmp_path, lines, **settings):
    (row,) = summary_rows(read_runs([write_run(tmp_path / "run", config("r", **settings), lines)]))
    return row


def test_sides_are_averaged_over_the_steps_where_both_were_measured(tmp_path):
    lines = [
        {"step": 0, "mismatch": {"native": side(0.1, 0.2, 0.3, 0.4), "replayed": side(0.01, 0.02, 0.0, 0.0)}},
        {"step": 1, "mismatch": {"native": side(100.0, 1.0, 1.0, 1.0)}},
        {"step": 2, "mismatch": {"native": side(0.3, 0.4, 0.5, 0.6), "replayed": side(0.03, 0.0, 0.1, 0.2)}},
        {"step": 3, "mismatch": {"replayed": side(100.0, 1.0, 1.0, 1.0)}},
    ]
    row = row_of(tmp_path, lines)
    assert (row.steps, row.paired_steps) == (4, 2)
    assert (row.k3.native, row.k3.replayed) == pytest.approx((0.2, 0.02))
    assert (row.f2.native, row.f2.replayed) == pytest.approx((0.3, 0.01))
    assert (row.differing_share.native, row.differing_share.replayed) == pytest.approx((0.4, 0.05))
    assert (row.differing_tokens_share.native, row.differing_tokens_share.replayed) == pytest.approx((0.5, 0.1))


def test_a_run_measured_one_way_shows_that_way_alone(tmp_path):
    lines = [{"step": i, "mismatch": {"native": side(0.1 * (i + 1))}} for i in range(3)]
    row = row_of(tmp_path, lines, routing="R2")
    assert row.k3.native == pytest.approx(0.2)
    assert row.k3.replayed is None
    assert (row.paired_steps, row.trains_with, row.routing) == (0, "native", "R2")


def test_reward_is_averaged_over_ten_steps_at_each_end(tmp_path):
    row = row_of(tmp_path, [{"step": i, "reward_mean": i / 100} for i in range(25)])
    assert row.reward_first == pytest.approx(0.045)  # 0 to 9
    assert row.reward_last == pytest.approx(0.195)  # 15 to 24


def test_a_short_run_uses_the_steps_it_has(tmp_path):
    row = row_of(tmp_path, [{"step": i, "reward_mean": float(i)} for i in range(3)])
    assert row.reward_first == row.reward_last == pytest.approx(1.0)


def test_time_is_the_mean_sum_of_phases(tmp_path):
    lines = [
        {"step": 0, "seconds": {"rollout": 3.0, "update": 1.0}},
        {"step": 1, "seconds": {"rollout": 1.0, "update": 0.5, "measure": 0.5}},
    ]
    row = row_of(tmp_path, lines)
    assert row.seconds_per_step == pytest.approx(3.0)
    assert row.seconds_by_phase == pytest.approx({"rollout": 2.0, "update": 0.75, "measure": 0.25})
    assert sum(row.seconds_by_phase.values()) == pytest.approx(row.seconds_per_step)


def test_what_was_never_recorded_is_none(tmp_path):
    row = row_of(tmp_path, [{"step": 0}])
    assert row.k3 == row.f2 == row.differing_share == row.differing_tokens_share == Sides(None, None)
    assert row.reward_first is row.reward_last is row.seconds_per_step is None
    assert row.seconds_by_phase == {}
