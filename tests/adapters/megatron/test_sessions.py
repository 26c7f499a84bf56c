"""What sessions of Megatron-Core have beside those of others: routes that are cut, wrapped steps, its own replay."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from foreroute.adapters import megatron
from foreroute.errors import AttachError, BatchMismatchError, ConfigError, ReplayError, StaleTraceError, TraceError
from foreroute.layout import pad
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.one_rank import MegatronSubject, model
from tests.replay.session_subject import (
    batch_of,
    entering,
    foreign,
    recorded,
    refuses,
    replayed,
    require_followed,
    step,
)

BATCH = batch_of(9, 9)


def prepared():
    on = MegatronSubject(model())
    trace = foreign(on.routed.spec, BATCH)
    return on, trace, pad(trace.lengths, side="right", order="sbhd")


@on_ranks(1)
def test_routes_that_are_cut_keep_what_they_were_cut_with():
    on, trace, layout = prepared()
    stale = trace.with_weight_version(3)
    placed = on.routed.shard(stale, layout, weight_version=3)
    refuses(StaleTraceError, r"\[3\]", lambda: on.routed.shard(stale, layout, weight_version=range(4, 6)))
    for other in ({"missing": "native"}, {"missing": "drop"}, {"padding": "native"}):
        refuses(ConfigError, r"give it.*routed\.shard", entering(on.routed.replay, placed, **other))
        replayed(on, on.routed.shard(stale, layout, **other), BATCH, **other)
    for accepted in (3, [0, 3]):
        replayed(on, placed, BATCH, weight_version=accepted)
    stated = r"\[3\], expected only 4, 5 "
    refuses(StaleTraceError, stated, entering(on.routed.replay, placed, weight_version=range(4, 6)))
    refuses(BatchMismatchError, "cut to a rank already", entering(on.routed.replay, placed, layout))


@on_ranks(1)
def test_megatrons_own_replay_may_not_be_active_and_is_left_alone():
    on, trace, _ = prepared()
    instances = RouterReplay.global_router_replay_instances
    before = [dict(vars(each)) for each in instances]
    assert before, "the model was built without router replay; the check shows nothing"
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    refuses(ReplayError, r"router replay.*active", lambda: replayed(on, trace, BATCH))
    refuses(ReplayError, r"router replay.*active", lambda: megatron.attach(on.model))
    RouterReplay.clear_global_router_replay_action()
    step(on, trace, BATCH)
    assert [dict(vars(each)) for each in instances] == before


class Step:
    """With attributes of its own, which the wrapper of it has too."""

    def __init__(self, on):
        self.on, self._step, self._telemetry = on, 0, 0

    def __call__(self, batches, model):
        return self.on.run(next(batches)["ids"])


@on_ranks(1)
def test_a_wrapped_step_tells_what_went_wrong():
    on = MegatronSubject(model())
    wrapped = torch.nn.Sequential(torch.nn.Sequential(on.model))
    on.routed = megatron.attach(wrapped)
    trace, replaying = foreign(on.routed.spec, BATCH), on.routed.replaying
    batch, run = {"ids": BATCH, "routes": trace}, replaying(Step(on))
    listed, misspelled = {"ids": BATCH, "routes": []}, {"ids": BATCH, "route": trace}
    forgets = replaying(lambda given, _: next(given))
    late = replaying(lambda given, _: on.run(BATCH))
    for error, said, wrong, batches, called in (
        (BatchMismatchError, r"no data.*iterator", run, None, on.model),
        (TraceError, r"replayed.*a list", run, [listed], on.model),
        (BatchMismatchError, r"none.*'routes'", run, [misspelled], on.model),
        (ReplayError, r"no forward.*attached model", forgets, [batch], on.model),
        (ReplayError, "took 0 batches", late, [batch], on.model),
        (AttachError, "another model", run, [batch], model(seed=1)),
    ):
        refuses(error, said, partial(wrong, batches and iter(batches), called))
    native = recorded(on, BATCH)
    for given, expected in ((trace, trace), (None, native)):  # None says in so many words: natively
        with on.given() as seen:
            run(iter([batch | {"routes": given}]), wrapped)
        require_followed(seen, expected, BATCH)
    with on.routed.replay(trace):
        on.run(BATCH)
        refuses(ReplayError, "already replaying", lambda: run(iter([batch]), on.model))
        with ThreadPoolExecutor(1, thread_name_prefix="other") as other_thread:
            refuses(ReplayError, "thread 'other_0'", other_thread.submit(run, iter([batch]), on.model).result)
