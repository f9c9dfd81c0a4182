#!/bin/sh
# build/report: pages about runs, from real logs and from logs that lack keys, have every key, are cut off or wrong; what a headless
# browser draws of them, and the values that it shows under a pointer.
. tests/support/shell.sh
python=${PYTHON:-python3}
gpt="$build/train_gpt --layers 1 --heads 2 --channels 16 --seq 16 --batch 2 --eval-every 5 --eval-batches 2 --sample 0 --threads 1"
for n in 1 2; do $gpt --ranks $n --steps 12 --log "$tmp/run$n.jsonl" >/dev/null 2>&1; done
good "two runs" "^2 runs in" "$build/report" "$tmp/page.html" "1@$tmp/run1.jsonl" "2@two <b>ranks</b> & \"more\"=$tmp/run2.jsonl"

# Every key, a null, a step that is not there, 1000 steps, and no last line.
awk 'BEGIN { for (i = 0; i < 1000; i++) if (i != 500) printf "{\"step\": %d, \"loss\": %s, \"tokens_per_second\": %d, \"step_ms\": %d, \"data_ms\": %d, \"forward_ms\": 2, \"backward_ms\": 3, \"optimizer_ms\": 1, \"exposed_comm_ms\": 2.5, \"memory_bytes\": 1e6, \"memory_peak_bytes\": 2000000, \"ranks\": 4, \"new\": [1, {\"a\": \"\\u00e9\"}]}\n", i, i == 7 ? "null" : 5 - i / 500, 1000 + i, i % 20 ? 10 : 40, i % 20 ? 0 : 30; printf "{\"step\": 1000, \"lo" }' >"$tmp/all.jsonl"
good "a long run that goes on" "^1 run in" "$build/report" "$tmp/all.html" "$tmp/all.jsonl"
# Losses of more than two decades, and evaluations with an accuracy, the last one before the end.
awk 'BEGIN { for (i = 1; i <= 1500; i++) printf "{\"step\": %d, \"loss\": %.6f, \"tokens_per_second\": %d%s}\n", i, 5 * exp(-i / 280), 10 + i, i % 400 == 0 ? ", \"val_accuracy\": " (i < 1200 ? i / 2000 : 0.975) : "" }' >"$tmp/long.jsonl"
good "losses of some decades, and accuracies" "^1 run in" "$build/report" "$tmp/long.html" "$tmp/long.jsonl"
printf '{"step": 0}\n' >"$tmp/bare.jsonl"
good "a log that has nothing but steps" "^1 run in" "$build/report" "$tmp/bare.html" "$tmp/bare.jsonl"

# A run that was resumed after step 8 of 12 with another strategy: its later steps count.
{ cat "$tmp/run1.jsonl"; printf '{"start": true, "wall_time": 1e9, "ranks": 3, "first_step": 9, "strategy": "zero1", "config": "# commit abc\\nseq = 4\\nlr = 0.5\\n"}\n'
  for n in 9 10 11; do printf '{"step": %d, "loss": 1.25}\n' $n; done; } >"$tmp/again.jsonl"
good "a resumed run" "^1 run in" "$build/report" "$tmp/again.html" "$tmp/again.jsonl"

bad "no arguments" "report OUT.html LOG" "$build/report"
bad "no such log" "none.jsonl cannot be read" "$build/report" "$tmp/x.html" "$tmp/none.jsonl"
printf '{"step": 0}\nloss\n{"step": 1}\n' >"$tmp/wrong.jsonl"
bad "a line that is no JSON" "wrong.jsonl: line 2" "$build/report" "$tmp/x.html" "$tmp/wrong.jsonl"
: >"$tmp/empty.jsonl"
bad "an empty log" "has no steps" "$build/report" "$tmp/x.html" "$tmp/empty.jsonl"

cat >"$tmp/look.py" <<'END'
"""look.py PAGE SVGS WORD...: the page is whole, asks no network, has so many drawings and these words.
look.py values PAGE LOG...: the numbers in the page are those of the logs.
look.py means PAGE LOG...: the table has means of times, with their shares, and of rates.
look.py axes PAGE: what a browser draws of long.jsonl has the axes that it should have.
look.py timed PAGE LOG...: drawn over time, the curves end when the longest run does.
look.py shown PAGE LOG...: the values that the browser has shown at step 6 are those of the logs, smoothed by 0.9."""
import html.parser, json, re, sys
from decimal import Decimal, ROUND_HALF_UP
void = ("meta", "input", "br")
class Reader(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.counts, self.texts, self.stack, self.data, self.tips, self.ticks, self.heights = {}, [], [], "", [], [], []
        self.feed(text)
    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        attrs = dict(attrs)
        for name in attrs:
            assert name not in ("src", "href") and not name.startswith("on"), (tag, name)
        if tag not in void: self.stack.append((tag, attrs))
        if attrs.get("class") == "tip": self.tips.append("")
        if tag == "svg": self.ticks.append([]); self.heights.append([])
    def handle_endtag(self, tag):
        assert self.stack.pop()[0] == tag, tag
    def handle_data(self, text):
        tag, attrs = self.stack[-1] if self.stack else ("", {})
        if attrs.get("id") == "data": self.data += text
        elif tag not in ("script", "style"): self.texts.append(text)
        if any(a.get("class") == "tip" for t, a in self.stack): self.tips[-1] += text + " "
        if attrs.get("class") == "x": self.ticks[-1].append(text)
        if attrs.get("class") == "y": self.heights[-1].append(text)
def steps_of(path):
    steps = {}
    for line in map(json.loads, open(path)):
        if "step" in line and "final" not in line: steps[line["step"]] = line
    return [steps[n] for n in sorted(steps)]
def page(path):
    text = open(path, encoding="utf-8").read()
    assert "http" not in text and "url(" not in text
    reader = Reader(text)
    assert not reader.stack, reader.stack
    return reader
if sys.argv[1] == "values":
    reader = page(sys.argv[2])
    data = json.loads(reader.data, parse_constant=lambda x: 1 / 0)
    assert len(data["runs"]) == len(sys.argv) - 3
    for run, log in zip(data["runs"], sys.argv[3:]):
        steps = steps_of(log)
        assert run["x"] == [s["step"] for s in steps] and run["each"] == 1, run["x"]
        begin = next(l for l in map(json.loads, open(log)) if "start" in l)["wall_time"]
        assert all(abs(t - (s["wall_time"] - begin)) < 1e-5 for t, s in zip(run["t"], steps, strict=True)), run["t"]
        for key in ("loss", "val_loss", "tokens_per_second", "grad_norm", "lr", "memory_bytes", "memory_peak_bytes"):
            assert run["values"][key] == [s.get(key) for s in steps], key
        for n, step in enumerate(steps):
            parts = [step[k] for k in ("data_ms", "forward_ms", "backward_ms", "optimizer_ms", "exposed_comm_ms")]
            assert [p[n] for p in run["parts"]][:5] == parts
            assert abs(sum(p[n] for p in run["parts"]) - max(step["step_ms"], sum(parts))) < 1e-6
elif sys.argv[1] == "means":
    cells = page(sys.argv[2]).texts
    for log in map(steps_of, sys.argv[3:]):
        def mean(key): return sum(s[key] for s in log) / len(log)
        assert f"{mean('step_ms'):.2f} ms" in cells, cells
        for key in ("data_ms", "exposed_comm_ms"):
            assert f"{mean(key):.2f} ms, {100 * mean(key) / mean('step_ms'):.1f} % of a step" in cells, (key, cells)
        assert f"{100 * (1 - mean('exposed_comm_ms') / mean('step_ms')):.1f} %" in cells, cells
        done = sum(s["tokens_per_second"] * s["step_ms"] for s in log)
        assert f"{done / sum(s['step_ms'] for s in log):.0f} / s" in cells, cells
elif sys.argv[1] == "shown":
    reader = page(sys.argv[2])
    logs = [steps_of(log) for log in sys.argv[3:]]
    def smooth(key, log):
        last = 0
        for n in range(6): last = 0.9 * last + 0.1 * log[n][key]
        return last / (1 - 0.9 ** 6)
    def fixed(value, digits): # as the page writes it: halves, which Python rounds to even, go up; whole numbers have commas
        rounded = Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
        return f"{rounded:f}" if digits else f"{rounded:,f}"
    tips = [re.sub(r"\s+", " ", tip) for tip in reader.tips]
    def shows(tip, *words):
        for word in words: assert word in tips[tip], (word, tips[tip])
    for log in logs:
        six = log[5]
        for tip, key, digits in ((0, "loss", 4), (1, "tokens_per_second", 0), (2, "grad_norm", 3)):
            shows(tip, "step 6, ", f"{fixed(smooth(key, log), digits)} {fixed(six[key], digits)} ")
        shows(3, "%.2fe-" % float(("%.2e" % six["lr"]).split("e")[0]))
        shows(4, f"in use {fixed(six['memory_bytes'] / 2**20, 1)} MiB", f"peak {fixed(six['memory_peak_bytes'] / 2**20, 1)} MiB")
    for tip, log in zip((6, 7), logs):
        six = log[5]
        total = max(six["step_ms"], sum(six[k] for k in ("data_ms", "forward_ms", "backward_ms", "optimizer_ms", "exposed_comm_ms")))
        for part, key in (("forward", "forward_ms"), ("backward", "backward_ms"), ("exposed communication", "exposed_comm_ms")):
            shows(tip, f"{part} {fixed(six[key], 2)} ms {fixed(100 * six[key] / total, 1)} %")
    for n in (0, 1, 2, 3, 4, 6, 7): # an axis ends with its last step
        assert (reader.ticks[n][0], reader.ticks[n][-1]) == ("1", "12"), reader.ticks[n]
elif sys.argv[1] == "axes":
    reader = page(sys.argv[2])
    assert [(t[0], t[-1]) for t in reader.ticks] == [("1", "1500")] * 3, reader.ticks # not the step of the first mean
    assert reader.heights[0] == ["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2", "5"], reader.heights[0] # the loss: logarithmic
    assert reader.heights[1] == ["0", "20", "40", "60", "80", "100"], reader.heights[1] # the accuracy, in per cent
    assert reader.heights[2][0] == "0" and len(reader.heights[2]) > 3, reader.heights[2] # the rate: not logarithmic
    assert "dots: validation; logarithmic axis" in reader.texts and "97.5 %" in reader.texts, reader.texts
elif sys.argv[1] == "timed":
    ends = []
    for log in sys.argv[3:]:
        lines = list(map(json.loads, open(log)))
        ends.append(next(l["wall_time"] for l in reversed(lines) if "final" not in l) - lines[0]["wall_time"])
    ticks = page(sys.argv[2]).ticks[0] # of the losses of all runs
    assert ticks[0] == "0" and abs(float(ticks[-1]) / max(ends) - 1) < 1e-3, (ticks, ends)
else:
    reader = page(sys.argv[1])
    assert reader.counts.get("svg", 0) == int(sys.argv[2]), reader.counts
    text = " ".join(reader.texts)
    for word in sys.argv[3:]: assert word in text, word
END
look() { "$python" "$tmp/look.py" "$@" >"$tmp/said" 2>&1; }
if have "$python"; then
    look "$tmp/page.html" 0 'two <b>ranks</b> & "more"' "What ran" "How it ended" train_gpt "1, 1 thread each; 1 shard x 1 replica" \
        "2, 1 thread each; 1 shard x 2 replicas" "UTC" "All flags of" "channels = 16" "tokens"; result "the page of two runs" $? "$tmp/said"
    look values "$tmp/page.html" "$tmp/run1.jsonl" "$tmp/run2.jsonl"; result "its numbers are those of the logs" $? "$tmp/said"
    look means "$tmp/page.html" "$tmp/run1.jsonl" "$tmp/run2.jsonl"; result "its times and rates are means" $? "$tmp/said"
    grep -v '"step": 1000' "$tmp/all.jsonl" >"$tmp/whole.jsonl"
    look means "$tmp/all.html" "$tmp/whole.jsonl" && grep -q '>1.47 ms, 12.8 % of a step<' "$tmp/all.html"; result "waits that are rare and long are in the table" $? "$tmp/said"
    look "$tmp/all.html" 0 "it goes on, or was stopped" "tokens or samples"; result "the page of every key" $? "$tmp/said"
    look "$tmp/bare.html" 0 bare.jsonl; result "the page of a bare log" $? "$tmp/said"
    look "$tmp/again.html" 0 "2 times; this is of the last" zero1 "2001-09-09 01:46:40 UTC" abc "lr = 0.5" &&
        grep -q '"x":\[1,2,3,4,5,6,7,8,9,10,11\]' "$tmp/again.html" && grep -q ',1.25,1.25,1.25\]' "$tmp/again.html"
    result "the page of a resumed run" $? "$tmp/said"
else skip "pages" "no $python" 7; fi

# A browser, without a network: its DOM has the drawings, a pointer at step 6 shows that step's values, and there are pictures.
browser=
for name in chromium chromium-browser google-chrome; do have $name && browser=${browser:-$name}; done
if [ -n "$browser" ] && have "$python"; then
    mkdir "$tmp/home"
    show() { HOME=$tmp/home timeout 300 $browser --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir="$tmp/home/data" "$@" 2>"$tmp/err"; }
    for page in page:8 all:4 bare:0 again:6; do
        show --dump-dom "file://$tmp/${page%:*}.html" >"$tmp/dom.html"
        look "$tmp/dom.html" "${page#*:}"; result "a browser draws ${page%:*}.html" $? "$tmp/said"
    done
    show --dump-dom "file://$tmp/long.html" >"$tmp/dom.html"
    look axes "$tmp/dom.html"; result "losses are on a logarithmic axis, accuracies in per cent, steps from the first" $? "$tmp/said"
    { cat "$tmp/page.html"
      echo '<script>slider.value = 0.9; slider.dispatchEvent(new Event("input"));
        charts.forEach(function (c) { var box = c.host.getBoundingClientRect();
            c.host.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + c.px(c.x_name ? 2 : 6.3) * box.width / c.width, clientY: box.top + 9})); });</script>'
    } >"$tmp/hover.html"
    show --dump-dom "file://$tmp/hover.html" >"$tmp/dom.html"
    look shown "$tmp/dom.html" "$tmp/run1.jsonl" "$tmp/run2.jsonl"; result "a pointer shows the values of a step" $? "$tmp/said"
    { cat "$tmp/page.html"; echo '<script>over.value = "time"; over.dispatchEvent(new Event("change"));</script>'; } >"$tmp/timed.html"
    show --dump-dom "file://$tmp/timed.html" >"$tmp/dom.html"
    look timed "$tmp/dom.html" "$tmp/run1.jsonl" "$tmp/run2.jsonl"; result "curves over time end with the last step" $? "$tmp/said"
    for width in 1400 500; do
        show --window-size=$width,1600 --screenshot="$tmp/page.png" "file://$tmp/page.html" >/dev/null
        [ "$(wc -c <"$tmp/page.png")" -gt 40000 ]; result "a picture of it, $width wide" $? "$tmp/err"
    done
else skip "pages in a browser" "no chromium, or no $python" 9; fi
finish
