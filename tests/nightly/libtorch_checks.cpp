/* libtorch_checks.cpp FILE: what examples/hosts/libtorch/dtrain_torch.h promises, on two ranks that
 * this program forks. FILE must not exist: the ranks meet in it. */
#include "dtrain_torch.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <cmath>
#include <csignal>
#include <cstdio>
#include <functional>
#include <sys/wait.h>
#include <unistd.h>

static int rank, failed, passed;

/* Every rank checks; rank 0 says what was right, each what was wrong. */
static void check(bool right, const std::string &name)
{
    right ? passed++ : failed++;
    if (!right || rank == 0)
        std::printf("  %s %s (rank %d)\n", right ? "ok  " : "FAIL", name.c_str(), rank);
    std::fflush(stdout);
}

/* Return what the call throws; empty: nothing. */
static std::string thrown(const std::function<void()> &call)
{
    try {
        call();
    } catch (const std::exception &error) {
        return error.what();
    }
    return "";
}
static void refused(const std::string &name, const char *sentence,
                    const std::function<void()> &call)
{
    const std::string what = thrown(call);
    check(what.find(sentence) != std::string::npos, name);
    if (what.find(sentence) == std::string::npos) std::printf("       \"%s\"\n", what.c_str());
}

/* A layer that is used twice and has one name for each use, a frozen one, one that is used on
 * request, a normalisation with running averages, and a mask. */
struct Model : torch::nn::Module {
    torch::nn::Linear first{8, 8}, second = first, frozen{8, 8}, seldom{8, 8}, never{8, 8};
    torch::nn::BatchNorm1d norm{8};
    torch::Tensor mask;
    Model()
    {
        register_module("first", first);
        register_module("second", second);
        register_module("frozen", frozen);
        register_module("seldom", seldom);
        register_module("never", never);
        register_module("norm", norm);
        mask = register_buffer("mask", torch::rand({8}) > 0.5);
        for (auto &p : frozen->parameters()) p.set_requires_grad(false);
    }
    torch::Tensor forward(torch::Tensor x, bool use_seldom)
    {
        x = torch::tanh(first(x));
        x = torch::tanh(frozen(second(x)));
        if (use_seldom) x = seldom(x);
        return norm(x).square().masked_fill(mask.to(torch::kBool), 0).mean() + x.sum();
    }
};

/* Copy values and buffers of a module to another one. */
static void copy_to(const Model &from, Model &to)
{
    torch::NoGradGuard no_grad;
    for (const auto &p : from.named_parameters()) to.named_parameters()[p.key()].copy_(p.value());
    for (const auto &b : from.named_buffers()) to.named_buffers()[b.key()].copy_(b.value());
}

/* Return the largest difference of two tensors, in fp64. */
static double difference(const torch::Tensor &a, const torch::Tensor &b)
{
    return (a.to(torch::kDouble) - b.to(torch::kDouble)).abs().max().item<double>();
}

static void check_dtype(dtrain_world *world, torch::ScalarType type, double tolerance)
{
    const std::string name = c10::toString(type);
    torch::manual_seed(1 + (uint64_t)rank); // ranks begin differently
    Model model, expected[2];
    for (Model *m : {&model, &expected[0], &expected[1]})
        if (type != torch::kFloat) m->to(type); // converts the mask, too
    if (rank == 0) model.norm->num_batches_tracked.fill_(7);
    std::vector<void *> values;
    for (const auto &p : model.parameters()) values.push_back(p.data_ptr());
    {
        dtrain_torch ddp(world, model);
        dtrain_torch_check(dtrain_strategy_verify(ddp.strategy(), nullptr));
        torch::manual_seed(1);
        Model zero;
        if (type != torch::kFloat) zero.to(type);
        bool same = model.norm->num_batches_tracked.item<int64_t>() == 7;
        for (const auto &p : zero.named_parameters())
            same = same && torch::equal(p.value(), model.named_parameters()[p.key()]);
        check(same && torch::equal(zero.mask, model.mask), name + ": all begin with rank 0's");

        /* What a step should give: each rank computes both ranks' part. Rank 1 does not use a
         * layer; steps with a gradient that was set to zero, dropped, and of two micro-batches. */
        torch::manual_seed(9);
        const torch::Tensor batch = torch::rand({2, 2, 16, 8}).to(type); // micro-batch, rank
        std::vector<void *> addresses;
        for (const auto &p : model.parameters())
            addresses.push_back(p.requires_grad() ? nullptr : p.data_ptr());
        for (int step = 0; step < 3; step++) {
            const int micro_batches = step == 2 ? 2 : 1;
            for (int r = 0; r < 2; r++) {
                copy_to(model, expected[r]);
                expected[r].zero_grad(false);
                for (int m = 0; m < micro_batches; m++)
                    (expected[r].forward(batch[m][r], r == 0) / micro_batches).backward();
            }
            model.zero_grad(step != 1);
            for (int m = 0; m < micro_batches; m++) {
                ddp.accumulate(m + 1 < micro_batches);
                (model.forward(batch[m][rank], rank == 0) / micro_batches).backward();
                ddp.finish();
            }
            double worst = 0;
            bool stable = true, frozen = true;
            size_t i = 0;
            for (const auto &p : model.named_parameters()) {
                void *&address = addresses[i];
                stable = stable && p.value().data_ptr() == values[i++];
                torch::Tensor grad = p.value().grad();
                if (!p.value().requires_grad()) {
                    frozen = frozen && !grad.defined();
                    continue;
                }
                if (!address) address = grad.data_ptr();
                stable = stable && grad.data_ptr() == address;
                torch::Tensor mean = torch::zeros({p.value().sizes()}, torch::kDouble);
                for (Model &e : expected) {
                    torch::Tensor part = e.named_parameters()[p.key()].grad();
                    if (part.defined()) mean += part.to(torch::kDouble) / 2;
                }
                worst =
                    std::max(worst, difference(grad, mean) / (1 + mean.abs().max().item<double>()));
            }
            const std::string of = name + ", step " + std::to_string(step) + ": ";
            check(worst <= tolerance, of + "gradients are means");
            check(stable && frozen,
                  of + "arrays stay where they are, what is frozen has no gradient");
            torch::Tensor mean = (expected[0].norm->running_mean.to(torch::kDouble) +
                                  expected[1].norm->running_mean.to(torch::kDouble)) /
                                 2;
            check(difference(model.norm->running_mean, mean) <= tolerance,
                  of + "buffers are means");
        }
    }
    /* Afterwards the module is torch's again: its gradients are there, and hooks are gone. */
    torch::Tensor grad = model.first->weight.grad().clone();
    model.forward(torch::rand({16, 8}).to(type), true).backward();
    check(!torch::equal(grad, model.first->weight.grad()), name + ": backward without dtrain");
}

/* ZERO1 with dtrain's AdamW gives what DDP with torch's gives. */
static void check_zero1(dtrain_world *world)
{
    torch::manual_seed(3);
    torch::nn::Linear ours(8, 4), theirs(8, 4);
    {
        torch::NoGradGuard no_grad;
        theirs->weight.copy_(ours->weight), theirs->bias.copy_(ours->bias);
    }
    dtrain_strategy_desc desc = {};
    desc.kind = DTRAIN_STRATEGY_ZERO1;
    dtrain_torch zero1(world, *ours, desc), ddp(world, *theirs);
    dtrain_optimizer_desc how = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    how.weight_decay = 0;
    dtrain_optimizer *optimizer = nullptr;
    dtrain_torch_check(dtrain_optimizer_create(world, zero1.strategy(), &how, &optimizer));
    torch::optim::AdamW adam(theirs->parameters(),
                             torch::optim::AdamWOptions(1e-2).weight_decay(0));
    for (int step = 0; step < 5; step++) {
        torch::manual_seed(50 + 2 * (uint64_t)step + (uint64_t)rank);
        torch::Tensor x = torch::rand({16, 8});
        ours->zero_grad(), theirs->zero_grad();
        ours(x).square().mean().backward();
        zero1.finish();
        dtrain_torch_check(dtrain_optimizer_step(optimizer, 1e-2f, 1));
        theirs(x).square().mean().backward();
        ddp.finish();
        adam.step();
    }
    check(difference(ours->weight, theirs->weight) < 1e-6,
          "ZERO1 with dtrain's AdamW is DDP with torch's");
    dtrain_optimizer_destroy(optimizer);
}

static void check_refusals(dtrain_world *world)
{
    struct Odd : torch::nn::Module {
        Odd(const torch::Tensor &tensor)
        {
            register_parameter("odd", tensor, tensor.is_floating_point());
        }
    };
    refused("a parameter that is not contiguous", "\"odd\" is not contiguous", [&] {
        dtrain_torch ddp(world, Odd(torch::rand({3, 5}).t()));
    });
    refused("a parameter of integers", "\"odd\" is none of fp32, bf16, fp16 and fp64",
            [&] { dtrain_torch ddp(world, Odd(torch::ones({3}, torch::kInt))); });
    dtrain_strategy_desc desc = {};
    desc.kind = DTRAIN_STRATEGY_FULL_SHARD;
    refused("a kind that shards parameters", "DTRAIN_STRATEGY_ZERO1 only",
            [&] { dtrain_torch ddp(world, Odd(torch::rand({3})), desc); });

    {
        Odd half(torch::full({3}, rank, torch::kHalf));
        dtrain_torch ddp(world, half);
        (half.parameters()[0].to(torch::kFloat) * (float)(1 + 2 * rank)).sum().backward();
        ddp.finish();
        check(difference(half.parameters()[0], torch::zeros({3})) == 0 &&
                  difference(half.parameters()[0].grad(), torch::full({3}, 2.0f)) == 0,
              "fp16: rank 0's value, and the mean");
    }
    Odd module(torch::rand({3}));
    dtrain_torch ddp(world, module);
    std::string what;
    std::thread([&] { what = thrown([&] { module.parameters()[0].sum().backward(); }); }).join();
    check(what.find("another thread") != std::string::npos, "backward on another thread: " + what);
    module.parameters()[0].sum().backward();
    refused("two backwards and no finish", "odd", [&] { module.parameters()[0].sum().backward(); });
}

/* Train in fp64 on this rank's part of batches of 12 samples, from one step to another; rank 1 dies
 * in the backward of step `end`. Return the last loss. */
static double train(dtrain_world *world, torch::nn::Linear &model, torch::optim::SGD &sgd, int from,
                    int to, int end)
{
    const int size = dtrain_world_size(world);
    dtrain_torch ddp(world, *model);
    double value = 0;
    for (int step = from; step < to; step++) {
        torch::manual_seed(100 + (uint64_t)step);
        torch::Tensor x = torch::rand({12, 8}).to(torch::kDouble);
        torch::Tensor loss = (model(x.chunk(size)[dtrain_world_rank(world)]) - 1).square().mean();
        model->zero_grad(true);
        if (step == end && rank == 1) {
            if (failed) _exit(1);
            kill(getpid(), SIGKILL);
        }
        loss.backward();
        ddp.finish();
        sgd.step();
        value = loss.item<double>();
    }
    return value;
}

/* Rank 1 dies; rank 0 hears of it, leaves, and resumes alone from what it saved, with the losses of
 * a run that nothing has interrupted. */
static void check_death(dtrain_world *world, c10d::Store &store, const std::string &path)
{
    torch::manual_seed(5);
    torch::nn::Linear model(8, 4);
    model->to(torch::kDouble);
    auto start = std::dynamic_pointer_cast<torch::nn::LinearImpl>(model->clone());
    torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    train(world, model, sgd, 0, 3, -1);
    torch::save(model, path + ".model"), torch::save(sgd, path + ".sgd");
    const double before = dtrain_seconds();
    refused("a rank that was killed", "rank 1", [&] { train(world, model, sgd, 3, 6, 3); });
    check(dtrain_seconds() - before < 2, "its end is told within 2 s");
    dtrain_world_leave(world);

    world = dtrain_torch_join(store, 0, 1);
    torch::load(model, path + ".model"), torch::load(sgd, path + ".sgd");
    const double resumed = train(world, model, sgd, 3, 6, -1);
    torch::nn::Linear whole(start);
    torch::optim::SGD other(whole->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    const double expected = train(world, whole, other, 0, 6, -1);
    check(std::abs(resumed - expected) < 1e-12 && expected > 0, "resumed on one rank");
    check(dtrain_world_leave(world) == DTRAIN_OK, "leave a world of one rank");
}

static void refuse_world(c10d::Store &store)
{
    /* A store without the other rank: the join fails, and nothing is thrown through C. */
    store.setTimeout(std::chrono::milliseconds(200));
    refused("a store in which no other rank is", "all-gather",
            [&] { dtrain_torch_join(store, rank, 2); });
}

int main(int argc, char **argv)
{
    if (argc != 2) return 2;
    const pid_t child = fork();
    int status = 0;
    rank = child ? 0 : 1;
    torch::set_num_threads(1);
    const std::string what = thrown([&] {
        auto file = c10::make_intrusive<c10d::FileStore>(argv[1], 2);
        for (int world_number = 0; world_number < 2; world_number++) {
            c10d::PrefixStore store(std::to_string(world_number) + "/", file);
            dtrain_world *world = dtrain_torch_join(store, rank, 2);
            if (world_number == 1) check_refusals(world);
            else {
                check_dtype(world, torch::kFloat, 1e-6);
                check_dtype(world, torch::kDouble, 1e-14);
                check_dtype(world, torch::kBFloat16, 2e-2);
                check_zero1(world);
            }
            const dtrain_result left = dtrain_world_leave(world);
            check(world_number == 1 || left == DTRAIN_OK, "leave");
        }
        c10d::PrefixStore lonely("rank " + std::to_string(rank), file);
        refuse_world(lonely);
        file->setTimeout(std::chrono::seconds(60));
        c10d::PrefixStore last("last/", file), single("single/", file);
        check_death(dtrain_torch_join(last, rank, 2), single, argv[1]);
    });
    if (!what.empty()) check(false, what);
    if (!child) return failed > 0;
    check(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL,
          "rank 1 had no failure before it was killed");
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
