#!/bin/sh
# Whole weights against the programs that read them: what the Python packages safetensors, torch and transformers find
# in checkpoints and exports is what C wrote, C imports what they write, and a GPT of tools/train_gpt is the same model
# in transformers: equal logits. Skips by name when there is no python with these packages (tests/scripts/python.sh).
. tests/support/shell.sh
program=$build/export_gpt2
[ -x "$program" ] || make -s BUILD="$build" "$program" || exit 1

# ---- C alone: it runs without Python ----
good "export, then import under another strategy" 'imported 28 of 28 parameters' sh -c "
    '$program' 3 full_shard export='$tmp/c.safetensors' values='$tmp/c.values' logits='$tmp/c.logits' >/dev/null &&
    '$program' 2 zero3 seed=2 import='$tmp/c.safetensors' values='$tmp/d.values' logits='$tmp/d.logits'"
# The padding of a GPT is zero, and import makes it zero again.
try "values after import are those before export" cmp "$tmp/c.values" "$tmp/d.values"
bad "import of what is not there" "none cannot be opened: No such file" "$program" 2 ddp import="$tmp/none"

# ---- Python ----
python=$(BUILD=$build sh tests/scripts/python.sh 2>"$tmp/why")
if [ -z "$python" ]; then
    skip "safetensors, torch and transformers" "$(cat "$tmp/why")" 26
    finish
fi
cat >"$tmp/weights.py" <<'PYTHON'
import glob, json, os, re, sys
os.environ["TRANSFORMERS_OFFLINE"] = "1"
import numpy as np
import torch
import safetensors, safetensors.numpy, safetensors.torch

VOCAB, SEQ, BATCH = 300, 16, 2
TURNED = re.compile(r"(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")

def model(listing, values):
    """What C says that it has: {name: array}."""
    flat, found, at = np.fromfile(values, dtype="<f4"), {}, 0
    for line in open(listing):
        if not line.startswith("value "): continue
        _, name, rows, columns = line.split()
        shape = [int(rows)] + ([int(columns)] if int(columns) else [])
        count = int(np.prod(shape))
        found[name] = flat[at:at + count].reshape(shape)
        at += count
    assert at == len(flat) and len(found) == 28, (at, len(flat), len(found))
    return found

def same(name, a, b):
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    assert a.dtype == b.dtype and a.shape == b.shape, (name, a.dtype, a.shape, b.dtype, b.shape)
    assert a.tobytes() == b.tobytes(), name + " differs"

def checkpoint(folder, listing, values):
    """Pieces of all shard files, put together, are the model."""
    expected = model(listing, values)
    flat = {name: np.full(value.size, np.nan, "<f4") for name, value in expected.items()}
    files = sorted(glob.glob(folder + "/step-000000000001/model-*.safetensors"))
    pieces = 0
    for path in files:
        with safetensors.safe_open(path, framework="numpy") as file:
            assert file.metadata()["format"] == "pt"
            for key in file.keys():
                name, _, cut = key.partition("[")
                value = file.get_tensor(key).reshape(-1)
                first, end = map(int, cut[:-1].split(":")) if cut else (0, flat[name].size)
                assert np.isnan(flat[name][first:end]).all(), key
                flat[name][first:end] = value
                pieces += cut != ""
    for name, value in expected.items(): same(name, flat[name].reshape(value.shape), value)
    print("%d files, %d pieces: as written" % (len(files), pieces))

def export(path, listing, values):
    found = safetensors.numpy.load_file(path)
    expected = model(listing, values)
    assert set(found) == set(expected), set(found) ^ set(expected)
    for name, value in expected.items(): same(name, found[name], value)
    with safetensors.safe_open(path, framework="pt") as file: assert file.metadata() == {"format": "pt"}
    print("28 tensors: as written")

def loaded(path, dtype, listing, values):
    """torch loads it, and rounds as C has rounded; names, transposes and vocabulary of Hugging Face."""
    found, dtype = safetensors.torch.load_file(path), getattr(torch, dtype)
    expected = model(listing, values)
    assert set(found) == set(expected)
    for name, value in expected.items():
        value = torch.from_numpy(value.copy())
        if name == "wte.weight": value = value[:VOCAB]
        if TURNED.search(name): value = value.t()
        got = found[name]
        assert got.dtype == dtype and got.shape == value.shape, (name, got.dtype, got.shape)
        assert torch.equal(got, value.to(dtype)), name + " differs"
    print("28 tensors of %s: as torch rounds" % dtype)

def write(path, dtype, listing, values, expected):
    """Random numbers for C: expected has what it should find."""
    torch.manual_seed(3)
    tensors, flat = {}, []
    for name, value in model(listing, values).items():
        tensors[name] = torch.randn(value.shape).to(getattr(torch, dtype))
        flat.append(tensors[name].float().numpy().reshape(-1))
    order = list(tensors)
    if dtype == "float32": safetensors.numpy.save_file({name: tensors[name].numpy() for name in reversed(order)}, path)
    else: safetensors.torch.save_file({name: tensors[name] for name in reversed(order)}, path)
    np.concatenate(flat).astype("<f4").tofile(expected)

def config():
    import transformers
    return transformers.GPT2Config(vocab_size=VOCAB, n_positions=24, n_embd=32, n_layer=2, n_head=4,
                                   resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)

def compare(gpt, logits):
    tokens = torch.tensor([(7 * i + 3) % VOCAB for i in range(BATCH * SEQ)]).view(BATCH, SEQ)
    with torch.no_grad(): ours = gpt.eval()(tokens).logits.reshape(-1, VOCAB).numpy()
    theirs = np.fromfile(logits, dtype="<f4").reshape(-1, VOCAB)
    worst = np.abs(ours - theirs).max()
    assert np.abs(ours).max() > 1 and ours.std() > 0.3, "logits that would hide a mistake"
    assert worst <= 1e-4, "logits differ by %g" % worst
    print("logits up to %.2f differ by at most %.1e" % (np.abs(ours).max(), worst))

def gpt2(folder, logits):
    import transformers
    config().save_pretrained(folder)
    with open(folder + "/config.json") as file: assert json.load(file)["model_type"] == "gpt2"
    gpt, info = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    missing = [key for key in info["missing_keys"] if key != "lm_head.weight"] # tied
    assert not missing and not info["unexpected_keys"] and not info["mismatched_keys"], info
    compare(gpt, logits)

def saved(folder, size):
    """A random model of transformers, with biases and norms that are not 0 and 1."""
    import transformers
    torch.manual_seed(4)
    gpt = transformers.GPT2LMHeadModel(config())
    for parameter in gpt.parameters(): parameter.data.normal_(0, 0.15 if parameter.dim() == 2 else 0.3)
    gpt.save_pretrained(folder, safe_serialization=True, max_shard_size=size)
    torch.save(gpt, folder + "/gpt.pt")
    print(sorted(os.listdir(folder)))

def same_logits(folder, logits): compare(torch.load(folder + "/gpt.pt"), logits)

globals()[sys.argv[1]](*sys.argv[2:])
PYTHON
weights() { "$python" "$tmp/weights.py" "$@"; }

# ---- Files ----
"$program" 3 full_shard checkpoint="$tmp/run" export="$tmp/own" names=own values="$tmp/own.values" >"$tmp/own.list"
result "a checkpoint and an export" $?
good "safetensors reads the shard files of a checkpoint" 'as written' "$python" "$tmp/weights.py" checkpoint "$tmp/run" "$tmp/own.list" "$tmp/own.values"
good "safetensors reads an export" 'as written' "$python" "$tmp/weights.py" export "$tmp/own" "$tmp/own.list" "$tmp/own.values"
for dtype in f32/float32 bf16/bfloat16 f16/float16; do
    type=${dtype%/*} torch=${dtype#*/}
    only=
    [ "$type" = f32 ] || only=dtype=$type
    "$program" 2 zero1 export="$tmp/$type" values="$tmp/$type.values" $only >"$tmp/$type.list"
    result "an export as $type" $?
    good "torch loads it: $torch" 'as torch rounds' "$python" "$tmp/weights.py" loaded "$tmp/$type" "$torch" "$tmp/$type.list" "$tmp/$type.values"
    try "Python writes $torch" weights write "$tmp/py" "$torch" "$tmp/own.list" "$tmp/own.values" "$tmp/py.values"
    try "C imports it" "$program" 3 shard_grad_op seed=8 import="$tmp/py" names=own values="$tmp/c.values"
    try "and has the same bits" cmp "$tmp/py.values" "$tmp/c.values"
done

# ---- GPT-2 ----
mkdir "$tmp/hf"
"$program" 2 full_shard export="$tmp/hf/model.safetensors" logits="$tmp/hf.logits"
result "a GPT under the names of Hugging Face" $?
good "transformers has the same logits" 'differ by at most' "$python" "$tmp/weights.py" gpt2 "$tmp/hf" "$tmp/hf.logits"
for size in 10MB 50KB; do
    file=model.safetensors
    good "transformers saves a GPT-2, files of $size" 'safetensors' "$python" "$tmp/weights.py" saved "$tmp/$size" "$size"
    good "C imports it" 'imported 28 of 28' "$program" 3 full_shard import="$tmp/$size/$file" logits="$tmp/$size.logits"
    good "and has the same logits" 'differ by at most' "$python" "$tmp/weights.py" same_logits "$tmp/$size" "$tmp/$size.logits"
done
finish
