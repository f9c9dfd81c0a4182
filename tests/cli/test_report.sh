#!/bin/sh
# build/report: pages about runs, from real logs and from logs that lack keys, have every key, are cut off or wrong; what a headless
# browser makes of them.
. tests/support/shell.sh
python=${PYTHON:-python3}
gpt="$build/train_gpt --layers 1 --heads 2 --channels 16 --seq 16 --batch 2 --eval-every 5 --eval-batches 2 --sample 0 --threads 1"
for n in 1 2; do $gpt --ranks $n --steps 12 --log "$tmp/run$n.jsonl" >/dev/null 2>&1; done
good "two runs" "^2 runs in" "$build/report" "$tmp/page.html" "1@$tmp/run1.jsonl" "2@two <b>ranks</b> & \"more\"=$tmp/run2.jsonl"

# Every key, a null, a step that is not there, 1000 steps, and no last line.
awk 'BEGIN { for (i = 0; i < 1000; i++) if (i != 500) printf "{\"step\": %d, \"loss\": %s, \"tokens_per_second\": %d, \"step_ms\": 10, \"data_ms\": 1, \"forward_ms\": 2, \"backward_ms\": 3, \"optimizer_ms\": 1, \"exposed_comm_ms\": 2.5, \"memory_bytes\": 1e6, \"memory_peak_bytes\": 2000000, \"ranks\": 4, \"new\": [1, {\"a\": \"\\u00e9\"}]}\n", i, i == 7 ? "null" : 5 - i / 500, 1000 + i; printf "{\"step\": 1000, \"lo" }' >"$tmp/all.jsonl"
good "a long run that goes on" "^1 run in" "$build/report" "$tmp/all.html" "$tmp/all.jsonl"
printf '{"step": 0}\n' >"$tmp/bare.jsonl"
good "a log that has nothing but steps" "^1 run in" "$build/report" "$tmp/bare.html" "$tmp/bare.jsonl"

bad "no arguments" "report OUT.html LOG" "$build/report"
bad "no such log" "none.jsonl cannot be read" "$build/report" "$tmp/x.html" "$tmp/none.jsonl"
printf '{"step": 0}\nloss\n{"step": 1}\n' >"$tmp/wrong.jsonl"
bad "a line that is no JSON" "wrong.jsonl: line 2" "$build/report" "$tmp/x.html" "$tmp/wrong.jsonl"
: >"$tmp/empty.jsonl"
bad "an empty log" "has no steps" "$build/report" "$tmp/x.html" "$tmp/empty.jsonl"

cat >"$tmp/look.py" <<'END'
import html.parser, sys
counts, classes, texts, stack = {}, set(), [], []
class Reader(html.parser.HTMLParser):
    def handle_starttag(self, tag, attrs):
        counts[tag] = counts.get(tag, 0) + 1
        for name, value in attrs:
            assert name not in ("src", "href") and not name.startswith("on"), (tag, name)
            if name == "class":
                classes.update(value.split())
        if tag not in ("meta", "line", "circle"):
            stack.append(tag)
    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in ("meta", "line", "circle"):
            stack.pop()
    def handle_endtag(self, tag):
        if tag not in ("line", "circle"):
            assert stack.pop() == tag, tag
    def handle_data(self, data):
        texts.append(data)
text = open(sys.argv[1], encoding="utf-8").read()
Reader().feed(text)
assert not stack and "script" not in counts and "http" not in text and "url(" not in text and "nan" not in text.replace("and", "")
assert counts.get("svg", 0) == int(sys.argv[2]), counts
for word in sys.argv[3:]:
    assert word in classes or any(word in t for t in texts), word
END
look() { "$python" "$tmp/look.py" "$@" >"$tmp/said" 2>&1; }
if have "$python"; then
    look "$tmp/page.html" 6 'two <b>ranks</b> & "more"' ideal p0 p4 c1; result "the page of two runs" $? "$tmp/said"
    look "$tmp/all.html" 4 "(no end)" p0 p1 p2 p3 p4 p5; result "the page of every key" $? "$tmp/said"
    look "$tmp/bare.html" 0 bare.jsonl; result "the page of a bare log" $? "$tmp/said"
else skip "pages" "no $python" 3; fi

# A browser, without a network: its DOM has what was written, and there is a picture.
browser=
for name in chromium chromium-browser google-chrome; do have $name && browser=${browser:-$name}; done
if [ -n "$browser" ]; then
    mkdir "$tmp/home"
    show() { HOME=$tmp/home timeout 60 $browser --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir="$tmp/home/data" "$@" 2>"$tmp/err"; }
    show --dump-dom "file://$tmp/page.html" >"$tmp/dom.html"
    look "$tmp/dom.html" 6 'two <b>ranks</b> & "more"' ideal p0; result "a browser's reading of it" $? "$tmp/said"
    show --window-size=1400,1200 --screenshot="$tmp/page.png" "file://$tmp/page.html" >/dev/null
    [ "$(wc -c <"$tmp/page.png")" -gt 20000 ]; result "a browser's picture of it" $? "$tmp/err"
else skip "pages in a browser" "no chromium" 2; fi
finish
