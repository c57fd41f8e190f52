"""Compiled local search: many nodes at once move to their joint optimum, the others given.

A *block* is a set of nodes that induces a forest, grown breadth first from a random node. Given all
other nodes, its best strategies at given prices of memory follow by dynamic programming, so that a
move changes one node or thousands at the price of one pass over their edges. A move is made if every
memory row still fits (or overflows less).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.problem.network import Int
from autoshard.solver.kernels import jit
from autoshard.solver.presolve.memory_rows import MemoryItems
from autoshard.solver.program import Flat

Floats = NDArray[np.float64]
Random = NDArray[np.uint64]  # the state of a generator: one number
NEVER = 1e30  # what a forbidden strategy or cell costs


class Prices(NamedTuple):
    """What moves lower: the price of every strategy, its usage of memory included, and of every cell."""

    unary: Floats  # strategies
    table: Floats  # cells


class Current(NamedTuple):
    """A choice, and the usage of memory under it. Both are changed in place, together."""

    choice: Int  # nodes
    profile: Int  # rows; bytes
    limit: int  # bytes; no move may leave a row that it touches above it


class Block(NamedTuple):
    """Room for a block of nodes; `grow` fills all but `new`, and `best_of_block` that."""

    nodes: Int  # parents before children
    via: Int  # the edge to the parent, or −1; by position in the block
    new: Int  # the strategy to move to; by position in the block
    mark: Int  # of every node of the network: 1 + its position in the block, or 0


@jit
def draw(state: Random, below: int) -> int:
    """Returns the next pseudo-random integer in [0, below) (xorshift64*, Vigna 2016)."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return int((x * np.uint64(2685821657736338717)) >> np.uint64(33)) % below


@jit
def total(flat: Flat, prices: Prices, choice: Int) -> float:
    """Returns the sum of the chosen entries."""
    start, edge_nodes, edge_start = flat.start, flat.edge_nodes, flat.edge_start
    cost, table = prices.unary, prices.table
    out = 0.0
    for v in range(len(start) - 1):
        out += cost[start[v] + choice[v]]
    for e in range(len(edge_nodes)):
        u, w = edge_nodes[e, 0], edge_nodes[e, 1]
        out += table[edge_start[e] + choice[u] * (start[w + 1] - start[w]) + choice[w]]
    return float(out)


@jit
def priced(items: MemoryItems, start: Int, price: Floats) -> Floats:
    """Returns what each strategy's usage costs at a price per row and byte; `start` is the network's."""
    begin, end, first, usage = items.begin, items.end, items.first, items.usage
    sums = np.zeros(len(price) + 1)
    for r in range(len(price)):
        sums[r + 1] = sums[r] + price[r]
    out = np.zeros(start[-1])
    for v in range(len(start) - 1):
        for i in range(items.start[v], items.start[v + 1]):
            unit = sums[end[i]] - sums[begin[i]]
            if unit > 0.0:
                for s in range(start[v + 1] - start[v]):
                    out[start[v] + s] += unit * usage[first[i] + s]
    return out


@jit
def grow(seed: int, most: int, state: Random, flat: Flat, block: Block) -> int:
    """Grows a block from node `seed` to at most `most` nodes; returns how many it has."""
    edge_nodes, near_start, near = flat.edge_nodes, flat.near_start, flat.near
    nodes, via, mark = block.nodes, block.via, block.mark
    count = 1
    nodes[0], via[0] = seed, -1
    mark[seed] = 1
    head = 0
    while head < count and count < most:
        v = nodes[head]
        head += 1
        degree = near_start[v + 1] - near_start[v]
        shift = draw(state, int(degree)) if degree > 0 else 0
        for k in range(degree):
            e = near[near_start[v] + (k + shift) % degree]
            w = edge_nodes[e, 0] + edge_nodes[e, 1] - v
            if count < most and mark[w] == 0 and not touches(w, v, flat, mark):
                nodes[count], via[count] = w, e
                count += 1
                mark[w] = count
    return count


@jit
def touches(w: int, but: int, flat: Flat, mark: Int) -> bool:
    """Whether node w has a neighbour in the block other than `but`; `mark` is the block's."""
    edge_nodes, near_start, near = flat.edge_nodes, flat.near_start, flat.near
    for at in range(near_start[w], near_start[w + 1]):
        e = near[at]
        x = edge_nodes[e, 0] + edge_nodes[e, 1] - w
        if x != but and mark[x] > 0:
            return True
    return False


@jit
def best_of_block(count: int, block: Block, flat: Flat, prices: Prices, choice: Int, message: Floats) -> bool:
    """Writes the best strategies of the block's `count` nodes into `block.new`; returns whether any is new.

    The other nodes keep their `choice`. `message` is room for a number per strategy.
    """
    start, edge_nodes, edge_start = flat.start, flat.edge_nodes, flat.edge_start
    near_start, near = flat.near_start, flat.near
    nodes, via, new, mark = block.nodes, block.via, block.new, block.mark
    unary, table = prices.unary, prices.table
    for k in range(count):
        v = nodes[k]
        for s in range(start[v], start[v + 1]):
            message[s] = unary[s]
        for at in range(near_start[v], near_start[v + 1]):
            e = near[at]
            u, w = edge_nodes[e, 0], edge_nodes[e, 1]
            x = u + w - v
            if mark[x] > 0:
                continue
            kw = start[w + 1] - start[w]
            if v == u:
                for i in range(start[v + 1] - start[v]):
                    message[start[v] + i] += table[edge_start[e] + i * kw + choice[w]]
            else:
                row = edge_start[e] + choice[u] * kw
                for j in range(kw):
                    message[start[v] + j] += table[row + j]
    for k in range(count - 1, 0, -1):
        v, e = nodes[k], via[k]
        u, w = edge_nodes[e, 0], edge_nodes[e, 1]
        p = u + w - v
        kw = start[w + 1] - start[w]
        kv, kp = start[v + 1] - start[v], start[p + 1] - start[p]
        for i in range(kp):
            low = 1e300
            for j in range(kv):
                cell = table[edge_start[e] + i * kw + j] if p == u else table[edge_start[e] + j * kw + i]
                value = message[start[v] + j] + cell
                if value < low:
                    low = value
            message[start[p] + i] += low
    differs = False
    for k in range(count):
        v, e = nodes[k], via[k]
        best, low = choice[v], 1e300
        if e < 0:
            low = message[start[v] + best]
            for j in range(start[v + 1] - start[v]):
                if message[start[v] + j] < low - 1e-9 * abs(low):
                    low, best = message[start[v] + j], j
        else:
            u, w = edge_nodes[e, 0], edge_nodes[e, 1]
            p = u + w - v
            kw = start[w + 1] - start[w]
            i = new[mark[p] - 1]
            low = message[start[v] + best] + (
                table[edge_start[e] + i * kw + best] if p == u else table[edge_start[e] + best * kw + i]
            )
            for j in range(start[v + 1] - start[v]):
                cell = table[edge_start[e] + i * kw + j] if p == u else table[edge_start[e] + j * kw + i]
                value = message[start[v] + j] + cell
                if value < low - 1e-9 * abs(low):
                    low, best = value, j
        new[k] = best
        differs |= best != choice[v]
    return differs


@jit
def note(v: int, new: int, choice: Int, items: MemoryItems, change: Int) -> tuple[int, int]:
    """Adds to `change`, the differences from row to row, how much more node v uses with strategy `new`.

    Returns the range of rows that it touches.
    """
    begin, end, first, usage = items.begin, items.end, items.first, items.usage
    low, high = len(change) - 1, 0
    for i in range(items.start[v], items.start[v + 1]):
        more = usage[first[i] + new] - usage[first[i] + choice[v]]
        change[begin[i]] += more
        change[end[i]] -= more
        low, high = min(low, begin[i]), max(high, end[i])
    return low, high


@jit
def fits(change: Int, low: int, high: int, profile: Int, limit: int) -> bool:
    """Whether `change` makes no row of [low, high) both grow and exceed the limit."""
    more = 0
    for r in range(low, high):
        more += change[r]
        if more > 0 and profile[r] + more > limit:
            return False
    return True


@jit
def add(change: Int, low: int, high: int, profile: Int) -> None:
    """Adds `change` to the rows [low, high) of `profile`."""
    more = 0
    for r in range(low, high):
        more += change[r]
        profile[r] += more


@jit
def wander(
    visits: int, most: int, state: Random, flat: Flat, prices: Prices, items: MemoryItems, current: Current
) -> int:
    """Makes moves of blocks of up to `most` nodes, in place, until they had `visits` nodes together.

    Returns how many moves changed the choice. A move is refused where it would leave one of the rows that
    it touches above the limit.
    """
    choice, profile, limit = current.choice, current.profile, current.limit
    n, rows = len(flat.start) - 1, len(profile)
    nodes, via, new = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    mark = np.zeros(n, dtype=np.int64)
    block = Block(nodes, via, new, mark)
    message = np.empty(len(prices.unary))
    change = np.zeros(rows + 1, dtype=np.int64)
    octaves = 1
    while most >> octaves > 0:
        octaves += 1
    made = 0
    while visits > 0:
        size = most >> draw(state, octaves)
        count = grow(draw(state, n), size, state, flat, block)
        visits -= count
        differs = best_of_block(count, block, flat, prices, choice, message)
        for k in range(count):
            mark[nodes[k]] = 0
        if not differs:
            continue
        low, high = rows, 0
        for k in range(count):
            v = nodes[k]
            if new[k] != choice[v]:
                touched = note(v, int(new[k]), choice, items, change)
                low, high = min(low, touched[0]), max(high, touched[1])
        if fits(change, low, high, profile, limit):
            add(change, low, high, profile)
            for k in range(count):
                choice[nodes[k]] = new[k]
            made += 1
        change[low : high + 1] = 0
    return made


@jit
def cross(flat: Flat, prices: Prices, items: MemoryItems, current: Current, other: Int) -> int:
    """Takes over from the choice `other` every connected difference that lowers the sum and fits, in place.

    Returns how many were taken over. Differences that do not touch are independent (partition
    crossover: Whitley, Hains & Howe 2009).
    """
    start, edge_nodes, edge_start = flat.start, flat.edge_nodes, flat.edge_start
    near_start, near = flat.near_start, flat.near
    unary, table = prices.unary, prices.table
    choice, profile, limit = current.choice, current.profile, current.limit
    n, rows = len(start) - 1, len(profile)
    seen = np.zeros(n, dtype=np.bool_)
    part = np.empty(n, dtype=np.int64)
    change = np.zeros(rows + 1, dtype=np.int64)
    taken = 0
    for seed in range(n):
        if seen[seed] or choice[seed] == other[seed]:
            continue
        count = 1
        part[0] = seed
        seen[seed] = True
        head = 0
        gain = 0.0
        low, high = rows, 0
        while head < count:
            v = part[head]
            head += 1
            gain += unary[start[v] + choice[v]] - unary[start[v] + other[v]]
            for at in range(near_start[v], near_start[v + 1]):
                e = near[at]
                u, w = edge_nodes[e, 0], edge_nodes[e, 1]
                x = u + w - v
                differs = choice[x] != other[x]
                if differs and not seen[x]:
                    seen[x] = True
                    part[count] = x
                    count += 1
                if not differs or v == u:  # inside the part every edge counts once
                    kw = start[w + 1] - start[w]
                    gain += table[edge_start[e] + choice[u] * kw + choice[w]]
                    gain -= table[edge_start[e] + other[u] * kw + other[w]]
            touched = note(v, int(other[v]), choice, items, change)
            low, high = min(low, touched[0]), max(high, touched[1])
        if gain > 0.0 and fits(change, low, high, profile, limit):
            add(change, low, high, profile)
            for k in range(count):
                choice[part[k]] = other[part[k]]
            taken += 1
        change[low : high + 1] = 0
    return taken
