#!/bin/sh
# GPT-2 and Llama as others have them: checkpoints of llm.c, ten steps of training, generation and the tokenizer, beside
# what PyTorch and transformers compute on the same random weights. The files of llm.c are written here by Python, from
# the description of the format. Python's part is skipped by name where there are no such packages (python.sh).
. tests/support/shell.sh
program=$build/export_gpt2 gpt=$build/train_gpt tokenize=$build/tokenize
for one in export_gpt2 train_gpt tokenize llama llama_logits; do
    [ -x "$build/$one" ] || make -s BUILD="$build" "$build/$one" || exit 1
done

# ---- C alone: it runs without Python ----
"$program" 2 ddp export="$tmp/a.bin" values="$tmp/a.values" >/dev/null; result "export as llm.c" $?
"$program" 2 ddp export="$tmp/b.bin" dtype=bf16 >/dev/null; result "in bf16" $?
for run in "1 ddp" "2 zero1" "3 full_shard" "3 zero3" "2 shard_grad_op"; do
    set -- $run
    try "import, $2, $1 ranks" "$program" "$1" "$2" seed=2 import="$tmp/a.bin" export="$tmp/c.bin" values="$tmp/c.values"
    try "the same values" cmp "$tmp/a.values" "$tmp/c.values"
    try "export again: the same bytes" cmp "$tmp/a.bin" "$tmp/c.bin"
    good "bf16, converted by train_gpt" exported "$gpt" --threads 1 --ranks "$1" --strategy "$2" --steps 0 --import "$tmp/b.bin" --export "$tmp/d.bin" --export-dtype bf16
    try "the same bytes" cmp "$tmp/b.bin" "$tmp/d.bin"
done
good "to Hugging Face" exported "$gpt" --threads 1 --ranks 2 --strategy full_shard --steps 0 --import "$tmp/a.bin" --export "$tmp/model.safetensors"
good "and back, with the sizes of config.json" exported "$gpt" --threads 1 --ranks 3 --strategy zero3 --steps 0 --import "$tmp/model.safetensors" --export "$tmp/e.bin"
try "the same bytes" cmp "$tmp/a.bin" "$tmp/e.bin"
good "a training run takes its sizes from the file" 'symbols: 0.04 M parameters' \
    "$gpt" --threads 1 --ranks 2 --strategy ddp --import "$tmp/a.bin" --steps 2 --eval-batches 0 --sample 5 --data README.md --vocab 300 --export "$tmp/f.bin"
cmp -s "$tmp/a.bin" "$tmp/f.bin"; result "and changes them" $((1 - $?))

to_none="--steps 0 --export $tmp/none.bin"

# ---- config.json: what it says of how to compute is computed, or refused by key and value ----
mkdir "$tmp/said" "$tmp/again"
"$gpt" --steps 0 --import "$tmp/a.bin" --export "$tmp/said/model.safetensors" >/dev/null; cp "$tmp/said/config.json" "$tmp/plain"
# say TEXT: the model of $tmp/said with TEXT at the end of its config.json
say() { sed "\$s/}\$/, $1}/" "$tmp/plain" >"$tmp/said/config.json"; }
to_again="--steps 0 --export $tmp/again/model.safetensors"
for key in '"activation_function": "gelu"' '"scale_attn_weights": false' '"scale_attn_by_inverse_layer_idx": true' '"n_inner": 96' \
    '"tie_word_embeddings": false' '"add_cross_attention": true' '"model_type": "llama"' '"quantization_config": {"bits": 4}' '"num_attention_heads": 2'; do
    say "$key"
    name=$(echo "$key" | cut -d '"' -f 2) value=$(echo "$key" | sed 's/.*: "\{0,1\}//; s/["}]*$//')
    bad "$key" "said/config.json: \"$name\" is .*$value.* and this model computes nothing but" "$gpt" $to_again --import "$tmp/said"
done
for key in '"layer_norm_epsilon": 0' '"layer_norm_epsilon": "x"' '"n_head": 2.5' '"n_layer": -1'; do
    say "$key"; bad "$key" 'config.json: ' "$gpt" $to_again --import "$tmp/said"
done
say '"n_head": 2, "activation_function": "relu", "layer_norm_epsilon": 0.001, "bos_token_id": 7, "eos_token_id": [8, 9], "pad_token_id": 1, "x": {"y": null}'
good "another activation, epsilon, number of heads; a directory" exported "$gpt" $to_again --import "$tmp/said"
try "export writes what was imported" cmp "$tmp/said/config.json" "$tmp/again/config.json"
good "in another type" exported "$gpt" $to_again --import "$tmp/said" --export-dtype bf16
sed 's/"float32"/"bfloat16"/' "$tmp/said/config.json" | cmp -s - "$tmp/again/config.json"; result "export says the type" $?
bad "other heads" '--heads is 4, and .*said/model.safetensors was trained with 2' "$gpt" $to_again --import "$tmp/said" --heads 4
bad "another activation" '--activation is silu, and .* was trained with relu' "$gpt" $to_again --import "$tmp/said" --activation silu
bad "another epsilon" '--norm-epsilon is 1e-05, and .* was trained with 0.001' "$gpt" $to_again --import "$tmp/said" --norm-epsilon 1e-5
bad "llm.c has neither" 'llm.c computes gelu_new with an epsilon of 1e-05' "$gpt" $to_none --import "$tmp/said"
printf '\357\273\277' | cat - "$tmp/plain" >"$tmp/said/config.json"
bad "a BOM" 'config.json: expected UTF-8 without a byte order mark' "$gpt" $to_again --import "$tmp/said"
printf 'version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n' >"$tmp/said/config.json"
bad "a pointer of git-lfs" 'config.json is a pointer of git-lfs' "$gpt" $to_again --import "$tmp/said"
rm "$tmp/said/config.json"
good "without config.json: what is assumed is said" 'no .*said/config.json: taken for a GPT-2 of 4 heads, gelu_new and an epsilon of 1e-05; --heads' \
    "$gpt" $to_none --import "$tmp/said" --layers 2 --channels 32 --heads 4 --seq 24 --vocab 300
rm -f "$tmp/none.bin"
cp "$tmp/said/model.safetensors" "$tmp/weights"
mkdir "$tmp/hf0"; cp "$tmp/plain" "$tmp/hf0/config.json"; cp "$tmp/weights" "$tmp/hf0/model.safetensors"
foreign() { name=$1 pattern=$2; printf "$3" >"$tmp/said/model.safetensors"; head -c 3000 /dev/zero >>"$tmp/said/model.safetensors"
    bad "$name" "said/model.safetensors: this is $pattern" "$gpt" $to_again --import "$tmp/said"; }
foreign "a pointer of git-lfs" 'a pointer of git-lfs' 'version https://git-lfs.github.com/spec/v1\noid'
foreign "torch's zip" "torch's own format" 'PK\003\004'
foreign "torch's pickle" "torch's own format" '\200\002\212\012l\374\234F'
foreign "a web page" "a web page" '<!DOCTYPE html>'
rm "$tmp/said/model.safetensors"
bad "nothing there" 'has no model.safetensors, and none with an index' "$gpt" $to_again --import "$tmp/said"
touch "$tmp/said/pytorch_model.bin"
bad "torch's file alone" "only torch's pytorch_model.bin" "$gpt" $to_again --import "$tmp/said"

# ---- a Llama's ----
mkdir "$tmp/llama" "$tmp/llama2"
good "a Llama, and its config.json" 'step     2' "$build/llama" --ranks 1 --steps 2 --export "$tmp/llama/model.safetensors"
cp "$tmp/llama/config.json" "$tmp/plain"
say() { sed "\$s/}\$/, $1}/" "$tmp/plain" >"$tmp/llama/config.json"; }
to_again="--ranks 1 --steps 1 --export $tmp/llama2/model.safetensors"
for key in 'hidden_act: "gelu"' 'attention_bias: true' 'mlp_bias: true' 'head_dim: 64' 'model_type: "qwen2"' 'rope_scaling.type: "linear"' \
    'rope_scaling.rope_type: "llama3"' 'rope_parameters.rope_type: "yarn"' 'rope_parameters.partial_rotary_factor: 0.5' 'sliding_window: 4096'; do
    name=${key%%:*} value=${key#*: } inner=$(echo "$name" | sed -n 's/.*\.//p')
    if [ -n "$inner" ]; then say "\"${name%%.*}\": {\"$inner\": $value, \"z\": 1}"; else say "\"$name\": $value"; fi
    bad "$key" "llama/config.json: \"$name\" is $(echo $value | tr -d '\"'), and this model computes nothing but" "$build/llama" --import "$tmp/llama" $to_again
done
say '"rms_norm_eps": "x"'; bad "no epsilon" 'its sizes are not those of a Llama' "$build/llama" --import "$tmp/llama" $to_again
say '"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}, "eos_token_id": [3, 4], "pad_token_id": 5'
good "rope_parameters of transformers 5" 'step     1' "$build/llama" --import "$tmp/llama" $to_again
try "export writes what was imported" cmp "$tmp/llama/config.json" "$tmp/llama2/config.json"
bad "no Llama" '"model_type" is gpt2' "$build/llama" --import "$tmp/hf0"
bad "no model" 'none: No such file' "$build/llama" --import "$tmp/none"
mkdir "$tmp/alone"; cp "$tmp/weights" "$tmp/alone/model.safetensors"
bad "weights alone" 'there is no .*alone/config.json' "$build/llama" --import "$tmp/alone"

# spoil NAME OFFSET: $tmp/bad.bin is $tmp/a.bin with the byte there replaced by the one that printf makes of NAME
spoil() { cp "$tmp/a.bin" "$tmp/bad.bin"; printf "$1" | dd of="$tmp/bad.bin" bs=1 seek="$2" conv=notrunc 2>/dev/null; }
head -c 100000 "$tmp/a.bin" >"$tmp/bad.bin"
bad "cut off" 'bad.bin has 100000 bytes, expected [0-9]+ after its header' "$gpt" $to_none --import "$tmp/bad.bin"
head -c 1000 "$tmp/a.bin" >"$tmp/bad.bin"
bad "cut off in the header" 'bad.bin ends at byte 1000' "$gpt" $to_none --import "$tmp/bad.bin"
spoil '\002' 4;  bad "another version" 'is of version 2, expected 3 \(F32\) or 5' "$gpt" $to_none --import "$tmp/bad.bin"
spoil '\005' 20; bad "heads that do not divide" '32 channels, 5 heads' "$gpt" $to_none --import "$tmp/bad.bin"
spoil '\000' 16; bad "no layers" 'layers is 0' "$gpt" $to_none --import "$tmp/bad.bin"
spoil '\377' 31; bad "negative numbers" 'padded vocabulary is -' "$gpt" $to_none --import "$tmp/bad.bin"
spoil '\000' 0;  bad "another magic: no model of llm.c" 'bad.bin' "$gpt" $to_none --import "$tmp/bad.bin"
bad "another model" '2 layers, 4 heads, 32 channels, 24 positions and 300 symbols, expected 3, 4' "$gpt" $to_none --import "$tmp/a.bin" --layers 3
bad "other layers" '--import: .* does not fit this model: .*' "$gpt" $to_none --import "$tmp/hf0" --layers 1
! grep -q '`' "$tmp/err"; result "no advice that the program cannot take" $? "$tmp/err"
bad "fp16" 'llm.c has fp32 and bf16' "$gpt" $to_none --import "$tmp/a.bin" --export-dtype fp16
bad "a directory that cannot be made" '--export /proc/nowhere/x.bin cannot be written' "$gpt" --steps 0 --import "$tmp/a.bin" --export /proc/nowhere/x.bin
bad "nothing to do" 'without --export does nothing' "$gpt" --steps 0 --import "$tmp/a.bin"
bad "a probe without training" "--probe-links does nothing with --steps 0" "$gpt" --steps 0 --probe-links --import "$tmp/a.bin" --export "$tmp/none.bin"
bad "no model" 'needs a model' "$gpt" --generate 5
[ ! -e "$tmp/none.bin" ]; result "nothing is written after errors" $?

# ---- Generation ----
# ids ...: the numbers that train_gpt writes
ids() { "$gpt" --threads 1 --import "$tmp/a.bin" "$@" 2>/dev/null | sed -n '1s/ $//p'; }
ids --generate 60 --prompt "5 9 2" --temperature 0 >"$tmp/cached"
ids --generate 60 --prompt "5 9 2" --temperature 0 --no-cache >"$tmp/full"
[ "$(wc -w <"$tmp/cached")" -eq 63 ] && [ "$(tr ' ' '\n' <"$tmp/cached" | sort -u | wc -l)" -gt 8 ]
result "60 tokens behind 3, of a model of 24 positions" $?
try "with and without a cache: the same tokens" cmp "$tmp/cached" "$tmp/full"
for run in "2 ddp" "3 full_shard" "3 zero3" "2 zero1"; do
    set -- $run
    ids --generate 60 --prompt "5 9 2" --temperature 0 --ranks "$1" --strategy "$2" >"$tmp/other"
    try "$2, $1 ranks: the same tokens" cmp "$tmp/cached" "$tmp/other"
done
for precision in fp32 bf16; do
    if [ ! -x "$build/emu/train_gpt" ]; then skip "an emulated GPU, $precision" "$build/emu/train_gpt is not built"; continue; fi
    for cache in "" --no-cache; do
        "$build/emu/train_gpt" --device cuda --import "$tmp/a.bin" --precision $precision --generate 12 --prompt "5 9 2" --temperature 0 \
            $cache 2>/dev/null | sed -n '1s/ $//p' >"$tmp/other"
        cut -d ' ' -f 1-15 "$tmp/cached" | cmp -s - "$tmp/other"; result "an emulated GPU, $precision $cache" $?
    done
done
ids --generate 30 --prompt 5 --seed 7 --temperature 1.5 >"$tmp/one"
for precision in fp32 bf16; do
    if [ ! -x "$build/emu/train_gpt" ]; then skip "an emulated GPU, $precision" "$build/emu/train_gpt is not built"; continue; fi
    for cache in "" --no-cache; do
        "$build/emu/train_gpt" --device cuda --import "$tmp/a.bin" --precision $precision --generate 12 --prompt "5 9 2" --temperature 0 \
            $cache 2>/dev/null | sed -n '1s/ $//p' >"$tmp/other"
        cut -d ' ' -f 1-15 "$tmp/cached" | cmp -s - "$tmp/other"; result "an emulated GPU, $precision $cache" $?
    done
done
ids --generate 30 --prompt 5 --seed 7 --temperature 1.5 --no-cache >"$tmp/two"
ids --generate 30 --prompt 5 --seed 8 --temperature 1.5 >"$tmp/three"
try "drawn tokens are those of the seed" cmp "$tmp/one" "$tmp/two"
cmp -s "$tmp/one" "$tmp/three"; result "and others of another" $((1 - $?))
ids --generate 30 --prompt "5 9 2" --temperature 3 --top-k 1 >"$tmp/one"
cut -d ' ' -f 1-33 "$tmp/cached" >"$tmp/two"
try "top-k of 1 is the most likely token" cmp "$tmp/one" "$tmp/two"
ids --generate 30 --prompt "5 9 2" --temperature 3 --top-p 0.0000001 >"$tmp/one"
try "top-p of nearly 0 too" cmp "$tmp/one" "$tmp/two"
good "speed is told" 'generated +30 tokens with a cache.* tokens/s' "$gpt" --import "$tmp/a.bin" --generate 30
bad "a prompt that is no number" 'takes numbers of tokens, 0 to 299' "$gpt" --import "$tmp/a.bin" --generate 5 --prompt "5 x"
bad "a prompt outside the vocabulary" 'takes numbers of tokens, 0 to 299' "$gpt" --import "$tmp/a.bin" --generate 5 --prompt 300

# ---- tokenizer.json: read, or refused by the name of what is another kind ----
mkdir "$tmp/json"
cat >"$tmp/tokenizer" <<'JSON'
{"version": "1.0", "truncation": null, "padding": null,
 "added_tokens": [{"id": 5, "content": "<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
 "normalizer": null,
 "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
 "post_processor": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true}, "decoder": {"type": "ByteLevel"},
 "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "", "end_of_word_suffix": null, "fuse_unk": false,
  "byte_fallback": false, "ignore_merges": false, "vocab": {"a": 0, "b": 1, "\u0120": 2, "ab": 3, "\u0120ab": 4}, "merges": ["a b", ["\u0120", "ab"]]}}
JSON
cp "$tmp/tokenizer" "$tmp/json/tokenizer.json"
for path in "$tmp/json" "$tmp/json/tokenizer.json"; do
    ids=$(printf 'ab abab<|endoftext|>a' | "$tokenize" "$path" encode | od -An -td4 | tr -s ' \n' ' ')
    [ "$ids" = " 3 4 3 5 0 " ]; result "encoded: $ids" $?
done
[ "$(printf 'ab abab<|endoftext|>a' | "$tokenize" "$tmp/json" encode | "$tokenize" "$tmp/json" decode)" = 'ab abab<|endoftext|>a' ]; result "decoded" $?
printf '\320\001\006\001\076\001%.0s' 1 2 3 4 5 6 7 8 >"$tmp/train.bin" # tokens of nanoGPT
bad "tokens as text" 'train.bin is no text, which --tokenizer encodes; tokens of nanoGPT are --data-format u16' "$gpt" --tokenizer "$tmp/json" --data "$tmp/train.bin"
bad "tokens as bytes" 'train.bin seems to be no text.* --data-format bytes, bin, u16 or u32' "$gpt" --vocab 50257 --data "$tmp/train.bin"
bad "a model as data" 'a.bin seems to be a model of llm.c, by its magic 20240326' "$gpt" --data "$tmp/a.bin"
# other NAME PATTERN SED: the file changed by SED is refused
other() { sed "$3" "$tmp/tokenizer" >"$tmp/json/tokenizer.json"; bad "$1" "tokenizer.json: $2" "$tokenize" "$tmp/json" encode </dev/null; }
other "a normalizer" '"normalizer" is NFC, expected none' 's/"normalizer": null/"normalizer": {"type": "NFC"}/'
other "a Sequence of them" '"normalizer" is Sequence, expected none' 's/"normalizer": null/"normalizer": {"type": "Sequence", "normalizers": []}/'
other "another model" '"type" of "model" is Unigram, expected BPE' 's/"type": "BPE"/"type": "Unigram"/'
other "bytes behind characters" '"byte_fallback" of "model" is true, expected false' 's/"byte_fallback": false/"byte_fallback": true/'
other "a prefix of words" '"continuing_subword_prefix" of "model" is ##' 's/_prefix": ""/_prefix": "##"/'
other "dropout" '"dropout" of "model" is 0.1' 's/"dropout": null/"dropout": 0.1/'
other "another cut" '"pre_tokenizer" is Metaspace, expected ByteLevel' 's/"type": "ByteLevel", "add_prefix_space": false/"type": "Metaspace"/'
other "no cut" '"pre_tokenizer" is null, expected ByteLevel' '/"pre_tokenizer"/s/{.*}/null/'
other "a blank before a text" '"add_prefix_space" of "pre_tokenizer" is true, expected false' 's/"add_prefix_space": false/"add_prefix_space": true/'
other "bytes alone" '"pre_tokenizer" is no ByteLevel that cuts texts' '/"pre_tokenizer"/s/"use_regex": true/"use_regex": false/'
other "another expression" 'the expression of "pre_tokenizer" is x\+, expected that of GPT-2, Llama 3 or Qwen 2' \
    '/"pre_tokenizer"/s/{.*}/{"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": false}/'
other "another behaviour" '"behavior" of "pre_tokenizer" is Removed' '/"pre_tokenizer"/s/{.*}/{"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Removed"}/'
other "digits apart" '"pre_tokenizer" is Digits' '/"pre_tokenizer"/s/{.*}/{"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]}/'
other "blanks taken" '"lstrip" of an added token is true, expected false' 's/"lstrip": false/"lstrip": true/'
other "an id twice" 'id [0-9] is there twice' 's/"b": 1/"b": 0/'
other "an id too large" 'id 7 is there twice or beyond the 6 tokens' 's/"id": 5/"id": 7/'
other "a merge of nothing" 'expected before it, two tokens that the vocabulary has, and their union' 's/"a b"/"b a"/'
other "no merges" '"model" is without vocab or merges' 's/, "merges": .*/}}/'
printf '\357\273\277' | cat - "$tmp/tokenizer" >"$tmp/json/tokenizer.json"
bad "a BOM" 'tokenizer.json: expected UTF-8 without a byte order mark' "$tokenize" "$tmp/json" encode
printf 'version https://git-lfs.github.com/spec/v1\n' >"$tmp/json/tokenizer.json"
bad "a pointer of git-lfs" 'tokenizer.json is a pointer of git-lfs' "$tokenize" "$tmp/json" encode
rm "$tmp/json/tokenizer.json"; touch "$tmp/json/tokenizer.model"
bad "SentencePiece" "only SentencePiece's tokenizer.model" "$tokenize" "$tmp/json" encode
bad "no tokenizer" 'has no tokenizer.json, and no vocab.json$' "$tokenize" "$tmp/said" encode

# ---- Python ----
python=$(BUILD=$build sh tests/scripts/python.sh 2>"$tmp/why")
if [ -z "$python" ]; then
    skip "torch and transformers" "$(cat "$tmp/why")" 70
    finish
fi
cat >"$tmp/models.py" <<'PYTHON'
import math, os, re, struct, sys
os.environ["TRANSFORMERS_OFFLINE"] = "1"
import numpy as np
import safetensors.torch
import torch
import transformers

VOCAB, SEQ, BATCH, LAYERS = 300, 16, 2, 2
KINDS = ["ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias",
         "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"]

def tokens(): return torch.tensor([(7 * i + 3) % VOCAB for i in range(BATCH * SEQ)]).view(BATCH, SEQ)

def tensors(gpt):
    """The values in the order of llm.c; Conv1D is turned to (out, in), wte padded to a multiple of 128."""
    state = {name.replace("transformer.", ""): value.detach() for name, value in gpt.state_dict().items()}
    wte = state["wte.weight"]
    yield torch.cat([wte, torch.zeros(-len(wte) % 128, wte.shape[1])])
    yield state["wpe.weight"]
    for kind in KINDS:
        for layer in range(LAYERS):
            value = state["h.%d.%s" % (layer, kind)]
            yield value.t() if value.dim() == 2 else value
    yield state["ln_f.weight"]
    yield state["ln_f.bias"]

def write(path, gpt, version):
    c = gpt.config
    header = [20240326, version, c.n_positions, c.vocab_size, c.n_layer, c.n_head, c.n_embd, -(-c.vocab_size // 128) * 128]
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", *(header + [0] * 248)))
        for value in tensors(gpt):
            value = value.contiguous()
            file.write(value.numpy().astype("<f4").tobytes() if version == 3
                       else value.bfloat16().view(torch.int16).numpy().astype("<i2").tobytes())

def make(folder):
    """A random model, with biases and norms that are not 0 and 1: in llm.c's format, in theirs, and as it is."""
    torch.manual_seed(5)
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=24, n_embd=32, n_layer=LAYERS, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=None, eos_token_id=None)).eval()
    for parameter in gpt.parameters(): parameter.data.normal_(0, 0.2 if parameter.dim() == 2 else 0.3)
    gpt.transformer.wpe.weight.data *= 5 # so that the likeliest token is not always the last one again
    write(folder + "/f32.bin", gpt, 3)
    write(folder + "/bf16.bin", gpt, 5)
    gpt.save_pretrained(folder + "/hf", safe_serialization=True)
    torch.save(gpt, folder + "/gpt.pt")
    for parameter in gpt.parameters(): parameter.data = parameter.data.bfloat16().float()
    torch.save(gpt, folder + "/bf16.pt")

def variant(folder, activation):
    """Another activation and epsilon, small activations so that the latter counts, and tokens that mean something."""
    torch.manual_seed(7)
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=24, n_embd=32, n_layer=LAYERS, n_head=4, activation_function=activation,
        layer_norm_epsilon=0.01, bos_token_id=3, eos_token_id=4, pad_token_id=5)).eval()
    for parameter in gpt.parameters(): parameter.data.normal_(0, 0.2 if parameter.dim() == 2 else 0.5)
    gpt.save_pretrained(folder, safe_serialization=True)
    torch.save(gpt, folder + "/gpt.pt")

def reloaded(folder, other):
    """What C has read and written is the same model to transformers."""
    gpt, found = torch.load(folder + "/gpt.pt"), transformers.GPT2LMHeadModel.from_pretrained(other).eval()
    with torch.no_grad(): assert torch.equal(gpt(tokens()).logits, found(tokens()).logits)
    a, b = gpt.config, found.config
    for key in ("activation_function", "layer_norm_epsilon", "n_head", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(a, key) == getattr(b, key), key
    print("the same model")

def logits(model, path):
    with torch.no_grad(): ours = torch.load(model)(tokens()).logits.reshape(-1, VOCAB).numpy()
    theirs = np.fromfile(path, dtype="<f4").reshape(-1, VOCAB)
    worst = np.abs(ours - theirs).max()
    assert np.abs(ours).max() > 1 and ours.std() > 0.3, "logits that would hide a mistake"
    assert worst <= 1e-4, "logits differ by %g" % worst
    print("logits up to %.2f differ by at most %.1e" % (np.abs(ours).max(), worst))

def moved(model, before, found):
    """How far C's parameters are from PyTorch's, beside how far these have moved: by norms, because AdamW makes steps
    of the rounding of gradients that are nearly zero. Those of biases of keys are zero."""
    values, first = dict(model.named_parameters()), dict(before.named_parameters())
    assert set(found) == set(values), set(found) ^ set(values)
    def norm(other): return math.sqrt(sum((values[name] - other[name]).detach().double().pow(2).sum().item()
                                          for name in values if "c_attn.bias" not in name))
    far, way = norm(found), norm(first)
    assert way > 0.1 and far <= 1e-3 * way, (far, way)
    print("parameters moved by %.3f, and differ by %.1e" % (way, far))

def train(model, output, exported):
    """Ten steps of AdamW, with losses and parameters compared; exported: what C has written of them."""
    gpt = torch.load(model).train()
    matrices = [p for p in gpt.parameters() if p.dim() == 2]
    others = [p for p in gpt.parameters() if p.dim() == 1]
    adamw = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}],
                              lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    theirs = [float(line.split()[1]) for line in open(output) if line.startswith("loss ")]
    ours = []
    for step in range(10):
        loss = gpt(tokens(), labels=tokens()).loss
        ours.append(loss.item())
        adamw.zero_grad()
        loss.backward()
        adamw.step()
    worst = max(abs(a - b) / a for a, b in zip(ours, theirs))
    assert len(theirs) == 10 and ours[9] < ours[0] - 0.1, (ours, theirs)
    assert worst <= 1e-5, (ours, theirs)
    found, before = transformers.GPT2LMHeadModel.from_pretrained(exported), torch.load(model)
    moved(gpt, before, dict(found.named_parameters()))
    print("losses %.4f to %.4f differ by %.1e at most, relative" % (ours[0], ours[9], worst))

def generate(model, prompt, written):
    prompt = torch.tensor([[int(x) for x in prompt.split()]])
    ours = torch.load(model).generate(prompt, max_length=24, do_sample=False, pad_token_id=0)[0].tolist()
    theirs = [int(x) for x in open(written).read().split()]
    assert ours == theirs, (ours, theirs)
    assert len(set(ours)) > 6, ours
    print("%d tokens: %s" % (len(ours), ours))

# ---- The tokenizer ----
def corpus(): return "".join(open(name, encoding="utf-8").read() for name in ("README.md", "CONTRIBUTING.md", "src/manual.h"))

def characters():
    """Strings of one character and more, of every class and length in UTF-8."""
    import unicodedata
    classes = {}
    for code in range(0x110000):
        kind = unicodedata.category(chr(code))
        if kind not in ("Cn", "Cs"): classes.setdefault(kind[0] if kind[0] in "LNMSP" else kind, []).append(chr(code))
    blanks = list("\t\n\v\f\r \x1c\x1f\x85\xa0\u1680\u2000\u200a\u200b\u2028\u2029\u202f\u205f\u3000\ufeff")
    return list(classes.values()) + [list("    \n"), blanks, list("abcdefghijklmnopqrstuvwxyz"), list("'.,-0123456789"),
            ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "the", " of", "<|endoftext|>", "<|endof", "  ", "\n\n"]]

def texts():
    import random
    random.seed(11)
    kinds = characters()
    yield from (corpus(), "", " ", "a", "  \n", "it's we'll  I'm \n you'dn't")
    for kind in kinds[:-5]: yield " x".join(random.sample(kind, min(len(kind), 2000)))
    for i in range(400):
        some = random.sample(kinds, random.randint(1, 5))
        yield "".join(random.choice(random.choice(some)) for _ in range(random.randint(1, 80)))

def vocabulary(folder):
    """GPT-2's two files, of a small vocabulary that is learned from texts here; and llm.c's file of the same."""
    import tokenizers
    learned = tokenizers.ByteLevelBPETokenizer()
    learned.train_from_iterator([corpus()] + ["\u00e9t\u00e9 \u4e2d\u6587 \u041f\u0440\u0438"] * 50, vocab_size=1200,
                                special_tokens=["<|endoftext|>"], show_progress=False)
    os.makedirs(folder, exist_ok=True)
    learned.save_model(folder)
    fast = transformers.GPT2TokenizerFast(folder + "/vocab.json", folder + "/merges.txt")
    bytes_of = {c: b for b, c in transformers.models.gpt2.tokenization_gpt2.bytes_to_unicode().items()}
    with open(folder + "/tokenizer.bin", "wb") as file:
        file.write(struct.pack("<256i", *([20240328, 2, len(fast), fast.eos_token_id] + [0] * 252)))
        for token in fast.convert_ids_to_tokens(range(len(fast))):
            raw = bytes(bytes_of[c] for c in token)
            file.write(bytes([len(raw)]) + raw)

def encode(folder, program):
    """All texts, one after the other, by C, by the tokenizer in Rust and by the one in Python."""
    import subprocess
    def run(path, act, data): return subprocess.run([program, path, act], input=data, stdout=subprocess.PIPE, check=True).stdout
    fast = transformers.GPT2TokenizerFast.from_pretrained(folder)
    slow = transformers.GPT2Tokenizer.from_pretrained(folder)
    count = 0
    for text in texts():
        found = run(folder, "encode", text.encode())
        ids = np.frombuffer(found, dtype="<i4").tolist()
        assert ids == fast.encode(text), (text, ids, fast.encode(text))
        assert len(text) > 3000 or ids == slow.encode(text), (text, ids, slow.encode(text))
        for path in (folder, folder + "/tokenizer.bin"): assert run(path, "decode", found) == text.encode(), text
        count += len(ids)
    print("%d tokens are those of transformers" % count)

def json_files(folder, program):
    """tokenizer.json of GPT-2's, Llama 3's and Qwen 2's kind, as strings and as pairs: C and the tokenizers library."""
    import json, subprocess
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    def run(path, act, data): return subprocess.run([program, path, act], input=data, stdout=subprocess.PIPE, check=True).stdout
    llama = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    gpt2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    count = 0
    for expression in ("", gpt2, llama % "{1,3}", llama % ""):
        learned = Tokenizer(models.BPE())
        learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False) if not expression else pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(expression), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        learned.decoder = decoders.ByteLevel()
        learned.train_from_iterator([corpus()], trainers.BpeTrainer(
            vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|endoftext|>"], show_progress=False))
        learned.add_special_tokens(["<|endof", "<|begin|>"])
        learned.add_tokens([AddedToken("foo bar", normalized=True), AddedToken("oo b", normalized=False), AddedToken("\u4e2d\u6587x")])
        os.makedirs(folder, exist_ok=True)
        path = folder + "/tokenizer.json"
        learned.save(path)
        pairs = json.load(open(path))
        pairs["model"]["merges"] = [list(merge) if isinstance(merge, list) else merge.split(" ") for merge in pairs["model"]["merges"]]
        pairs["model"]["ignore_merges"] = False
        os.makedirs(folder + "/pairs", exist_ok=True)
        json.dump(pairs, open(folder + "/pairs/tokenizer.json", "w"), sort_keys=True)
        more = ["foo bar foo b oo bar", "'S 'T\u017f '\u017f 'LL'll \u4e2d\u6587x<|begin|><|endofx", "a\r\n\r\n  b \t\n c\n", "1234567 12 \u0663"]
        for text in [*texts(), *more]:
            for place in (folder, folder + "/pairs"):
                found = run(place, "encode", text.encode())
                ids, expected = np.frombuffer(found, dtype="<i4").tolist(), learned.encode(text, add_special_tokens=False).ids
                assert ids == expected, (expression, text, ids, expected)
                assert run(place, "decode", found) == text.encode(), text
            count += len(ids)
    print("%d tokens are those of the tokenizers library" % count)

def saved_tokenizer(folder, other):
    """What transformers saves of GPT-2's files, and only that of it which 5 saves as well."""
    fast = transformers.GPT2TokenizerFast.from_pretrained(folder)
    fast.save_pretrained(other)
    for name in ("vocab.json", "merges.txt"): os.remove(other + "/" + name)

# ---- Llama ----
def llama(folder, tied):
    """A random Llama with six heads of queries and two of keys; and one window of tokens for ten steps."""
    torch.manual_seed(6)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=5000.0, pad_token_id=None,
        tie_word_embeddings=tied == "tied")).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2) if parameter.dim() == 2 else parameter.data.normal_(1, 0.3)
    model.save_pretrained(folder, safe_serialization=True)
    torch.save(model, folder + "/model.pt")
    with open(folder + "/tokens.bin", "wb") as file:
        file.write(struct.pack("<256i", *([20240520, 1, SEQ + 1] + [0] * 253)))
        file.write(struct.pack("<%dH" % (SEQ + 1), *[(7 * i + 3) % VOCAB for i in range(SEQ + 1)]))

def llama_train(folder, output, exported):
    """Ten steps as examples/llama.c makes them: a clipped norm, a cosine, no decay of vectors."""
    model, before = torch.load(folder + "/model.pt").train(), torch.load(folder + "/model.pt")
    data = torch.tensor([(7 * i + 3) % VOCAB for i in range(SEQ + 1)])
    adamw = torch.optim.AdamW([{"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
                               {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0}],
                              lr=1, betas=(0.9, 0.95), eps=1e-8)
    theirs = [float(line.split()[3]) for line in open(output) if line.startswith("step ")]
    ours = []
    for step in range(10):
        for group in adamw.param_groups: group["lr"] = 1e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 10)))
        loss = torch.nn.functional.cross_entropy(model(data[:-1][None]).logits[0], data[1:])
        ours.append(loss.item())
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        adamw.step()
    assert abs(theirs[0] - ours[0]) < 2e-4 and abs(theirs[-1] - ours[9]) < 2e-4 and ours[9] < ours[0] - 0.1, (ours, theirs)
    moved(model, before, safetensors.torch.load_file(exported))
    print("losses %.4f to %.4f differ by %.1e" % (ours[0], ours[9], max(abs(theirs[0] - ours[0]), abs(theirs[-1] - ours[9]))))

globals()[sys.argv[1]](*sys.argv[2:])
PYTHON
try "random models by transformers" "$python" "$tmp/models.py" make "$tmp"
"$program" 3 full_shard import="$tmp/f32.bin" logits="$tmp/logits" export="$tmp/again.bin"; result "C reads the .bin" $?
good "logits of PyTorch" 'differ by at most' "$python" "$tmp/models.py" logits "$tmp/gpt.pt" "$tmp/logits"
try "and writes the same bytes" cmp "$tmp/f32.bin" "$tmp/again.bin"
"$program" 2 zero3 import="$tmp/bf16.bin" logits="$tmp/logits" export="$tmp/again.bin" dtype=bf16; result "C reads bf16" $?
good "logits of PyTorch" 'differ by at most' "$python" "$tmp/models.py" logits "$tmp/bf16.pt" "$tmp/logits"
try "and writes the same bytes" cmp "$tmp/bf16.bin" "$tmp/again.bin"
good "Hugging Face to llm.c" exported "$gpt" --threads 1 --ranks 2 --strategy ddp --steps 0 --import "$tmp/hf/model.safetensors" --export "$tmp/again.bin"
try "the bytes that Python has written" cmp "$tmp/f32.bin" "$tmp/again.bin"
good "as bf16" exported "$gpt" --threads 1 --ranks 2 --strategy ddp --steps 0 --import "$tmp/hf/model.safetensors" --export "$tmp/again.bin" --export-dtype bf16
try "the bytes that Python has written" cmp "$tmp/bf16.bin" "$tmp/again.bin"
for run in "1 ddp f32.bin" "3 full_shard hf/model.safetensors" "2 zero3 f32.bin"; do
    set -- $run
    mkdir -p "$tmp/trained.$2"
    "$program" "$1" "$2" import="$tmp/$3" train=10 export="$tmp/trained.$2/model.safetensors" >"$tmp/train"; result "ten steps, $2, $1 ranks" $?
    cp "$tmp/hf/config.json" "$tmp/trained.$2"
    good "losses and parameters of PyTorch" 'differ by' "$python" "$tmp/models.py" train "$tmp/gpt.pt" "$tmp/train" "$tmp/trained.$2"
done
"$gpt" --import "$tmp/f32.bin" --generate 20 --prompt "5 9 2 7" --temperature 0 2>/dev/null | head -n 1 >"$tmp/written"
good "tokens of transformers' generate" '24 tokens' "$python" "$tmp/models.py" generate "$tmp/gpt.pt" "5 9 2 7" "$tmp/written"

for activation in relu silu gelu_pytorch_tanh; do
    rm -rf "$tmp/variant" "$tmp/variant2"; mkdir "$tmp/variant" "$tmp/variant2"
    try "transformers saves a GPT-2 with $activation" "$python" "$tmp/models.py" variant "$tmp/variant" $activation
    "$program" 2 ddp import="$tmp/variant/model.safetensors" logits="$tmp/logits"; result "C reads it" $?
    good "logits of PyTorch" 'differ by at most' "$python" "$tmp/models.py" logits "$tmp/variant/gpt.pt" "$tmp/logits"
    good "train_gpt reads the directory" exported "$gpt" --threads 1 --steps 0 --import "$tmp/variant" --export "$tmp/variant2/model.safetensors"
    good "and writes what transformers reads" 'the same model' "$python" "$tmp/models.py" reloaded "$tmp/variant" "$tmp/variant2"
done

# ---- Llama ----
for tied in apart tied; do
    for run in "2 ddp" "3 full_shard"; do
        set -- $run
        [ "$1" -gt 2 ] || try "a random Llama by transformers, head $tied" "$python" "$tmp/models.py" llama "$tmp/llama.$tied" $tied
        try "examples/llama.c reads it, $2, $1 ranks" "$build/llama_logits" "$1" "$2" "$tmp/llama.$tied" "$tmp/logits"
        good "logits of PyTorch" 'differ by at most' "$python" "$tmp/models.py" logits "$tmp/llama.$tied/model.pt" "$tmp/logits"
        "$build/llama" --import "$tmp/llama.$tied" --data "$tmp/llama.$tied/tokens.bin" --seq 16 --batch 1 --steps 10 --lr 1e-3 \
            --ranks "$1" --strategy "$2" --export "$tmp/llama.out" >"$tmp/train"; result "ten steps" $?
        good "losses and parameters of PyTorch" 'differ by' "$python" "$tmp/models.py" llama_train "$tmp/llama.$tied" "$tmp/train" "$tmp/llama.out"
    done
done

# The base of the rotation where transformers 5 writes it; the model was made with 5000.
grep -q '"rope_theta": 5000.0' "$tmp/llama.tied/config.json"; result "transformers 4 writes rope_theta" $?
sed 's/"rope_scaling": null/"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}/; /"rope_theta": 5000.0,$/d' \
    "$tmp/llama.tied/config.json" >"$tmp/config.json"
mv "$tmp/config.json" "$tmp/llama.tied/config.json"
! grep -q '^  "rope_theta"' "$tmp/llama.tied/config.json" && grep -q rope_parameters "$tmp/llama.tied/config.json"; result "and 5 rope_parameters" $?
try "C reads it" "$build/llama_logits" 1 ddp "$tmp/llama.tied" "$tmp/logits"
good "logits of PyTorch" 'differ by at most' "$python" "$tmp/models.py" logits "$tmp/llama.tied/model.pt" "$tmp/logits"

# ---- The tokenizer ----
try "a vocabulary learned by Python" "$python" "$tmp/models.py" vocabulary "$tmp/bpe"
good "C encodes and decodes random texts as transformers does" 'are those of transformers' "$python" "$tmp/models.py" encode "$tmp/bpe" "$tokenize"
good "training on text through a tokenizer, then text" '1200 symbols' "$gpt" --threads 1 --tokenizer "$tmp/bpe" --data README.md --steps 3 --eval-batches 0 \
    --sample 20 --prompt "The library" --checkpoint "$tmp/run"
grep -q 'a sample' "$tmp/out"; result "a sample" $?
good "sums are learned through it too" '% of all 810 held-out sums are right' "$gpt" --threads 1 --tokenizer "$tmp/bpe" --layers 1 --channels 16 --steps 3 --eval-batches 2
good "and goes on writing" '^The library' "$gpt" --threads 1 --tokenizer "$tmp/bpe" --resume "$tmp/run" --generate 20 --prompt "The library"
good "with llm.c's file" . "$gpt" --threads 1 --tokenizer "$tmp/bpe/tokenizer.bin" --resume "$tmp/run" --generate 20 --temperature 0
cp "$tmp/out" "$tmp/one"
good "the same text" . "$gpt" --threads 1 --tokenizer "$tmp/bpe" --resume "$tmp/run" --generate 20 --temperature 0
[ "$(grep -v tokens/s "$tmp/one")" = "$(grep -v tokens/s "$tmp/out")" ]; result "as with Hugging Face's" $?
bad "a tokenizer that cannot encode" 'can only decode' "$gpt" --tokenizer "$tmp/bpe/tokenizer.bin" --resume "$tmp/run" --generate 5 --prompt x
bad "a larger vocabulary than the model's" 'has 1200 tokens, and the model a vocabulary of 300' "$gpt" --tokenizer "$tmp/bpe" --import "$tmp/f32.bin" --generate 5
bad "several files of text" 'encodes one file of text' "$gpt" --tokenizer "$tmp/bpe" --data "$tmp"
good "C and the tokenizers library: tokenizer.json" 'are those of the tokenizers library' "$python" "$tmp/models.py" json_files "$tmp/json2" "$tokenize"
try "transformers saves a tokenizer.json" "$python" "$tmp/models.py" saved_tokenizer "$tmp/bpe" "$tmp/bpe2"
good "text with it" . "$gpt" --threads 1 --tokenizer "$tmp/bpe2" --resume "$tmp/run" --generate 20 --temperature 0
[ "$(grep -v tokens/s "$tmp/one")" = "$(grep -v tokens/s "$tmp/out")" ]; result "as with GPT-2's two files" $?
bad "no tokenizer there" 'has no tokenizer.json, and no vocab.json' "$gpt" --tokenizer "$tmp/hf" --data README.md
bad "a cut vocabulary" 'vocab.json: expected' sh -c "mkdir -p '$tmp/cut' && cp '$tmp/bpe/merges.txt' '$tmp/cut' &&
    head -c 500 '$tmp/bpe/vocab.json' >'$tmp/cut/vocab.json' && exec '$gpt' --tokenizer '$tmp/cut'"
finish
