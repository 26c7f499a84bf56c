"""The bugs that frameworks met when they wrote routing replay, and the check that looks for each.

Numbers are stable. A bug that an adapter cannot have, because it happens in the engine, on the wire or in a metric,
names what refuses or avoids it in foreroute instead.
"""

from __future__ import annotations

from dataclasses import dataclass

_GITHUB = "https://github.com/"
_CAPTURE = "engine side; foreroute.capture refuses"
_TRACE = "before the adapter; foreroute.trace"


@dataclass(frozen=True)
class KnownBug:
    """A bug that was met in public.

    Attributes:
        id: stable name, its number in the list.
        title: what went wrong.
        seen: where, as an address, or the project when it was read in its code.
        checks: ids of the checks that look for it.
        outside: why no check can, when `checks` is empty.
    """

    id: str
    title: str
    seen: str
    checks: tuple[str, ...] = ()
    outside: str = ""


def _bug(number: str, title: str, seen: str, *checks: str, outside: str = "") -> KnownBug:
    return KnownBug(number, title, _GITHUB + seen if "/" in seen else seen, checks, outside)


def bugs_of(check: str) -> tuple[KnownBug, ...]:
    """The known bugs that a check looks for."""
    return tuple(bug for bug in KNOWN_BUGS if check in bug.checks)


KNOWN_BUGS: tuple[KnownBug, ...] = (
    _bug("1", "batch-first routes read by a sequence-first router", "radixark/miles/pull/3146", "sequence-order"),
    _bug(
        "2",
        "full-sequence returns joined on resume: prefix rows twice",
        "verl-project/verl/pull/6029",
        "resumed-rollout",
    ),
    _bug(
        "3",
        "newest turn replaces rows of older weights",
        "verl-project/verl/issues/6054",
        "resumed-rollout",
        "stale-refused",
    ),
    _bug(
        "4", "a tool loop dropped the routes on return", "verl-project/verl/pull/5368", "empty-session-refused", "gaps"
    ),
    _bug(
        "5",
        "the context-parallel path changed a length check",
        "modelscope/ms-swift/issues/9799",
        outside="cutting per rank is foreroute.layout's, tested against the oracle of this room",
    ),
    _bug(
        "6", "retokenised requests shift rows", "sgl-project/sglang/pull/26555", "token-shift", "other-tokens-refused"
    ),
    _bug(
        "7",
        "preempted requests: old log-probs, new routes",
        "radixark/miles/issues/3277",
        outside=f"{_TRACE}.extended keeps the rows that log-probs came from",
    ),
    _bug("8", "alignment padding shifts recorded rows", "verl-project/verl/pull/7106", "recording-faithful"),
    _bug("9", "a packed record keeps one sequence only", "ISEEKYAN/Megatron-LM/pull/217", "recording-faithful"),
    _bug("10", "left-padded routes, right-padded batch", "google/tunix/pull/2046", "padding-neutral"),
    _bug("11", "all layers in the trace, routed layers in the trainer", "verl-project/verl/pull/5037", "layer-axis"),
    _bug(
        "12",
        "a pipeline offset counted dense layers",
        "verl-project/verl/pull/5452",
        "layer-axis",
        "other-model-refused",
    ),
    _bug("13", "the decoder was built twice: orphans replay", "verl-project/verl/issues/7340", "orphan-routers"),
    _bug("14", "an MTP layer takes decoder layer k's routes", "NVIDIA-NeMo/RL/pull/3903", "mtp-alias"),
    _bug(
        "15",
        "a draft model overwrites the target's layer 0",
        "vllm-project/vllm/pull/48622",
        outside="engine side; mismatch.explain names the layer that was replaced",
    ),
    _bug(
        "16",
        "pipeline stages overwrite each other's layers",
        "vllm-project/vllm/issues/35623",
        outside=f"{_CAPTURE} layers of zeros",
    ),
    _bug("17", "hash-routed first layers shift the order of layers", "verl (VeOmni engine)", "layer-axis"),
    _bug("18", "replay has no effect on latent MoE", "PrimeIntellect-ai/prime-rl/pull/2738", "silent-no-op"),
    _bug("19", "gates gathered from zeroed scores", "ISEEKYAN/Megatron-LM/pull/79", "dense-scores", "router-gradient"),
    _bug(
        "20",
        "the right experts, other weights: normalisation, scale, slot order",
        "radixark/miles/issues/2722",
        "gate-rule",
        "native-bit-equal",
    ),
    _bug("21", "the group top-k replaced instead of the final one", "radixark/miles/issues/2235", "group-limit"),
    _bug("22", "softmax gates on sigmoid families", "twinkle, MarinSkyRL", "gate-rule"),
    _bug(
        "22b",
        "router outputs softmaxed twice in the auxiliary loss",
        "huggingface/transformers/issues/45120",
        outside="a model's auxiliary loss is not touched by replay",
    ),
    _bug(
        "23",
        "forward-only passes leave rows for a later backward",
        "NovaSky-AI/SkyRL/pull/1908",
        "forward-only-residue",
    ),
    _bug(
        "24",
        "recomputation reads the rows of another micro-batch",
        "verl-project/verl/pull/7805",
        "recompute-order",
    ),
    _bug(
        "25",
        "a reference model's build changes the global registry",
        "NVIDIA-NeMo/RL/pull/2590",
        "second-model",
        "model-restored",
    ),
    _bug("26", "a teacher replays the student's routes", "NVIDIA-NeMo/RL/pull/4083", "reference-untouched"),
    _bug(
        "27",
        "backward outside the context recomputes on native routes",
        "NeMo Automodel",
        "backward-outside-session",
    ),
    _bug("28", "two wrappers on one method undo each other", "NVIDIA-NeMo/RL/issues/2963", "exception-safety"),
    _bug("29", "duplicate ids break all-to-all split sizes", "verl-project/verl/pull/4986", "duplicates-refused"),
    _bug("30", "padding of zeros makes expert 0 hot", "THUDM/slime/pull/2308", "padding-hot-spot", "missing-rows"),
    _bug(
        "31",
        "padding counted in the expert bias",
        "SkyRL",
        outside="bias counters are the trainer's; an adapter states its switch and tests it",
    ),
    _bug("32", "a fused top-k bypasses replay", "SkyRL", "fused-bypass"),
    _bug(
        "33",
        "all routes on every rank: out of memory",
        "THUDM/slime/issues/2384",
        outside="traces are read in part and cut by foreroute.layout",
    ),
    _bug(
        "34",
        "route transfer times out",
        "verl-project/verl/issues/6211",
        outside="transport; a trace has 1 or 2 bytes per id",
    ),
    _bug(
        "35",
        "every turn returns all rows again",
        "sgl-project/sglang/pull/24851",
        outside="engine side; capture.Trajectory joins partial returns",
    ),
    _bug("36", "ids overflow one byte above 256 experts", "PrimeIntellect-ai/prime-rl/pull/3051", "wide-ids"),
    _bug("37", "the dtype flips from turn to turn", "NovaSky-AI/SkyRL/pull/2079", "int-width"),
    _bug(
        "38",
        "int32 ids of all layers on every device",
        "NovaSky-AI/SkyRL/issues/1910",
        outside="memory; the benchmark of the adapter measures it",
    ),
    _bug(
        "39",
        "an allowlist drops the routes on one path",
        "NVIDIA-NeMo/RL/issues/3327",
        "empty-session-refused",
    ),
    _bug(
        "40",
        "rows of another request from an external cache",
        "vllm-project/vllm/pull/39568",
        outside=f"{_CAPTURE} what it can see; foreroute doctor names a prefix that is unrelated",
    ),
    _bug(
        "41",
        "physical slots instead of logical experts",
        "vllm-project/vllm/issues/33013",
        "range-refused",
    ),
    _bug(
        "42",
        "zero prompt rows from the wrong cache group",
        "vllm-project/vllm/pull/37118",
        outside=f"{_CAPTURE} rows of zeros",
    ),
    _bug(
        "43",
        "a fused kernel bypasses the capture",
        "flashinfer-ai/flashinfer/issues/3024",
        outside=f"{_CAPTURE} layers that were never filled",
    ),
    _bug(
        "44",
        "capture buffer too small under data parallelism",
        "sgl-project/sglang/issues/23999",
        outside=f"{_CAPTURE} rows that were never filled",
    ),
    _bug("45", "the filler row of the last token counts for expert 0", "verl", "missing-rows", "one-pick"),
    _bug(
        "46",
        "mismatch measured on one rank only",
        "radixark/miles/pull/2684",
        outside="foreroute.mismatch keeps sums and counts, which ranks add",
    ),
    _bug(
        "47",
        "resumed requests lose their routes",
        "Megatron-Core inference",
        outside="engine side; rows stay absent in the trace and are routed by policy",
    ),
    _bug("48", "statistics counted twice under recomputation", "prime-rl", "recorded-once"),
)
"""The publicly known bugs of routing replay, each with the check that finds it or what avoids it outside an adapter."""
