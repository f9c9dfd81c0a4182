#!/bin/sh
# Metrics, as those read them for whom they are written: TensorBoard's own EventAccumulator (PyPI), promtool and
# node_exporter (Debian), Python's json; NumPy makes the histograms again from dumped weights and gradients.
# A training of monitor_run writes everything at once; it goes on in a second run, and under a locale with a decimal comma.
. tests/support/shell.sh
run=$build/monitor_run
python=${PYTHON:-/usr/bin/python3}
packages='tensorboard==2.14.0 protobuf==4.23.4 setuptools<80'
case $build in /*) ;; *) build=$PWD/$build ;; esac
# Debian's NumPy, and TensorBoard in an environment of its own that is made once.
environment() {
    "$python" -c 'import numpy' 2>/dev/null || { echo "$python has no numpy (Debian: apt-get install python3-numpy)"; return 1; }
    [ "$(cat "$build/tensorboard/packages" 2>/dev/null)" = "$packages" ] && return 0
    rm -rf "$build/tensorboard"
    "$python" -m venv --system-site-packages "$build/tensorboard" >"$build/tensorboard.log" 2>&1 || {
        echo "$python -m venv fails (Debian: apt-get install python3-venv)"; return 1; }
    # shellcheck disable=SC2086
    timeout 300 "$build/tensorboard/bin/python" -m pip install --disable-pip-version-check $packages >>"$build/tensorboard.log" 2>&1 || {
        echo "pip cannot install $packages: $(tail -n 1 "$build/tensorboard.log")"; return 1; }
    echo "$packages" >"$build/tensorboard/packages"
}

cat >"$tmp/check.py" <<'CHECK'
import glob, json, math, os, re, struct, sys

directory, ranks, first, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
def fail(text): sys.exit(f"{directory}: {text}")

# ---- JSON lines ----
lines = [json.loads(l, parse_constant=lambda x: fail(f"{x} in JSON")) for l in open(f"{directory}/log.jsonl")]
starts = [l for l in lines if "start" in l]
steps = [l for l in lines if "step" in l and "final" not in l]
finals = [l for l in lines if "final" in l]
if [l["step"] for l in steps] != list(range(1, end + 1)) or len(finals) != (2 if first else 1): fail("JSON lines have other steps")
if lines[0] is not starts[0] or [l["first_step"] for l in starts] != ([0, first + 1] if first else [0]): fail(f"starts: {starts}")
for l in starts:
    if (l["ranks"], l["parameters"], l["shard_ranks"] * l["replicas"]) != (ranks, 904, ranks): fail(l)
    if l["run"] != 'a "run" \\ of\ntwo lines' or l["config"] != "# configuration\nlr = 0.01\n" or not l["host"] or "CPU" not in l["device"]: fail(l)
    if not re.search(f"-{l['strategy']}$", directory): fail(f"strategy {l['strategy']}")
if any(b["wall_time"] < a["wall_time"] for a, b in zip(lines, lines[1:])): fail("times go back")
if not 0 <= lines[-1]["wall_time"] - os.stat(f"{directory}/log.jsonl").st_mtime + 1 < 2: fail("the time of the last line")
for line in steps:
    # the parts of a step are in it, and the whole of the collectives is what was sent
    kinds = sum(line.get(k + "_bytes", 0) for k in "all_reduce reduce_scatter all_gather broadcast reduce send all_to_all".split())
    if kinds != line["comm_bytes"]: fail(f"kinds send {kinds}, not {line['comm_bytes']}")
    if ranks > 1:
        parts = sum(line[p + "_ms_mean"] for p in ("data", "forward", "backward", "exposed_comm", "optimizer"))
        if not 0 < parts <= line["step_ms_mean"] * 1.0001: fail(f"parts take {parts} ms of {line['step_ms_mean']}")
        for part in ("step", "data", "forward", "backward", "exposed_comm", "hidden_comm", "optimizer", "checkpoint"):
            low, mean, high, who = (line[f"{part}_ms_{k}"] for k in ("min", "mean", "max", "rank"))
            if not (low <= mean * 1.000001 and mean <= high * 1.000001 and 0 <= who < ranks): fail(f"{part}: {low} {mean} {high} {who}")
        low, mean, high, who = (line[f"comm_bytes_{k}"] for k in ("min", "mean", "max", "rank"))
        if not (0 < low <= line["comm_bytes"] <= high and low <= mean <= high and 0 <= who < ranks): fail(f"bytes: {low} {mean} {high} {who}")
        if line["step_ms"] != line["step_ms_max"] or line["data_ms"] != line["data_ms_max"]: fail("a slowest rank that is not")
    # two products of matrices forward, and two each for their gradients; multiplications and additions
    flops = ranks * 3 * 2 * 6 * (24 * 12 + 16 * 24)
    if abs(line["flops_per_second"] * line["step_ms"] / 1e3 / flops - 1) > 1e-5: fail("FLOPs")
    if abs(line["peak_share"] * ranks * 1e9 / line["flops_per_second"] - 1) > 1e-5: fail("share of peak")
if finals[-1]["predicted_param_bytes"] != finals[-1]["memory_param_bytes"]: fail("parameters are not as predicted")
if finals[-1]["predicted_optimizer_bytes"] != finals[-1]["memory_optimizer_bytes"]: fail("optimizer state is not as predicted")

# ---- TensorBoard ----
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
files = sorted(os.listdir(f"{directory}/tensorboard/run"))
if len(files) != (2 if first else 1) or not all(re.fullmatch(r"events\.out\.tfevents\.\d{10}\.\S+\.\d+\.0", f) for f in files): fail(files)
events = EventAccumulator(f"{directory}/tensorboard/run", size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
events.Reload()
tags = events.Tags()
group = {}
for tag in tags["scalars"]:
    name = tag.split("/")[1]
    group[name] = tag
    got = {e.step: e.value for e in events.Scalars(tag)}
    if not any(name in l for l in steps): # fixed: with the first step of each start
        if got != {start: np.float32(final[name]) for start, final in zip((1, first + 1), finals)}: fail(f"{tag}: {got}")
        continue
    want = {l["step"]: np.float32(l[name]) for l in steps if name in l}
    if got.keys() != want.keys(): fail(f"{tag} has steps {sorted(got)}, not {sorted(want)}")
    for step in got:
        if got[step] != want[step]: fail(f"{tag} at {step}: {got[step]}, not {want[step]}")
if not {"loss/loss", "loss/val_loss", "time/step_ms", "memory/memory_bytes", "throughput/tokens_per_second"} <= set(tags["scalars"]): fail(tags)
# TensorBoard shows the tags in this order, and opens the first two groups: the loss comes first, figures of ranks are folded
shown = sorted(tags["scalars"] + tags["histograms"])
groups = sorted({tag.split("/")[0] for tag in shown})
if shown[:2] != ["loss/loss", "loss/val_loss"] or (ranks > 1) != ("ranks" in groups[2:]): fail(f"TensorBoard opens on {shown[0]}: {groups}")
for tag in shown:
    if re.search("_(min|mean|max|rank)$|straggler", tag) and not tag.startswith("ranks/"): fail(f"{tag} is not folded")
for event in events.Scalars("loss/loss"):
    if abs(event.wall_time - steps[event.step - 1]["wall_time"]) > 0.0011: fail(f"step {event.step}: another time")
for key in set().union(*steps) - {"step", "wall_time"}:
    if key not in group: fail(f"{key} is not in TensorBoard")
def whole(step, what, name):
    paths = sorted(glob.glob(f"{directory}/{what}-{step}-{name}" + ("-*" if what == "gradients" else "")))
    return np.concatenate([np.fromfile(p, np.float32) for p in paths])
histograms = 0
for name, count in (("wte", 192), ("up.weight", 288), ("up.bias", 24), ("head.weight", 384), ("head.bias", 16)):
    for what, tag in (("weights", "weights"), ("gradients", "weights.grad")):
        for e in events.Histograms(f"{tag}/{name}"):
            h, values = e.histogram_value, whole(e.step, what, name)
            histograms += 1
            if len(values) != count or h.num != count: fail(f"{what}/{name} at {e.step}: {h.num} and {len(values)} of {count} values")
            limits, wide = np.array(h.bucket_limit), values.astype(np.float64)
            # a limit belongs to the bucket farther from 0: of negative values it is the upper end
            at = np.where(wide < 0, np.searchsorted(limits, wide, "left"), np.searchsorted(limits, wide, "right"))
            if not np.array_equal(np.bincount(at, minlength=len(limits)), np.array(h.bucket)): fail(f"{what}/{name} at {e.step}: buckets")
            edges = np.concatenate([[-np.inf], limits])
            if not np.any(np.isin(np.abs(wide), np.abs(limits))):
                if not np.array_equal(np.histogram(wide, edges)[0], np.array(h.bucket)): fail(f"{what}/{name} at {e.step}: not NumPy's")
            for mine, theirs in ((h.min, wide.min()), (h.max, wide.max()), (h.sum, wide.sum()), (h.sum_squares, (wide ** 2).sum())):
                if abs(mine - theirs) > 1e-12 * max(1, np.abs(wide).sum()): fail(f"{what}/{name} at {e.step}: {mine}, not {theirs}")
if histograms != 10 * len([s for s in range(1, end + 1) if s % 4 == 0]): fail(f"{histograms} histograms")
text = events.Tensors("config/text_summary")[-1].tensor_proto.string_val[0]
if text != b"# configuration\nlr = 0.01\n": fail(text)
data = {}
for kind in ("experiment", "session_start_info", "session_end_info"):
    content = events.SummaryMetadata(f"_hparams_/{kind}").plugin_data.content
    data[kind] = plugin_data_pb2.HParamsPluginData.FromString(content)
hparams = data["session_start_info"].session_start_info.hparams
values = {k: getattr(hparams[k], hparams[k].WhichOneof("kind")) for k in hparams}
if values != {"lr": 0.01, "batch": 6.0, "strategy": "ddp", "shuffle": True, "note": "a=b, ä"}: fail(values)
infos = {i.name: i.type for i in data["experiment"].experiment.hparam_infos}
if infos != {"lr": 3, "batch": 3, "strategy": 1, "shuffle": 2, "note": 1}: fail(infos)
if not all(m.name.tag in tags["scalars"] for m in data["experiment"].experiment.metric_infos): fail("metrics of hparams")
if data["session_end_info"].session_end_info.status != 1: fail("the session has not ended well")
# the HPARAMS tab itself
from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import backend_context, list_session_groups, api_pb2
from tensorboard import context
multiplexer = plugin_event_multiplexer.EventMultiplexer()
multiplexer.AddRunsFromDirectory(f"{directory}/tensorboard")
multiplexer.Reload()
provider = data_provider.MultiplexerDataProvider(multiplexer, f"{directory}/tensorboard")
backend = backend_context.Context(base_plugin.TBContext(data_provider=provider))
request = api_pb2.ListSessionGroupsRequest(start_index=0, slice_size=10, allowed_statuses=[1])
request_context = context.RequestContext()
handler = list_session_groups.Handler(request_context, backend, "0", request)
groups = handler.run().session_groups
if len(groups) != 1 or groups[0].hparams["lr"].number_value != 0.01: fail("the HPARAMS tab does not show the run")
print(f"ok: {len(steps)} steps, {len(group)} scalars, {histograms} histograms")
CHECK

if why=$(environment); then check=$build/tensorboard/bin/python; else check=; fi
# consumers NAME DIRECTORY RANKS FIRST END
consumers() {
    title=$1; shift
    if [ -n "$check" ]; then good "$title: TensorBoard, NumPy and json read it" '^ok: ' "$check" "$tmp/check.py" "$@"
    else skip "$title: TensorBoard" "$why"; fi
    if have promtool; then
        promtool check metrics <"$1/run.prom" >"$tmp/out" 2>&1
        result "$title: promtool has no complaint" $? "$tmp/out"
    else skip "$title: promtool" "not installed (Debian: apt-get install prometheus)"; fi
}
# train NAME RANKS MODE STRATEGY FIRST END
train() {
    title=$1; shift
    directory=$tmp/$1-$2-$3
    mkdir -p "$directory"
    try "$title" "$run" "$directory" "$@"
    consumers "$title" "$directory" "$1" "$4" "$5"
}
[ -x "$run" ] || { echo "$run is not built: make $run"; exit 1; }
train "one rank" 1 threads ddp 0 10
train "2 processes, ddp" 2 processes ddp 0 10
train "2 processes, ddp, resumed" 2 processes ddp 10 21
train "4 threads, full_shard" 4 threads full_shard 0 10
train "4 processes, hybrid_shard" 4 processes hybrid_shard 0 6
if [ -n "${DTRAIN_TEST_FULL:-}" ]; then
    train "8 processes, zero1" 8 processes zero1 0 6
    train "8 threads, shard_grad_op" 8 threads shard_grad_op 0 6
    train "3 processes, zero3" 3 processes zero3 0 6
fi
if localedef -i de_DE -f UTF-8 "$tmp/de_DE.UTF-8" >"$tmp/out" 2>&1; then
    LOCPATH=$tmp MONITOR_LOCALE=de_DE.UTF-8
    export LOCPATH MONITOR_LOCALE
    train "a locale with a decimal comma" 1 processes ddp 0 6
    unset LOCPATH MONITOR_LOCALE
else skip "a locale with a decimal comma" "localedef makes none (Debian: apt-get install locales)"; fi

# What node_exporter serves is what the file says.
if have prometheus-node-exporter; then
    mkdir "$tmp/prom"
    cp "$tmp/2-processes-ddp/run.prom" "$tmp/prom"
    take_ports
    prometheus-node-exporter --collector.disable-defaults --collector.textfile --collector.textfile.directory="$tmp/prom" \
        --web.listen-address=127.0.0.1:$port >"$tmp/exporter" 2>&1 &
    exporter=$!
    at_end="kill $exporter 2>/dev/null"
    get() { "$python" -c 'import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode(), end="")' \
        "http://127.0.0.1:$port/metrics" >"$tmp/served" 2>/dev/null; }
    i=0; while ! get && [ $i -lt 600 ]; do sleep 0.1; i=$((i + 1)); done
    grep -q '^node_textfile_scrape_error 0' "$tmp/served"; result "node_exporter reads the file" $? "$tmp/exporter"
    sort "$tmp/prom/run.prom" | grep '^dtrain_' | cut -d'}' -f1 >"$tmp/want"
    grep '^dtrain_' "$tmp/served" | cut -d'}' -f1 | sort >"$tmp/got"
    # the exporter sorts labels by their name
    sed -E 's/\{(run="([^"\\]|\\.)*"),((rank|op)="[^"]*")/{\3,\1/' "$tmp/want" | sort >"$tmp/sorted"
    cmp -s "$tmp/sorted" "$tmp/got"; result "node_exporter serves every sample" $? "$tmp/got"
    kill $exporter; wait $exporter 2>/dev/null
else skip "node_exporter" "not installed (Debian: apt-get install prometheus-node-exporter)" 2; fi
finish
