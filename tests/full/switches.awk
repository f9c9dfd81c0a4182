# switches.awk: a random command line for a training program: awk -v seed=N -v program=train_gpt -v tmp=DIR -f switches.awk
# Values lie in and around what makes sense, so that combinations that cannot be are drawn as well.
function pick(list,    words) { return words[1 + int(rand() * split(list, words, " "))] }
function maybe(share, text) { if (rand() < 0.6 * share) printf " %s", text }
BEGIN {
    srand(seed)
    ranks = pick("1 1 2 2 2 3 4")
    printf "--threads 1 --steps 2 --timeout 20 --batch %s", pick("2 2 3 4")
    if (rand() < 0.15) printf " --emulate 2x%s:10:50", pick("1 2")
    else printf " --ranks %d", ranks
    if (rand() < 0.2) { printf " --tensor %s", pick("2 2 2 3 4"); maybe(0.6, "--sequence-parallel") }
    maybe(0.02, "--sequence-parallel")
    compressed = rand() < 0.25
    if (compressed) maybe(0.1, "--strategy zero1")
    else maybe(0.8, "--strategy " pick("ddp zero1 shard_grad_op full_shard zero3 hybrid_shard auto"))
    maybe(0.4, "--precision " pick("fp32 bf16 bf16 bf16 fp16 fp16 tf32"))
    maybe(0.1, "--param-dtype " pick("bf16 fp16"))
    maybe(0.2, "--reduce-dtype " pick("bf16 fp16"))
    maybe(0.08, "--reshard-after-forward 0")
    maybe(0.12, "--node-size " pick("1 2 3"))
    maybe(0.2, "--hierarchical")
    maybe(0.2, "--bucket-kib " pick("1 16 1000"))
    maybe(0.15, "--no-overlap")
    maybe(0.2, "--activation-checkpointing " pick("1 2"))
    maybe(0.25, "--accum " pick("1 2 3"))
    maybe(0.1, "--global-batch " pick("8 12 24 7"))
    maybe(0.1, "--accum-mode " pick("last every shard_every"))
    maybe(0.1, "--auto-batch")
    maybe(0.15, "--memory-limit " pick("1 8 64 400"))
    maybe(0.5, "--optimizer " pick("adamw sgd lion muon"))
    maybe(0.2, "--lr 0.001")
    maybe(0.03, "--muon-lr 0.01")
    maybe(0.1, "--beta2 0.9")
    maybe(0.1, "--variance-steps 1")
    maybe(0.1, "--min-lr 0.0001")
    maybe(0.2, "--schedule " pick("constant linear cosine steps"))
    maybe(0.1, "--lr-scaling " pick("linear sqrt"))
    maybe(0.2, "--clip " pick("0 0.5"))
    if (compressed) {
        printf " --compression %s", "topk"
        maybe(0.5, "--dense-steps " pick("0 1"))
        maybe(0.2, "--compression-warmup 1 --warmup-ratio 0.5")
    }
    maybe(0.03, "--topk-ratio 0.1")
    maybe(0.02, "--topk-momentum 0.9")
    maybe(0.02, "--no-error-feedback")
    maybe(0.02, "--dense-below 64")
    if (rand() < 0.3) {
        printf " --checkpoint %s/checkpoints", tmp
        maybe(0.5, "--save-every 1")
        maybe(0.3, "--save-blocking")
        maybe(0.3, "--restarts 1")
        maybe(0.4, "--resume auto")
        maybe(0.2, "--keep 1")
        maybe(0.2, "--keep-best 1")
    }
    maybe(0.02, "--save-every 1")
    maybe(0.1, "--nonfinite " pick("stop skip rollback"))
    maybe(0.15, "--verify-every 1")
    maybe(0.15, "--deterministic")
    maybe(0.1, "--thread-ranks")
    maybe(0.2, "--log " tmp "/run.jsonl")
    maybe(0.1, "--prometheus " tmp "/run.prom")
    maybe(0.1, "--trace " tmp "/run.json")
    if (rand() < 0.1) { printf " --tensorboard %s/events", tmp; maybe(0.5, "--histograms 1") }
    maybe(0.02, "--histograms 1")
    maybe(0.05, "--workers " pick("0 2"))
    maybe(0.03, "--graph")
    maybe(0.03, "--offload optimizer")
    maybe(0.03, "--tune-gemm")
    if (program == "resnet_cifar") maybe(0.3, "--sync-batchnorm")
    else maybe(0.2, "--dropout 0.1")
    print ""
}
