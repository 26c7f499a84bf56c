"""Scripted agents over an engine whose routes are known, and writers of both records of such agents.

The engine is a function: row, log-prob and mask of a position follow from the tokens before it and the weights. The
writers follow the published formats and share no code with the readers.
"""

import base64
import hashlib
import json
import struct
from dataclasses import dataclass, field

import numpy as np
import zstandard

from foreroute import RoutedLayer, RoutingSpec

SPEC = RoutingSpec(8, 2, tuple(RoutedLayer(i) for i in (1, 2, 3)), model="scripted")
LAYERS = 4
"""Decoder layers; layer 0 is dense."""
VOCABULARY = 200


def _digests(tokens, version, size):
    """uint8 [T, size]: of each position, from the tokens up to it."""
    state, found = hashlib.blake2b(bytes([version]), digest_size=size), []
    for token in tokens:
        state.update(struct.pack("<I", token))
        found.append(state.digest())
    return np.frombuffer(b"".join(found), np.uint8).reshape(-1, size)


def routes(tokens, version):
    """int64 [T, L, K] that weights of this version compute for a sequence."""
    shape = (len(tokens), SPEC.num_layers, SPEC.num_experts)
    scores = _digests(tokens, version, shape[1] * shape[2]).reshape(shape)
    return np.argsort(scores, axis=-1, kind="stable")[..., : SPEC.top_k]


def logprobs(tokens, version):
    """float64 [T] of each token after those before it; those of the first are of no use."""
    return _digests(tokens, version, 26)[:, 25] / -64.0


def mask(tokens, position):
    """The ids that the token at a position was drawn from, itself among them."""
    drawn = {int(tokens[position])}
    return sorted(drawn | {(int(tokens[position]) * 7 + 13 * i) % VOCABULARY for i in range(1 + position % 4)})


@dataclass(eq=False)
class Call:
    """One request of an agent: the call that it goes on from, or None, and what came of it."""

    name: str
    parent: "Call | None"
    prompt: list
    generated: list
    version: int
    is_edit: bool = False
    has_routes: bool = True
    at: float = 0.0
    children: list = field(default_factory=list)

    @property
    def tokens(self):
        return self.prompt + self.generated

    @property
    def chain(self):
        """The calls from the first to this one."""
        return [*(self.parent.chain if self.parent else []), self]


def script(seed, calls=7):
    """A rollout of some calls: turns with tools, forks, retries and edits of the history, over updates of the weights.

    Calls are in the order in which they were made.
    """
    rng = np.random.default_rng(seed)

    def text(most):
        return rng.integers(0, VOCABULARY, rng.integers(1, most + 1)).tolist()

    made, version = [], int(rng.integers(0, 3))
    for number in range(int(rng.integers(1, calls + 1))):
        version += int(rng.random() < 0.3)
        move = "start" if not made else rng.choice(["turn", "turn", "fork", "retry", "edit"])
        before = None if move == "start" else made[-1 if move == "turn" else int(rng.integers(len(made)))]
        if move == "start":
            parent, prompt = None, text(9)
        elif move == "retry":
            parent, prompt = before.parent, before.prompt
        elif move == "edit":
            parent, prompt = None, [(before.tokens[0] + 1) % VOCABULARY, *before.tokens[1:], *text(4)]
        else:
            parent, prompt = before, before.tokens + text(5)
        is_edit = move == "edit" or (move == "retry" and before.is_edit)
        call = Call(f"c{number}", parent, prompt, text(6), version, is_edit, rng.random() > 0.1, 100.0 + number)
        if any(call.tokens == other.tokens for other in made):
            continue  # the same text twice is one node of skycap, and another story
        if parent:
            parent.children.append(call)
        made.append(call)
    return made


def all_layers(rows_RLK, dtype):
    """[R, layers, K] with the dense layer 0, as vLLM returns them."""
    return np.concatenate([np.zeros((len(rows_RLK), 1, SPEC.top_k), dtype), rows_RLK.astype(dtype)], axis=1)


# ---- NeMo Gym


def envelope(rows):
    """NeMo RL's text of an array."""
    shape = "x".join(map(str, rows.shape))
    return f"nrlre1:int16:{shape}:" + base64.b64encode(rows.astype("<i2").tobytes()).decode()


GYM_ENTRY = """{"schema_version": 1, "model": "scripted", "output_items": [], "token_item_index": null,
"response_id": null, "continuation_fingerprint": "", "continuation_context_len": 0, "continuation_context_digest": "",
"parent_resolution_reason": "", "fingerprint_version": null, "prefix_requested": false, "prefix_supplied": false}"""
"""What is the same in every line."""


def gym_entry(call, rollout, form=0):
    """The line of a call, as an object; `form` 0 to 4 chooses how routes and prompt are written."""
    tokens, rows = call.tokens, routes(call.tokens, call.version)[:-1]
    if form == 1:
        rows = np.concatenate([rows, np.full((1, *rows.shape[1:]), -1)])
    if form == 4:
        rows = np.concatenate([rows, rows[:1]])  # what some engine has there: the last token was never an input
    is_delta = form == 3 and call.parent is not None
    has_rows = call.has_routes and len(tokens) >= 2
    packed = struct.pack(f">BQ{len(tokens)}Q", 1, len(tokens), *tokens)
    return json.loads(GYM_ENTRY) | {
        "rollout_id": rollout,
        "model_call_id": call.name,
        "prompt_token_ids": call.prompt[len(call.parent.tokens) :] if is_delta else call.prompt,
        "prompt_is_delta": is_delta,
        "generation_token_ids": call.generated,
        "generation_log_probs": logprobs(tokens, call.version)[len(call.prompt) :].tolist(),
        "routed_experts": (rows.tolist() if form == 2 else envelope(rows)) if has_rows else None,
        "created_at": call.at,
        "parent_call_id": call.parent.name if call.parent else None,
        "cum_len": len(tokens),
        "digest": hashlib.sha256(b"nemo-gym-tokens" + packed).hexdigest(),
        "parent_resolution": "resolved" if call.parent else "unresolved" if call.is_edit else "root",
    }


def write_gym(folder, entries, rollout="0-0", **state):
    """The file of a rollout's calls, with its state beside it; `state` replaces what stands there."""
    lines = [json.dumps(entry, sort_keys=True, separators=(",", ":")).encode() for entry in entries]
    path = folder / f"{rollout}.tokens.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    digests = [hashlib.sha256(line).hexdigest() for line in lines]
    index = dict(zip([entry["model_call_id"] for entry in entries], digests, strict=True))
    known = {"frozen": True, "retired": False, "incomplete": False, "snapshot_id": "5f", "version": len(lines) + 1}
    known |= {"entry_digests": index, "indexed_size": path.stat().st_size, **state}
    path.with_name(f"{rollout}.tokens.state.json").write_text(json.dumps(known))
    path.with_name(f"{rollout}.tokens.intents").write_text("".join(f"{name}\n" for name in index))
    return path


# ---- skycap


@dataclass
class SkycapNode:
    """A message of the graph, and of each of its rows the weights that computed it; None for a copy."""

    parent: int | None
    author: str
    tokens: list
    sampled_start: int | None = None
    logprobs: list | None = None
    rows: np.ndarray | None = None
    row_versions: list = field(default_factory=list)
    masks: list | None = None
    media: list = field(default_factory=list)
    calls: list = field(default_factory=list)


SKYCAP = """{"format_version": 1, "id": "tr_1", "status": "finished", "ended": true, "meta": {}, "failures": [],
"capture": {"mode": "tokens", "engine": "vllm", "logprobs_mode": "processed_logprobs"},
"annotations": {"reward": 1.0}}"""
"""What is the same in every document."""


class Skycap:
    """A graph of messages that calls are added to, in the order in which they were made."""

    def __init__(self, made, *, masks=False, dtype=np.uint8):
        self.nodes, self.node_of, self.dtype, self.masks = [], {}, dtype, masks
        for call in made:
            self.commit(call)

    def commit(self, call):
        """Add what a call brings: messages of the client, and the reply with a token of scaffold before it."""
        tokens, start = call.tokens, len(call.parent.tokens) if call.parent else 0
        rows = all_layers(routes(tokens, call.version)[:-1], self.dtype) if call.has_routes else None
        above = self.node_of[call.parent.name] if call.parent else None
        if rows is not None and above is not None and (last := self.nodes[above]).rows is not None:
            last.rows, last.row_versions[-1] = np.concatenate([last.rows[:-1], rows[start - 1 : start]]), call.version
        cut = len(call.prompt) - 1  # the last token of the prompt opens the reply
        for first, end in ((start, max(start, cut - 2)), (max(start, cut - 2), cut)):
            if end > first:
                above = self._client(above, tokens[first:end], None if rows is None else rows[first:end], call.version)
        cut = max(cut, start)
        own = None if rows is None else rows[cut:]
        if own is not None:
            own = np.concatenate([own, own[-1:]])
        scaffold = len(call.prompt) - cut
        sampling = {"temperature": 1.0, **({"top_k": 5} if self.masks else {})}
        said = {"t_start": call.at, "t_end": call.at + 0.5, "model": "scripted", "sampling": sampling, "usage": None}
        said |= {"finish_reason": "stop", "tools": None}
        said |= {"bridged": True if call.parent else False if call.is_edit else None}
        reply = SkycapNode(above, "model", tokens[cut:], scaffold, rows=own, calls=[said])
        reply.logprobs = [0.0] * scaffold + logprobs(tokens, call.version)[len(call.prompt) :].tolist()
        reply.row_versions = [] if own is None else [call.version] * (len(own) - 1) + [None]
        reply.masks = [mask(tokens, p) for p in range(len(call.prompt), len(tokens))] if self.masks else None
        self.nodes.append(reply)
        self.node_of[call.name] = len(self.nodes) - 1

    def _client(self, above, tokens, rows, version):
        for number, node in enumerate(self.nodes):
            if (node.parent, node.author, node.tokens) == (above, "client", tokens):
                return number
        versions = [] if rows is None else [version] * len(rows)
        self.nodes.append(SkycapNode(above, "client", tokens, rows=rows, row_versions=versions))
        return len(self.nodes) - 1

    def path(self, leaf):
        """Numbers of the nodes from a root to a leaf."""
        above = self.nodes[leaf].parent
        return [*(self.path(above) if above is not None else []), leaf]

    def samples(self):
        """By the rule "all": each reply is a target of the first path that it is on."""
        trained, rows = set(), []
        for leaf in sorted(set(range(len(self.nodes))) - {node.parent for node in self.nodes}):
            targets = [i for i in self.path(leaf) if self.nodes[i].author == "model" and i not in trained]
            trained |= set(targets)
            rows.append({"leaf": leaf, "targets": targets})
        return {"paths": "all", "rows": rows}

    def arrays(self):
        ids = np.array([t for node in self.nodes for t in node.tokens], np.int32)
        probs = [p for n in self.nodes for p in (n.logprobs or [float("nan")] * len(n.tokens))]
        tokens = {"token_ids": ids, "logprobs": np.array(probs, np.float64)}
        found = {"tokens": tokens | {"text_offsets": np.zeros(len(ids), np.int32), "text": np.zeros(0, np.uint8)}}
        rows = [node.rows for node in self.nodes if node.rows is not None]
        if rows:
            found["experts"] = {"routed_experts": np.concatenate(rows)}
        sets = [each for node in self.nodes for each in node.masks or []]
        if sets:
            offsets = np.append(0, np.cumsum([len(each) for each in sets])).astype(np.int64)
            found["sampling_mask"] = {"ids": np.array([i for s in sets for i in s], np.int32), "offsets": offsets}
        return found

    def document(self):
        at, entries = {"tokens": 0, "experts": 0, "mask": 0}, []
        for number, node in enumerate(self.nodes):
            rows, masks = (0 if each is None else len(each) for each in (node.rows, node.masks))
            role = "assistant" if node.author == "model" else "user"
            entry = {"id": number, "parent": node.parent, "author": node.author, "role": role, "calls": node.calls}
            tokens = {"offset": at["tokens"], "length": len(node.tokens), "sampled_start": node.sampled_start}
            tokens |= {"has_logprobs": node.logprobs is not None, "text_offset": None, "text_bytes": 0}
            tokens |= {"experts_offset": None if node.rows is None else at["experts"], "experts_rows": rows}
            tokens |= {"mask_offset": None if node.masks is None else at["mask"], "mask_rows": masks}
            tokens |= {"media": node.media}
            entries.append({**entry, "message": {"content": ""}, "shadowed_by": None, "tokens": tokens})
            for name, size in (("tokens", len(node.tokens)), ("experts", rows), ("mask", masks)):
                at[name] += size
        return {**json.loads(SKYCAP), "samples": self.samples(), "nodes": entries}


def side_file(arrays):
    """The bytes of a side file, and what the document says of them."""
    content, places = b"", {}
    for name, array in arrays.items():
        content += bytes(-len(content) % 8)
        places[name] = {"dtype": array.dtype.name, "shape": list(array.shape), "offset": len(content)}
        content += np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    return content, places


def compressed(content, *, states_size=True):
    """One zstd frame, with or without the size of its content."""
    return zstandard.ZstdCompressor(level=3, write_content_size=states_size).compress(content)


def write_skycap(folder, document, arrays, *, states_size=True):
    """All files of a record."""
    sidecars = {}
    for sidecar, each in arrays.items():
        content, places = side_file(each)
        name = f"{document['id']}.{sidecar}.zst"
        (folder / name).write_bytes(compressed(content, states_size=states_size))
        sidecars[sidecar] = {"file": name, "arrays": places}
    path = folder / f"{document['id']}.json.zst"
    text = json.dumps({"sidecars": sidecars, **document}).encode()
    path.write_bytes(compressed(text, states_size=states_size))
    return path


def content(frame):
    """What a frame of this module holds."""
    return zstandard.ZstdDecompressor().decompressobj().decompress(frame)
