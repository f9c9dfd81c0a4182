#!/bin/sh
# pipeline_svg.sh OUT.svg: trains a GPT on two ranks with each schedule, and draws one step of each run as it was: docs/pipeline.svg.
# Run it on a machine that does nothing else. DATA=FILE: the text; BUILD=build: where train_gpt and trace are.
cd "$(dirname "$0")/.." || exit 1
[ $# -eq 1 ] || { echo "pipeline_svg.sh OUT.svg" >&2; exit 1; }
build=${BUILD:-build} tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
for kind in gpipe 1f1b interleaved zb_h1; do
    rm -f "$tmp"/trace.*
    "$build/train_gpt" --data "${DATA:-dtrain.h}" --steps 6 --eval-batches 0 --sample 0 --ranks 2 --threads 1 --layers 8 --channels 256 --heads 4 \
        --seq 128 --batch 4 --pipeline 2 --accum 4 --pipeline-schedule $kind --trace "$tmp/trace.json" >"$tmp/said" 2>&1 &&
        "$build/trace" passes "$tmp/$kind.svg" "$tmp"/trace.rank*.json 4 >"$tmp/said" || { cat "$tmp/said" >&2; exit 1; }
done
# The drawings one below the other: style and frame of the first one, and each in a group of its own.
awk 'FNR == 1 { split($0, view, "[ \"]"); for (i in view) if (view[i] == 1000 && view[i + 1] > 0) height = view[i + 1] + 12 }
     FNR == 2 && NR == 2 { style = $0 }
     FNR > 2 && /class="title"/ {
         file = FILENAME; sub(".*/", "", file); sub("[.]svg", "", file)
         names["gpipe"] = "GPipe"; names["1f1b"] = "1F1B"; names["interleaved"] = "interleaved, two chunks"; names["zb_h1"] = "ZB-H1"
         sub(">step 4:", ">" names[file] ":")
         body = body sprintf("<g transform=\"translate(0 %d)\">\n", top)
     }
     FNR > 2 && !/^<\/svg>/ { body = body $0 "\n" }
     /^<\/svg>/ { body = body "</g>\n"; top += height + 10 }
     END { printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 1000 %d\">\n%s\n%s</svg>\n", top, style, body }' \
    "$tmp/gpipe.svg" "$tmp/1f1b.svg" "$tmp/interleaved.svg" "$tmp/zb_h1.svg" >"$1"
