"""Layouts spelled out by hand: lists and loops from their definitions, slow and obviously right, nothing of `layout/`.

A cell is what a router row sees: (sequence, position), or None for padding. A lane is a list of cells, a sequence as it
is padded; a batch is a list of lanes.
"""


def packed_lanes(lengths, sequences, align):
    """THD: every sequence, padded on the right until its length is a multiple of `align`."""
    lanes = []
    for s in sequences:
        lane = [(s, position) for position in range(lengths[s])]
        while len(lane) % align != 0:
            lane.append(None)
        lanes.append(lane)
    return lanes


def padded_lanes(lengths, sequences, side, width):
    """A grid: every sequence, padded on one side to `width` cells."""
    lanes = []
    for s in sequences:
        lane = [(s, position) for position in range(lengths[s])]
        padding = [None] * (width - len(lane))
        lanes.append(padding + lane if side == "left" else lane + padding)
    return lanes


def tail_to_multiple(lane, multiple):
    """The cells of padding that bring a lane to a multiple."""
    tail = []
    while (len(lane) + len(tail)) % multiple != 0:
        tail.append(None)
    return tail


def context_share(lane, ranks, rank):
    """The chunks of one lane that a context-parallel rank holds: one from either end."""
    if ranks == 1:
        return lane
    chunks = _chunks(lane, 2 * ranks)
    return chunks[rank] + chunks[2 * ranks - 1 - rank]


def sequence_share(lane, ranks, rank):
    """The chunk of a line that a sequence-parallel rank holds."""
    return _chunks(lane, ranks)[rank]


def one_line(lanes):
    """Lanes one after the other: THD, and BSHD flattened batch first."""
    return [cell for lane in lanes for cell in lane]


def sequence_first(lanes):
    """SBHD flattened: the first cell of every lane, then the second of every lane, and so on."""
    width = len(lanes[0]) if lanes else 0
    return [lane[t] for t in range(width) for lane in lanes]


def greedy_padded_batches(lengths, budget):
    """Sequences in order, each into the micro-batch at hand if it fits and into a new one if not."""
    batches = []
    for s in range(len(lengths)):
        if batches:
            tried = [*batches[-1], s]
            if len(tried) * max(lengths[i] for i in tried) <= budget:
                batches[-1] = tried
                continue
        batches.append([s])
    return batches


def dealt(lengths, costs, budget, places):
    """The place of each sequence, longest first, to the cheapest place with room, by cost or else by tokens."""
    for weights in (costs, lengths):
        held, filled, place_of = [0] * places, [0.0] * places, [None] * len(lengths)
        for s in sorted(range(len(lengths)), key=lambda s: (-lengths[s], s)):
            with_room = [p for p in range(places) if held[p] + lengths[s] <= budget]
            if not with_room:
                break
            place_of[s] = min(with_room, key=lambda p: (filled[p], p))
            held[place_of[s]] += lengths[s]
            filled[place_of[s]] += weights[s]
        else:
            return place_of
    return None


def _chunks(lane, count):
    assert len(lane) % count == 0, f"a lane of {len(lane)} cells has no {count} equal chunks"
    size = len(lane) // count
    return [lane[i * size : (i + 1) * size] for i in range(count)]
