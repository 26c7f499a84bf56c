"""Cells by the compiled cost model, and by it once more, slowly and from its description: the oracle."""

import math

import numpy as np

from foreroute.costs.pricing import step_parts
from foreroute.plan.hosts import Hosts

PASSES = {"recompute": [["f"]], "update": [["f"], ["f", "b"]]}
GEMM, WEIGHTS, MEMORY, CORE = {"f": 1, "b": 2}, {"f": 1, "b": 4}, {"f": 1, "b": 1.6}, {"f": 1, "b": 3}
"""Of attention; that of experts backward is what the hardware says."""


def price_cell(cell, counts_GE, topology, costs, slots="layer"):
    """Seconds of a cell as compiled: [2 passes, 5 parts]."""
    return step_parts(Hosts.of_cells(cell.home_E[None], [cell]), counts_GE[None, None], topology, costs, slots)


def price_plan(plan, counts_MLGE, costs, slots="layer"):
    """Seconds of each cell, as compiled: [M, L]."""
    seconds_ML = np.empty(plan.shape[:2])
    for place in np.ndindex(seconds_ML.shape):
        seconds_ML[place] = price_cell(plan.cell(*place), counts_MLGE[place], plan.topology, costs, slots).sum()
    return seconds_ML


def oracle(cell, counts_GE, topology, costs, slots="layer"):
    """Seconds of a cell by pass and part, and rows of one dispatch over (link, direction, rank)."""
    left_GE, hosts, pairs_GG = counts_GE.astype(int), [], np.zeros((topology.num_ranks,) * 2, int)
    for expert, rank, _, fetched, tokens_G in zip(*cell[1:], strict=True):
        hosts.append((int(expert), int(rank), int(tokens_G.sum()), bool(fetched)))
        left_GE[:, expert] -= tokens_G
        pairs_GG[:, rank] += tokens_G
    for expert, home in enumerate(cell.home_E.tolist()):
        hosts.append((expert, home, int(left_GE[:, expert].sum()), False))
        pairs_GG[:, home] += left_GE[:, expert]
    if costs.dispatcher == "copies":
        rows = copied_rows(pairs_GG, topology.ranks_per_node)
    else:
        rows = deduplicated_rows(pairs_GG, costs.model.top_k, topology.ranks_per_node)
    tokens_G = counts_GE.sum(axis=1) / costs.model.top_k
    squares_G = tokens_G * costs.sequence_tokens
    return seconds(hosts, cell.home_E, rows, tokens_G, squares_G, topology, costs, slots), rows


def copied_rows(pairs_GG, ranks_per_node):
    """Every assignment by itself."""
    rows = {}
    for (source, target), pairs in np.ndenumerate(pairs_GG):
        link = "node" if source // ranks_per_node == target // ranks_per_node else "cluster"
        for direction, end in (("out", source), ("in", target)) if source != target else ():
            rows[link, direction, end] = rows.get((link, direction, end), 0) + int(pairs)
    return rows


def deduplicated_rows(pairs_GG, top_k, ranks_per_node):
    """A token once per node and once per rank there: in expectation, when its picks are independent draws."""
    rows = {}
    ranks = range(len(pairs_GG))
    for g in ranks:
        total = sum(int(n) for n in pairs_GG[g])
        for node in {q // ranks_per_node for q in ranks} if total else ():
            inside = [q for q in ranks if q // ranks_per_node == node]
            place = g
            if node != g // ranks_per_node:
                place = node * ranks_per_node + g % ranks_per_node
                reached = total / top_k * (1 - (1 - sum(int(pairs_GG[g][q]) for q in inside) / total) ** top_k)
                for key in (("cluster", "out", g), ("cluster", "in", place)):
                    rows[key] = rows.get(key, 0) + reached
            for q in inside:
                if q != place:
                    reached = total / top_k * (1 - (1 - int(pairs_GG[g][q]) / total) ** top_k)
                    for key in (("node", "out", place), ("node", "in", q)):
                        rows[key] = rows.get(key, 0) + reached
    return rows


def seconds(hosts, home_E, rows, tokens_G, squares_G, topology, costs, slots="layer"):
    """Seconds by pass and part. `hosts` are (expert, rank, tokens, fetched); a slot that is kept is filled once."""
    model, machine, links = costs.model, costs.hardware, topology.links
    width = topology.ranks_per_node
    bandwidth = {"node": links.node_bytes_per_s, "cluster": links.cluster_bytes_per_s}
    leg = links.cluster_latency_s if topology.num_ranks > width else links.node_latency_s
    leg += max((n * model.hidden * model.activation_bytes / bandwidth[key[0]] for key, n in rows.items()), default=0)
    parameters = 3 * model.hidden * model.intermediate
    result = {}
    moves = [
        (int(home_E[expert]), rank, costs.paths if rank // width == int(home_E[expert]) // width else "direct")
        for expert, rank, _, fetched in hosts
        if fetched and rank != int(home_E[expert])
    ]
    for pass_name, sweeps in PASSES.items():
        parts = dict.fromkeys(("attention", "all_to_all", "experts", "fixed", "exposed"), 0.0)
        filling = sweeps if slots == "shared" else sweeps[:1]
        for place, sweep in enumerate(sweeps):
            here = dict.fromkeys(parts, 0.0)
            for one in sweep:
                here["attention"] += max(
                    GEMM[one] * 2 * model.dense_parameters * t / machine.gemm_flops_per_s
                    + CORE[one] * 2 * model.attention_width * s / machine.attention_flops_per_s
                    for t, s in zip(tokens_G, squares_G, strict=True)
                )
                here["all_to_all"] += 2 * leg
                experts_G = [0.0] * topology.num_ranks
                for _, rank, tokens, _ in hosts:
                    if tokens:
                        tiles = math.ceil(tokens / machine.tile_rows) * machine.tile_rows
                        moved = WEIGHTS[one] * parameters * model.weight_bytes
                        moved += MEMORY[one] * tokens * (8 * model.hidden + 6 * model.intermediate)
                        flops = {"f": 1, "b": machine.backward_products}[one] * 2 * parameters * tiles
                        experts_G[rank] += flops / machine.gemm_flops_per_s + moved / machine.memory_bytes_per_s
                for expert, rank, _, _ in hosts:
                    for end in {rank, int(home_E[expert])} if rank != int(home_E[expert]) else ():
                        experts_G[end] += {"f": machine.replica_s, "b": machine.replica_backward_s}[one]
                here["experts"] += max(experts_G)
                here["fixed"] += machine.layer_s
            copied = [rank for _, rank, path in moves if path == "host"]
            copies = max((copied.count(rank) for rank in copied), default=0)
            there = copies * parameters * model.weight_bytes / links.host_bytes_per_s
            here["exposed"] = max(0.0, there - sum(here.values())) if place < len(filling) else 0.0
            parts = {name: parts[name] + here[name] for name in parts}
        busy = {}
        for home, rank, path in moves:
            sent = [(home, rank, model.weight_bytes)] * len(filling) if path == "direct" else []
            sent += [(rank, home, model.gradient_bytes)] if pass_name == "update" else []
            link = "node" if rank // width == home // width else "cluster"
            for source, target, size in sent:
                for key in ((link, "out", source), (link, "in", target)):
                    busy[key] = busy.get(key, 0.0) + parameters * size / bandwidth[link]
        left = sum(parts.values()) - parts["all_to_all"]
        parts["exposed"] += max(0.0, max(busy.values(), default=0.0) - left)
        result[pass_name] = parts
    return result
