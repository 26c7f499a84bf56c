"""What a session is handed: a value of the wrong kind is refused by name, before anything of the model is touched."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from foreroute import RoutingTrace
from foreroute.errors import (
    AttachError,
    BatchMismatchError,
    ConfigError,
    SpecMismatchError,
    StaleTraceError,
    TraceError,
)
from tests.replay.session_subject import batch_of, entering, foreign, prepared, refuses, replayed

BATCH = batch_of()
NOT_VERSIONS = [True, 7.0, "1", [], [None], {1: 2}, torch.tensor(1.0), -2, range(-3, 0)]
VERSIONS = [1, np.int64(1), torch.tensor(1), {0, 1}, np.array([1]), range(10**15)]


def check_values_of_the_wrong_kind_are_refused_by_name_and_leave_no_trace(framework):
    on, trace = prepared(framework)
    on.run(BATCH)
    before = {path: set(vars(module)) for path, module in on.model.named_modules()}
    sessions = {"replay": partial(on.routed.replay, trace), "record": on.routed.record}

    def refused(session, name, given, said):
        refuses(ConfigError, f"{name} is .*expected {said}", entering(sessions[session], **{name: given}))

    for given in NOT_VERSIONS:
        refused("replay", "weight_version", given, "a whole number")
    for given in (True, 1.5, None, [1], -2, 2**31):
        refused("record", "weight_version", given, "a whole number")
    for given in (None, 1, np.array([1, 2])):
        for session, name in (("replay", "telemetry"), ("record", "margins")):
            refused(session, name, given, "True or False")
    for given in (None, [], "x", np.array("native"), True):
        for name in ("missing", "padding", "counts"):
            if (name, given) != ("padding", None):  # which is the framework's own default
                refused("replay", name, given, "one of")
    assert {path: set(vars(module)) for path, module in on.model.named_modules()} == before
    with on.routed.replay(trace, telemetry=np.True_) as session:
        on.run(BATCH)
    assert session.agreement().rows == trace.num_rows


def check_what_is_replayed_is_a_trace_of_this_model(framework):
    on, trace = prepared(framework)
    arrays = trace.expert_ids_NLK, torch.zeros(3)
    for given in (None, "rollout.safetensors", [trace], *arrays, type(trace), on.routed, trace.spec):
        refuses(TraceError, "expected a RoutingTrace", entering(on.routed.replay, given))
    for change in ({"num_experts": 9}, {"top_k": 3}, {"layers": trace.spec.layers[1:]}):
        other = foreign(replace(trace.spec, **change), BATCH)
        refuses(SpecMismatchError, None, entering(on.routed.replay, other))


def check_what_is_attached_is_a_model(framework):
    on = framework.built()
    for given in (None, 1, "Qwen/Qwen3-30B-A3B", [None], type(on.model), on.routed, object()):
        refuses(AttachError, "expected a model", partial(on.attach, given))


def check_one_version_or_several_may_be_expected(framework):
    on, trace = prepared(framework)
    for given in VERSIONS:
        with on.routed.replay(trace, weight_version=given) as session:
            on.run(BATCH)
        assert session.num_forwards == 1


def check_every_routed_row_is_of_an_accepted_version(framework):
    """As of a rollout that went on under new weights; one fresh row does not vouch for the others."""
    on, trace = prepared(framework)
    refused = lambda routes, given, said: refuses(  # noqa: E731
        StaleTraceError, said, entering(on.routed.replay, routes, weight_version=given)
    )
    mixed = replace(trace, weight_versions_N=np.where(np.arange(trace.num_rows) < 5, 1, 2).astype(np.int32))
    for given in (1, 2, [2, 3], range(2, 4)):
        refused(mixed, given, r"weight versions \[1, 2\], expected only")
    replayed(on, mixed, BATCH, weight_version=[1, 2])
    bare = RoutingTrace.unrouted(trace.spec, BATCH.sequences)
    refused(bare, 1, r"weight versions \[\], expected only 1 ")
    # a range reaches below 0 in the first steps, and lets pass no row that states no version
    unstated = trace.with_weight_version(-1)
    refused(unstated, range(-2, 1), r"versions \[-1\], expected only 0 .* --weight-version of foreroute convert")
    replayed(on, unstated, BATCH, weight_version=-1)
    refused(trace, range(2, 10**12 + 1), "expected only those from 2 to 1000000000000 ")


def check_forwards_of_wrong_values_are_refused_in_replays_and_recordings(framework):
    on, trace = prepared(framework)
    for said, run in on.wrong_calls(BATCH).items():
        for session in (on.routed.replay(trace), on.routed.record()):
            with session:
                refuses(BatchMismatchError, said, run)
                on.run(BATCH)


def check_a_batch_of_other_sequences_is_refused(framework):
    on, trace = prepared(framework)
    rolled = BATCH._replace(ids_BT=torch.where(BATCH.real_BT, BATCH.ids_BT.roll(1, 1).clamp_min(1), 0))
    one_off = BATCH._replace(ids_BT=BATCH.ids_BT.clone())
    one_off.ids_BT[2, 3] += 1
    for batch, said in (
        (BATCH.select(0, 1), "2 sequences"),
        (BATCH.select(1, 0, 2), None),
        (rolled, "sequence 0, position 0|row 0 "),
        (one_off, "sequence 2, position 3|row 11 "),
        (batch_of(8, 6, 4), None),
        (batch_of(9, 7, 4), None),
        (batch_of(9, 5, 4), None),
    ):
        refuses(BatchMismatchError, said, lambda batch=batch: replayed(on, trace, batch))
    replayed(on, trace, BATCH)
