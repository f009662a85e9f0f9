#!/usr/bin/env python3
"""Reads the output of tools/gpu/trace.c: the replays of each graph, and each kernel's share of the time.

    python3 tools/gpu/trace.py trace.txt [FIRST LAST]

FIRST and LAST (seconds since the first record) select a part of the trace.
"""
import collections
import itertools
import statistics
import sys


def records(path):
    for line in open(path):
        kind, start, end, stream, graph, name = line.split(None, 5)
        yield kind, int(start), int(end), int(stream), int(graph), name.strip()[:70]


def main():
    found = sorted(records(sys.argv[1]), key=lambda record: record[1])
    zero = found[0][1]
    if len(sys.argv) > 3:
        first, last = (zero + float(second) * 1e9 for second in sys.argv[2:4])
        found = [record for record in found if first <= record[1] < last]
    print(f"{len(found)} records over {(found[-1][2] - found[0][1]) / 1e9:.3f} s")
    replays(found)
    steps(found)
    prompts(found)
    order(found)
    shares(found)
    idle(found)


def replays(found):
    """For a trace with one line per replay, prints the duration of replays and the gap until the
    next replay."""
    graphs = [record for record in found if record[0] == "graph"]
    by_graph = collections.defaultdict(list)
    for this, behind in zip(graphs, graphs[1:]):
        if this[4] == behind[4]:
            by_graph[this[4]].append(((this[2] - this[1]) / 1e6, (behind[1] - this[2]) / 1e6))
    for graph, runs in sorted(by_graph.items()):
        if len(runs) >= 16:
            spans, gaps = zip(*runs)
            print(f"graph {graph}: {len(runs)} replays, median {statistics.median(spans):.3f} ms, "
                  f"gap to the next {statistics.median(gaps):.3f} ms, mean {statistics.mean(gaps):.3f} ms")


def steps(found):
    """For a trace with one line per kernel, prints the kernels of each graph's replays and the time
    that each kernel adds, by name."""
    by_graph = collections.defaultdict(list)
    for record in found:
        if record[0] == "kernel" and record[4]:
            by_graph[record[4]].append(record)
    for graph, kernels in sorted(by_graph.items()):
        first = kernels[0][5]
        starts = [at for at, record in enumerate(kernels) if record[5] == first]
        length = min((b - a for a, b in zip(starts, starts[1:])), default=0)
        if len(starts) < 16 or not length:
            continue
        spans, busy, gaps = [], [], []
        for a, b in zip(starts, starts[1:]):
            run = kernels[a:b]
            spans.append((run[-1][2] - run[0][1]) / 1e6)
            busy.append(sum(record[2] - record[1] for record in run) / 1e6)
            gaps.append((kernels[b][1] - run[-1][2]) / 1e6)
        print(f"graph {graph}: {len(spans)} replays of {length} kernels, median {statistics.median(spans):.3f} ms, "
              f"kernels {statistics.median(busy):.3f} ms, gap to the next {statistics.median(gaps):.3f} ms")
        # A kernel that starts early waits for the kernel before it. It adds the time from the end
        # of that kernel to its own end.
        by_name = collections.defaultdict(lambda: [0.0, 0.0, 0])
        replays = kernels[starts[0]:starts[-1]]
        for before, record in zip([replays[0], *replays], replays):
            own = by_name[record[5]]
            own[0] += (record[2] - max(record[1], before[2])) / 1e6 / len(spans)
            own[1] += (record[2] - record[1]) / 1e6 / len(spans)
            own[2] += 1
        for name, (added, ran, count) in sorted(by_name.items(), key=lambda item: -item[1][0])[:14]:
            print(f"    {added:8.4f} ms per replay ({ran:8.4f} from its start), {count / len(spans):5.1f} calls  {name}")


def stretches(found):
    """Replays, and steps outside graphs, in order: the graph's number or 0, and the kernels with begin, end and name."""
    stretches = []
    for kind, start, end, stream, graph, name in found:
        if kind == "graph":
            stretches.append((graph, [(start, end, name)]))
        elif kind == "kernel":
            begins = name.startswith("embed") or not stretches or stretches[-1][0] != graph
            if begins:
                stretches.append((graph, []))
            stretches[-1][1].append((start, end, name))
    return stretches


def milliseconds(kernels):
    """The time from the start of the first kernel to the end of the last kernel."""
    return (kernels[-1][1] - kernels[0][0]) / 1e6


def order(found):
    """Prints the order of events: each step outside graphs, and the number of consecutive replays."""
    by_kind = itertools.groupby(stretches(found), lambda stretch: stretch[0] > 0)
    print("in order, milliseconds:")
    for is_graph, some in by_kind:
        spans = [milliseconds(kernels) for _, kernels in some]
        listed = f"{len(spans)} replays" if is_graph else " ".join(f"{span:.1f}" for span in spans)
        print(f"    {sum(spans):9.1f}: {listed}")


def prompts(found):
    """Steps outside graphs that take more than half as long as the longest such step: their durations, and
    their kernels by name."""
    steps = [kernels for graph, kernels in stretches(found) if not graph and kernels[0][2].startswith("embed")]
    longest = max(map(milliseconds, steps), default=0)
    long = [kernels for kernels in steps if milliseconds(kernels) * 2 > longest]
    if not long:
        return
    by_name = sums((name, end - start) for kernels in long for start, end, name in kernels)
    busy = sum(spent for _, (_, spent) in by_name) / len(long)
    mean = statistics.mean(map(milliseconds, long))
    print(f"{len(long)} steps outside of graphs, mean {mean:.1f} ms, kernels {busy:.1f} ms")
    for name, (count, spent) in by_name[:12]:
        print(f"    {spent / len(long):8.3f} ms per step in {count / len(long):6.1f} calls  {name}")


def sums(spans):
    """The number and the total milliseconds by name, the longest first. `spans` has names with nanoseconds."""
    by_name = collections.defaultdict(lambda: [0, 0.0])
    for name, nanoseconds in spans:
        entry = by_name[name]
        entry[0] += 1
        entry[1] += nanoseconds / 1e6
    return sorted(by_name.items(), key=lambda item: -item[1][1])


def shares(found):
    names = (
        ((stream, name if kind == "kernel" else name.split("_of_")[0]), end - start)
        for kind, start, end, stream, graph, name in found
        if kind != "graph" and not graph
    )
    print("outside of graphs:")
    for (stream, name), (count, milliseconds) in sums(names)[:30]:
        print(f"    {milliseconds:10.3f} ms in {count:6} on stream {stream}: {name}")


def idle(found):
    """The idle times of the device: the total, and the total by length."""
    until, gaps = found[0][1], []
    for record in found:
        if record[1] > until:
            gaps.append((record[1] - until) / 1e6)
        until = max(until, record[2])
    for least, most in ((0, 0.02), (0.02, 0.1), (0.1, 1), (1, 10), (10, 1e9)):
        some = [gap for gap in gaps if least <= gap < most]
        print(f"idle {least} to {most} ms: {len(some)} times, {sum(some):.1f} ms")


if __name__ == "__main__":
    main()
