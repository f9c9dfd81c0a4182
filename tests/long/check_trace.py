"""Checks of traces, with Python's json and nothing of dtrain's own.

    check_trace.py rules FILE...          the Trace Event Format, spans inside of each other, tracks that are named
    check_trace.py exposed LOG FILE...    exposed and hidden communication against the log's, within 5 %
    check_trace.py overlap yes|no FILE    does a bucket's collective begin before backward ends?
    check_trace.py together SECONDS FILE  in a merged file: ranks leave the same collective within SECONDS
    check_trace.py shown TABLE LOG        build/trace show against the log, within 5 %
    check_trace.py steps FIRST LAST FILE  these steps, and no others
    check_trace.py passes "F0.0 B0.0 ..." FILE  passes of a pipeline in each step: letter and micro-batch, stage
"""
import json
import sys

THREAD, COLLECTIVE, CHECKPOINT = 1, 2, 34


def need(condition, *words):
    if not condition:
        sys.exit(" ".join(str(word) for word in words))


def load(path):
    """The events of a file; what a killed rank has left lacks its end."""
    text = open(path, encoding="utf-8").read()
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(text[:text.rindex("\n")].rstrip().rstrip(",") + "]")


def spans(events, *kinds, tid=THREAD):
    return [e for e in events if e["ph"] == "X" and e["tid"] == tid and (not kinds or e["cat"] in kinds)]


def rules(path):
    events = load(path)
    need(isinstance(events, list) and events, path, "is no array of events")
    named, open_spans, flows = set(), {}, {}
    for e in events:
        need(e["ph"] in ("X", "M", "s", "f"), "phase", e)
        need(isinstance(e["pid"], int) and isinstance(e["tid"], int) and e["name"], "no process, thread or name", e)
        if e["ph"] == "M":
            need(isinstance(e["args"], dict), "metadata without args", e)
            if e["name"] == "thread_name":
                named.add((e["pid"], e["tid"]))
            continue
        need(isinstance(e["ts"], (int, float)) and e["ts"] >= 0, "time", e)
        if e["ph"] == "X":
            need(e["dur"] >= 0 and e["cat"], "duration or category", e)
            open_spans.setdefault((e["pid"], e["tid"]), []).append((e["ts"], -e["dur"]))
        else:
            need("id" in e and (e["ph"] == "s" or e["bp"] == "e"), "flow", e)
            flows.setdefault(e["id"], []).append(e["ph"])
    need({e["name"] for e in events if e["ph"] == "M"} >= {"process_name", "thread_name", "dtrain"}, "metadata of", path)
    for place, of_track in open_spans.items():
        need(place in named, "track", place, "has no name")
        stack = []
        for begin, minus in sorted(of_track):
            end = begin - minus
            while stack and stack[-1] <= begin + 0.0005:
                stack.pop()
            need(not stack or end <= stack[-1] + 0.0015, path, place, "spans overlap at", begin, end, stack)
            stack.append(end)
    need(all(sorted(phases) == ["f", "s"] for phases in flows.values()), "an arrow without its other end")


def union(intervals):
    joined = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return joined


def length_without(intervals, others):
    """How long `intervals` last outside of `others`: both are unions."""
    total = 0
    for begin, end in intervals:
        total += end - begin - sum(max(0, min(end, e) - max(begin, b)) for b, e in others)
    return total


def interval(e):
    return [e["ts"], e["ts"] + e["dur"]]


def of_step(events, step):
    """Milliseconds of a step of one rank: communication, and what of it no computing covers."""
    begin, end = interval(step)
    end = min([r["ts"] for r in spans(events, "other") if r["name"] == "record" and begin <= r["ts"] < end] + [end])
    inside = lambda e: begin <= e["ts"] < end
    cut = lambda e: [max(e["ts"], begin), min(e["ts"] + e["dur"], end)]
    flight = union(cut(e) for e in events
                   if e["ph"] == "X" and COLLECTIVE <= e["tid"] < CHECKPOINT and interval(e)[1] > begin and e["ts"] < end)
    waits = union(interval(e) for e in spans(events, "comm") if inside(e))
    work = union(interval(e) for e in spans(events, "data", "forward", "backward", "optimizer") if inside(e))
    computing = []
    for b, e in work:  # without the calls of communicators inside of it
        for wb, we in waits:
            if b < wb < e:
                computing.append([b, wb])
            if b < we and wb < e:
                b = min(we, e)
        computing.append([b, e])
    everything = sum(e - b for b, e in flight)
    return everything / 1e3, length_without(flight, computing) / 1e3


def exposed(log, *paths):
    lines = [json.loads(line) for line in open(log)]
    lines = [line for line in lines if "step" in line and not line.get("final")]
    sums = [0, 0]
    for path in paths:
        events = load(path)
        steps = [e for e in spans(events) if e["name"] == "step"]
        need(len(steps) == len(lines), path, "has", len(steps), "steps, the log", len(lines))
        for step in steps:
            for i, ms in enumerate(of_step(events, step)):
                sums[i] += ms / len(paths)
    for ms, key in zip(sums, ("comm_ms", "exposed_comm_ms")):
        said = sum(line[key] for line in lines)
        print("%s: %.3f ms in the trace, %.3f in the log" % (key, ms, said))
        need(abs(ms - said) <= 0.05 * said, key, "differs by more than 5 %")


def overlap(expected, path):
    events = load(path)
    found = 0
    for backward in (e for e in spans(events, "backward") if e["name"] == "backward"):
        begin, end = interval(backward)
        found += any(e["cat"] == "collective" and e["args"].get("of", "").startswith("bucket") and begin < e["ts"] < end
                     for e in events if e["ph"] == "X")
    need((found > 0) == (expected == "yes"), found, "backwards with collectives inside, expected", expected)


def together(seconds, path):
    ends = {}
    for e in load(path):
        if e["ph"] == "X" and e["cat"] == "collective" and e["args"]["communicator"] == 0:
            ends.setdefault(e["args"]["sequence"], {})[e["pid"]] = interval(e)
    common = [by_rank for by_rank in ends.values() if len(by_rank) > 1]
    need(common, "no collective of two ranks in", path)
    for by_rank in common:  # nobody leaves before the last one has come
        latest, first_end = max(b for b, _ in by_rank.values()), min(e for _, e in by_rank.values())
        need(first_end >= latest - 1e6 * float(seconds), "a rank left", latest - first_end, "us before the last came")


def shown(table, log):
    """What build/trace show prints of each rank, averaged, against the log."""
    rows = [line.split() for line in open(table) if line[:1].isdigit()]
    lines = [line for line in map(json.loads, open(log)) if "step" in line and not line.get("final")]
    need(rows and all(int(row[1]) == len(lines) for row in rows), "steps in", table)
    for column, key in ((3, "comm_ms"), (4, "exposed_comm_ms")):
        ms = sum(float(row[column]) for row in rows) / len(rows)
        said = sum(line[key] for line in lines) / len(lines)
        need(abs(ms - said) <= 0.05 * said, key, ms, "in the table,", said, "in the log")


def steps(first, last, path):
    found = [e["args"]["number"] for e in spans(load(path)) if e["name"] == "step"]
    need(found == list(range(int(first), int(last) + 1)), "steps", found)


def passes(expected, path):
    of_stages = [e for e in spans(load(path), "forward", "backward") if e.get("args", {}).get("of", "").startswith("stage ")]
    found = [e["name"][0].upper() + str(e["args"]["number"]) + "." + e["args"]["of"][6:] for e in of_stages]
    each = len(expected.split())
    need(found and len(found) % each == 0, len(found), "passes, not a multiple of", each)
    for first in range(0, len(found), each):
        need(found[first:first + each] == expected.split(), "passes", found[first:first + each])


if sys.argv[1] == "rules":
    for file in sys.argv[2:]:
        rules(file)
else:
    {"exposed": exposed, "overlap": overlap, "together": together, "shown": shown, "steps": steps,
     "passes": passes}[sys.argv[1]](*sys.argv[2:])
