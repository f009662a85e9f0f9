#!/usr/bin/env python3
"""Summarizes the driver calls that tools/gpu/trace.c writes with BURSAR_TRACE_CALLS, for example the calls of a start.

    python3 tools/gpu/calls.py trace.txt [MILLISECONDS]

Prints the 40 pairs of thread and call name with the longest total time, with the number of calls, and then the timeline
of all threads: the start and duration of each call of at least MILLISECONDS (default 5).
"""
import collections
import sys


def main():
    least = float(sys.argv[2]) if len(sys.argv) > 2 else 5.0
    calls = []
    for line in open(sys.argv[1]):
        kind, start, end, thread, _, name = line.split(None, 5)
        if kind == "call":
            calls.append((int(start), int(end), int(thread), name.strip()))
    calls.sort()
    zero = calls[0][0]
    by_name = collections.defaultdict(lambda: [0, 0])
    for start, end, thread, name in calls:
        entry = by_name[thread, name]
        entry[0] += 1
        entry[1] += end - start
    print(f"{len(calls)} calls over {(max(call[1] for call in calls) - zero) / 1e9:.3f} s")
    for (thread, name), (count, total) in sorted(by_name.items(), key=lambda item: -item[1][1])[:40]:
        print(f"{total / 1e6:10.1f} ms  {count:6} x  thread {thread}  {name}")
    print()
    for start, end, thread, name in calls:
        if (end - start) / 1e6 >= least:
            print(f"{(start - zero) / 1e6:10.1f} ms  {(end - start) / 1e6:8.1f} ms  thread {thread}  {name}")


if __name__ == "__main__":
    main()
