/* script.h: the style and the script of the page. They stand here as CSS and JavaScript, and become texts by the
 * preprocessor, which takes their comments out and makes a line of each: so statements end in semicolons, texts are
 * in double quotes, and no text has more than the 4095 characters that C99 promises. */
#ifndef REPORT_SCRIPT_H
#define REPORT_SCRIPT_H

#define REPORT_TEXT(...) #__VA_ARGS__

/* clang-format off */
static const char *const page_style[] = {
REPORT_TEXT(
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #5b6470; --line: #d9dde3; --paper: #ffffff;
    --card: #f6f7f9;
    --c0: #0b6bcb; --c1: #d9560b; --c2: #1a8754; --c3: #b3318f;
    --c4: #7a5cd6; --c5: #8a6a1f; --c6: #0b8f9c; --c7: #c22f3d; }
@media (prefers-color-scheme: dark) {
    :root { --ink: #e6e8eb; --dim: #9aa4b0; --line: #363c45; --paper: #14171b; --card: #1c2026;
        --c0: #5aa9ff; --c1: #ff9a4d; --c2: #4cc38a; --c3: #f07fd0;
        --c4: #b39dff; --c5: #d6b25e; --c6: #4fd0dd; --c7: #ff7b86; } }
* { box-sizing: border-box; }
body { font: 16px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1500px;
    margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; } h2 { font-size: 18px; margin: 0 0 8px; }
p.about { margin: 0 0 16px; color: var(--dim); }
.tables, .charts { display: grid; gap: 16px;
    grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
.card, figure { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px;
    margin: 0; min-width: 0; }
.wide { grid-template-columns: 1fr; }
.card { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 3px 10px 3px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
    font-variant-numeric: tabular-nums; }
tr:last-child > * { border-bottom: 0; } th { font-weight: 400; color: var(--dim); white-space: nowrap; }
thead th { color: var(--ink); font-weight: 600; white-space: normal; }
),
REPORT_TEXT(
.key { display: inline-block; width: 14px; height: 14px; border-radius: 3px; margin: 0 6px 0 0;
    vertical-align: -1px; background: currentColor; }
.controls { display: flex; flex-wrap: wrap; gap: 8px 20px; align-items: center; margin: 16px 0; }
.controls label { display: flex; gap: 8px; align-items: center; }
.controls input { width: 180px; accent-color: var(--c0); }
.controls select { font: inherit; } .controls label[hidden] { display: none; }
.controls button { font: inherit; color: var(--ink); background: none; border: 1px solid var(--line);
    border-radius: 6px; padding: 2px 10px; cursor: pointer; }
.controls button[aria-pressed=false] { opacity: .4; text-decoration: line-through; }
figure { position: relative; } figcaption { font-weight: 600; margin: 0 0 6px; }
figcaption span { font-weight: 400; color: var(--dim); }
svg { display: block; width: 100%; touch-action: pan-y; }
svg text { font-size: 13px; fill: var(--dim); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); }
.line { fill: none; stroke: currentColor; stroke-width: 2.2; stroke-linecap: round; stroke-linejoin: round; }
.faint { opacity: .28; stroke-width: 1.4; } .dash { stroke-dasharray: 7 5; }
.dot { fill: var(--card); stroke: currentColor; stroke-width: 2.2; }
.area { fill: currentColor; stroke: none; opacity: .88; } .cross { stroke: var(--dim); stroke-dasharray: 3 3; }
.tip { position: absolute; pointer-events: none; background: var(--paper); color: var(--ink);
    border: 1px solid var(--dim); border-radius: 6px;
    padding: 6px 10px; font-size: 14px; white-space: nowrap; display: none; z-index: 1; }
.tip b { font-weight: 600; }
.tip td { border: 0; padding: 0 0 0 12px; text-align: right; } .tip td:first-child { padding: 0; text-align: left; }
.parts { display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 6px 0 0; font-size: 14px; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); } .c7 { color: var(--c7); }
.p0 { color: #9a86d8; } .p1 { color: #4f94d8; } .p2 { color: #e0913f; } .p3 { color: #6bab5b; } .p4 {
    color: #d04848; } .p5 { color: #9aa0a6; }
details { margin: 16px 0 0; } summary { cursor: pointer; } pre { overflow-x: auto; font-size: 14px; }
@media (max-width: 600px) { body { padding: 14px 10px 32px; } h1 { font-size: 22px; } .card, figure {
    padding: 10px; } .tip { position: static; margin: 6px 0 0; } }
@media print { .controls { display: none; } }
),
};

static const char *const page_script[] = {
REPORT_TEXT(
"use strict";
var data = JSON.parse(document.getElementById("data").textContent), runs = data.runs, charts = [];
var slider = document.getElementById("smoothing"), weight = 0;
var over = document.getElementById("over"), timed = false;

/* Numbers: three digits and a prefix on axes; for a person who asks, as many as the kind of number needs. */
function axis_text(v, d) {
    var a = Math.abs(v), p = a >= 1e9 ? [1e9, "G"] : a >= 1e6 ? [1e6, "M"] : a >= 1e4 ? [1e3, "k"] : [1, ""];
    return a && d < 1e-3 ? Number(v.toPrecision(3)).toExponential() : String(Number((v / p[0]).toPrecision(4)))
        + p[1];
}
function fixed(digits, unit) { return function (v) { return v.toFixed(digits) + (unit || ""); }; }
function whole(v) { return Math.round(v).toLocaleString("en-US"); }
function scientific(v) { return v ? v.toExponential(2) : "0"; }
function escape_text(s) { return s.replace(/&/g, "&amp;").replace(/</g, "&lt;").split("\"").join("&quot;"); }

/* The text of an element. */
function tag(name, attributes, inside) {
    var words = Object.keys(attributes).map(function (key) {
        var value = attributes[key];
        return " " + key + "=\"" + (typeof value === "number" ? Number(value.toFixed(1)) : value) + "\"";
    });
    return "<" + name + words.join("") + ">" + (inside || "") + "</" + name + ">";
}

/* An exponential mean without the bias of its beginning, as TensorBoard has it. */
function smooth(y) {
    var last = 0, n = 0;
    return y.map(function (v) {
        if (v === null) return null;
        last = last * weight + (1 - weight) * v;
        n++;
        return last / (1 - Math.pow(weight, n));
    });
}

/* A round distance between ticks. */
function distance(span, count) {
    var unit = Math.pow(10, Math.floor(Math.log10(span / count))), times = span / count / unit;
    return unit * (times < 1.5 ? 1 : times < 3.5 ? 2 : times < 7.5 ? 5 : 10);
}
/* The ticks of the lower axis: both ends, and round numbers between that do not touch them. */
function ticks_of(low, high, count, least) {
    var d = Math.max(least, distance(high - low, count)), ticks = [low];
    for (var v = d * Math.ceil(low / d); v < high; v += d)
        if (v - low > 0.6 * d && high - v > 0.6 * d) ticks.push(v);
    ticks.push(high);
    return ticks;
}
),
REPORT_TEXT(
/* The places of a run's points: steps, or seconds since it began. */
function places(r) { return timed && r.t ? r.t : r.x; }

/* What a chart shows is a list of layers: a line, dots, or the area between two lines. */
function line_layers(c) {
    var layers = [];
    runs.forEach(function (r, n) {
        if (r.hidden) return;
        c.keys.forEach(function (key, k) {
            var y = r.values[key];
            if (!y) return;
            if (c.scale) y = y.map(function (v) { return v === null ? null : v / c.scale; });
            var name = (runs.length > 1 ? r.label : c.name) + (k || c.keys.length > 1 ? ", " + c.names[k] : "");
            var layer = {run: r, x: places(r), y: y, name: name, kind: "line", style: "c" + n % 8 + (k ? " dash" : "")};
            if (c.smooth && weight > 0) {
                layers.push({run: r, x: layer.x, y: y, style: layer.style + " faint", kind: "line", raw: true});
                layer.y = smooth(y);
                layer.under = y;
            }
            if (c.joined) { /* of steps far from each other: a line through those that have a value */
                layer.x = layer.x.filter(function (v, i) { return y[i] !== null; });
                layer.at = y.map(function (v, i) { return i; }).filter(function (i) { return y[i] !== null; });
                layer.y = y.filter(function (v) { return v !== null; });
            }
            layers.push(layer);
        });
        if (c.dots && r.values[c.dots])
            layers.push({run: r, x: places(r), y: r.values[c.dots], style: "c" + n % 8, kind: "dots",
                         name: (runs.length > 1 ? r.label + ", " : "") + "validation"});
    });
    return layers;
}
function part_layers(c) {
    var r = c.run, low = r.x.map(function () { return 0; });
    return r.hidden ? [] : data.parts.map(function (name, p) {
        var own = r.parts[p], bottom = low;
        low = bottom.map(function (v, i) { return v + own[i]; });
        return {run: r, x: places(r), y: low, low: bottom, name: name, style: "p" + p, kind: "area",
                text: function (i) { return own[i].toFixed(2) + " ms"; },
                share: function (i) { return (100 * own[i] / Math.max(1e-9, r.total[i])).toFixed(1) + " %"; }};
    });
}
function scaling_layers(c) {
    var known = runs.filter(function (r) { return r.ranks && r.rate && !r.hidden; });
    var first = known.reduce(function (a, b) { return b.ranks < a.ranks ? b : a; }, known[0]);
    if (!first) return [];
    var most = known.reduce(function (a, b) { return Math.max(a, b.ranks); }, 1);
    var ideal = {x: [1, most], y: [first.rate / first.ranks, first.rate * most / first.ranks],
                 style: "c7 dash", kind: "line", raw: true};
    return [ideal].concat(known.map(function (r) {
        var share = 100 * r.rate * first.ranks / first.rate / r.ranks;
        return {run: r, x: [r.ranks], y: [r.rate], name: r.label, style: "c" + runs.indexOf(r) % 8, kind: "dots",
                share: function () { return share.toFixed(1) + " % of the line"; }};
    }));
}
),
REPORT_TEXT(
/* The ticks of a logarithmic axis around a range: 1, 2 and 5 in each decade, of many decades the 1 alone. */
function log_ticks(low, high) {
    var ticks = [], steps = high / low > 1e4 ? [1] : [1, 2, 5];
    for (var p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
        steps.forEach(function (m) { ticks.push(Number((m + "e" + p))); });
    return ticks.filter(function (v, i) {
        return (i + 1 >= ticks.length || ticks[i + 1] > low) && (i === 0 || ticks[i - 1] < high);
    });
}
/* The smallest ranges that hold all layers, the second up to a tick. The axis of steps has all steps of a run, although
 * the first point may be a mean of some, and evaluations end earlier. Losses that fall by a factor of 10 are drawn on a
 * logarithmic axis: on another one the end of training is a flat line. */
function ranges(c, layers) {
    var x = [timed && !c.x_name ? 0 : Infinity, -Infinity], y = c.zero ? [0, -Infinity] : [Infinity, -Infinity];
    layers.forEach(function (l) {
        if (!timed && !c.x_name) x[0] = Math.min(x[0], l.run.first);
        if (!c.x_name) x[1] = Math.max(x[1], places(l.run)[l.run.x.length - 1]);
        l.y.forEach(function (v, i) {
            if (v === null) return;
            x = [Math.min(x[0], l.x[i]), Math.max(x[1], l.x[i])];
            y = [Math.min(y[0], v), Math.max(y[1], v)];
        });
    });
    if (x[1] < x[0]) return null;
    if (x[1] === x[0]) x[1] = x[0] + 1;
    if (y[1] === y[0]) y[1] = y[0] + (Math.abs(y[0]) || 1);
    var d = distance(y[1] - y[0], 5), ticks = [];
    if (c.log && y[0] > 0 && y[1] > 10 * y[0]) {
        ticks = log_ticks(y[0], y[1]);
        return {x: x, y: [ticks[0], ticks[ticks.length - 1]], d: ticks[0], ticks: ticks, log: true};
    }
    y = [d * Math.floor(y[0] / d + 1e-9), d * Math.ceil(y[1] / d - 1e-9)];
    for (var v = y[0]; v <= y[1] + d / 2; v += d) ticks.push(Math.abs(v) < d / 1e6 ? 0 : v);
    return {x: x, y: y, d: d, ticks: ticks, log: false};
}
function path_of(c, x, y) {
    var text = "", gap = true;
    y.forEach(function (v, i) {
        if (v !== null) text += (gap ? "M" : "L") + c.px(x[i]).toFixed(1) + " " + c.py(v).toFixed(1);
        if (v !== null && gap) text += "h.01"; /* a point between gaps is a dot */
        gap = v === null;
    });
    return text;
}
function layer_svg(c, l) {
    if (l.kind === "dots") return l.y.map(function (v, i) {
        return v === null ? "" : tag("circle", {class: "dot " + l.style, cx: c.px(l.x[i]), cy: c.py(v), r: 4});
    }).join("");
    if (l.kind === "line") return tag("path", {class: "line " + l.style, d: path_of(c, l.x, l.y)});
    var back = path_of(c, l.x.slice().reverse(), l.low.slice().reverse()).replace("M", "L").replace("h.01", "");
    return tag("path", {class: "area " + l.style, d: path_of(c, l.x, l.y).replace("h.01", "") + back + "z"});
}
function axes_svg(c, r) {
    var text = "", middle = (c.left + c.width - c.right) / 2;
    r.ticks.forEach(function (v) {
        text += tag("line", {class: "grid", x1: c.left, x2: c.width - c.right, y1: c.py(v), y2: c.py(v)});
        text += tag("text", {class: "y", "text-anchor": "end", x: c.left - 7, y: c.py(v) + 4.5},
                    axis_text(v, r.log ? v : r.d));
    });
    var ticks = ticks_of(r.x[0], r.x[1], Math.max(2, Math.floor(c.width / 90)), timed && !c.x_name ? 0 : 1);
    ticks.forEach(function (v) {
        text += tag("text", {class: "x", "text-anchor": "middle", x: c.px(v), y: c.height - 20}, axis_text(v, 1));
    });
    return text + tag("text", {"text-anchor": "middle", x: middle, y: c.height - 4},
                      c.x_name || (timed ? "seconds" : "step"));
}
),
REPORT_TEXT(
/* Draw a chart at the width that it has, so that its letters have the size of the page at any width. */
function draw(c) {
    var layers = c.layers(c), r = ranges(c, layers);
    c.left = 58;
    c.right = 24;
    c.width = Math.max(240, c.host.clientWidth);
    c.height = Math.round(Math.max(220, Math.min(340, c.width * 0.5)));
    c.drawn = layers.filter(function (l) { return !l.raw; });
    c.tip.style.display = "none";
    if (!r) { c.host.innerHTML = ""; return; }
    c.px = function (v) { return c.left + (c.width - c.left - c.right) * (v - r.x[0]) / (r.x[1] - r.x[0]); };
    c.py = function (v) {
        var up = r.log ? Math.log(v / r.y[0]) / Math.log(r.y[1] / r.y[0]) : (v - r.y[0]) / (r.y[1] - r.y[0]);
        return c.height - 40 - (c.height - 52) * up;
    };
    if (c.log) c.figure.querySelector("figcaption span").textContent = c.note + (r.log ? "; logarithmic axis" : "");
    c.host.innerHTML = tag("svg", {role: "img", "aria-label": escape_text(c.title), height: c.height,
                                   viewBox: "0 0 " + c.width + " " + c.height},
        axes_svg(c, r) + layers.map(function (l) { return layer_svg(c, l); }).join("") + tag("g", {class: "mark"}));
}

/* Show the values nearest to the pointer. */
function nearest(c, l, px) {
    var best = -1, away = l.kind === "dots" ? 20 : Infinity;
    l.y.forEach(function (v, i) {
        var d = v === null ? Infinity : Math.abs(c.px(l.x[i]) - px);
        if (d < away) { away = d; best = i; }
    });
    return best;
}
function place_name(c, l, i) {
    if (l.at) i = l.at[i];
    var r = l.run, before = i ? r.x[i - 1] + 1 : r.first;
    if (c.x_name) return c.x_name + " " + l.x[i];
    return (r.each > 1 ? "mean of steps " + before + " to " : "step ") + r.x[i]
        + (r.t && r.t[i] !== null ? ", " + r.t[i].toFixed(1) + " s" : "");
}
/* The row of a layer's point i: what it is called, and its value, smoothed or not. */
function row_of(c, l, i) {
    var key = tag("span", {class: "key " + l.style.split(" ")[0]});
    var row = tag("td", {}, key + escape_text(l.name)) + tag("td", {}, l.text ? l.text(i) : c.text(l.y[i]));
    if (l.under && l.under[i] !== null) row += tag("td", {}, c.text(l.under[i]));
    if (l.share) row += tag("td", {}, l.share(i));
    return tag("tr", {}, row);
}
function hover(c, event) {
    var box = c.host.getBoundingClientRect(), px = (event.clientX - box.left) * c.width / box.width;
    var rows = "", marks = "", at = null, place = "";
    c.drawn.forEach(function (l) {
        var i = nearest(c, l, px);
        if (i < 0) return;
        if (at === null) { at = c.px(l.x[i]); place = place_name(c, l, i); }
        rows += row_of(c, l, i);
        if (l.kind !== "area")
            marks += tag("circle", {class: "dot " + l.style.split(" ")[0], r: 5, cx: c.px(l.x[i]), cy: c.py(l.y[i])});
    });
    if (at === null) return leave(c);
    if (c.smooth && weight > 0)
        rows = tag("tr", {}, tag("td", {}) + tag("td", {}, "smoothed") + tag("td", {}, "value")) + rows;
    c.host.querySelector(".mark").innerHTML =
        tag("line", {class: "cross", x1: at, x2: at, y1: 12, y2: c.height - 40}) + marks;
    c.tip.innerHTML = tag("b", {}, place) + tag("table", {}, rows);
    c.tip.style.display = "block";
    var left = c.host.offsetLeft + at * box.width / c.width, width = c.figure.clientWidth, own = c.tip.offsetWidth;
    left = left > width / 2 ? left - own - 12 : Math.min(width - own - 4, left + 12);
    c.tip.style.left = Math.max(4, left) + "px";
    c.tip.style.top = c.host.offsetTop + 8 + "px";
}
function leave(c) {
    var mark = c.host.querySelector(".mark");
    if (mark) mark.innerHTML = "";
    c.tip.style.display = "none";
}
),
REPORT_TEXT(
function add(c) {
    var figure = document.createElement("figure");
    if (!c.layers(c).some(function (l) { return l.y.some(function (v) { return v !== null; }); })) return;
    var parts = data.parts.map(function (name, p) {
        return tag("span", {}, tag("span", {class: "key p" + p}) + name);
    });
    figure.innerHTML = tag("figcaption", {}, escape_text(c.title) + (c.note ? " " + tag("span", {}, c.note) : ""))
        + tag("div", {class: "host"}) + tag("div", {class: "tip"})
        + (c.run ? tag("div", {class: "parts"}, parts.join("")) : "");
    document.getElementById("charts").appendChild(figure);
    c.figure = figure;
    c.host = figure.querySelector(".host");
    c.tip = figure.querySelector(".tip");
    c.host.addEventListener("pointermove", function (event) { hover(c, event); });
    c.host.addEventListener("pointerdown", function (event) { hover(c, event); });
    c.host.addEventListener("pointerleave", function () { leave(c); });
    charts.push(c);
}
function draw_all() {
    weight = Number(slider.value);
    timed = over.value === "time";
    document.getElementById("weight").textContent = weight.toFixed(2);
    charts.forEach(draw);
}
function most_of(key) {
    var most = 0;
    runs.forEach(function (r) { (r.values[key] || []).forEach(function (v) { most = Math.max(most, v); }); });
    return most;
}
var gib = Math.max(most_of("memory_bytes"), most_of("memory_peak_bytes")) >= 1073741824;
[
    {title: "Loss", note: "dots: validation", name: "training", keys: ["loss"], dots: "val_loss",
     text: fixed(4), smooth: true, log: true},
    {title: "Accuracy", note: "right answers among held-out samples, %", name: "accuracy", keys: ["val_accuracy"],
     text: fixed(1, " %"), scale: 0.01, zero: true, joined: true},
    {title: "Throughput", note: data.things + " per second, all ranks", name: "throughput",
     keys: ["tokens_per_second"], text: whole, smooth: true, zero: true},
    {title: "Gradient norm", note: "before clipping", name: "norm", keys: ["grad_norm"],
     text: fixed(3), smooth: true, zero: true},
    {title: "Learning rate", name: "rate", keys: ["lr"], text: scientific, zero: true},
    {title: "Library memory", note: (gib ? "GiB" : "MiB") + ", the rank that holds most; dashes: peak", name: "memory",
     keys: ["memory_bytes", "memory_peak_bytes"], names: ["in use", "peak"],
     text: fixed(1, gib ? " GiB" : " MiB"), scale: gib ? 1073741824 : 1048576, zero: true}
].forEach(function (c) { c.layers = line_layers; add(c); });
if (data.scaling) add({title: "Scaling", note: "mean rate; dashes: in proportion to the ranks",
    layers: scaling_layers, text: whole, zero: true, x_name: "ranks"});
runs.forEach(function (r) {
    if (r.parts) add({title: "Time of a step" + (runs.length > 1 ? ": " + r.label : ""), note: "ms", run: r,
        layers: part_layers, text: fixed(2), zero: true});
});
document.querySelectorAll("button[data-run]").forEach(function (button) {
    button.addEventListener("click", function () {
        var r = runs[button.dataset.run];
        r.hidden = !r.hidden;
        button.setAttribute("aria-pressed", String(!r.hidden));
        draw_all();
    });
});
slider.addEventListener("input", draw_all);
over.addEventListener("change", draw_all);
over.parentNode.hidden = !runs.every(function (r) { return r.t; });
window.addEventListener("resize", draw_all);
draw_all();
),
};
/* clang-format on */

#endif /* REPORT_SCRIPT_H */
