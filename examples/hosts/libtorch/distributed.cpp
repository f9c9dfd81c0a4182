/* distributed.cpp: serial.cpp on several ranks: each takes its part of every batch, dtrain averages
 * the gradients while backward computes the next one.
 *
 *   build:   cc -O2 -I. -c examples/hosts/libtorch/dtrain.c -o dtrain.o
 *            c++ -O2 -std=c++17 -I. -I$TORCH/include -I$TORCH/include/torch/csrc/api/include \
 *                examples/hosts/libtorch/distributed.cpp dtrain.o -o distributed \
 *                -L$TORCH/lib -Wl,-rpath,$TORCH/lib -ltorch -ltorch_cpu -lc10 -lpthread
 *            TORCH: where libtorch, or the wheel of torch, lies; Debian's libtorch-dev needs
 *            -I/usr/include/torch/csrc/api/include and no -L
 *   run:     torchrun --nproc-per-node 2 --no-python ./distributed
 *            or start each rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set
 *   expect:  the losses of ./serial
 *
 * The ranks are brought together by the program: a store of torch's (TCPStore) is the all-gather
 * that dtrain_world_join asks for. On one host they share memory from then on. */
#include "dtrain_torch.h"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

static const int64_t BATCH = 64, STEPS = 200;

/* Draw inputs (BATCH, 4) in [-1, 1); the target (BATCH, 1) is a smooth function of them. */
static std::pair<torch::Tensor, torch::Tensor> draw_batch(int64_t step)
{
    torch::manual_seed(1000 + (uint64_t)step);
    torch::Tensor x = 2 * torch::rand({BATCH, 4}) - 1;
    return {x, torch::sin(2 * x.sum(1, true))};
}

static void train(dtrain_world *world)
{
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    torch::manual_seed(1);
    torch::nn::Sequential model(torch::nn::Linear(4, 256), torch::nn::GELU(),
                                torch::nn::Linear(256, 256), torch::nn::GELU(),
                                torch::nn::Linear(256, 1));
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    dtrain_torch ddp(world, *model);
    for (int64_t step = 1; step <= STEPS; step++) {
        auto [x, y] = draw_batch(step);
        x = x.chunk(size)[(size_t)rank];
        y = y.chunk(size)[(size_t)rank];
        torch::Tensor loss = torch::mse_loss(model->forward(x), y);
        optimizer.zero_grad();
        loss.backward();
        ddp.finish();
        optimizer.step();
        float value = loss.item<float>();
        dtrain_torch_check(dtrain_all_reduce(dtrain_world_comm(world), &value, &value, 1,
                                             DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MEAN, nullptr));
        if (step % 20 == 0 && rank == 0) std::printf("step %3d  loss %.7f\n", (int)step, value);
    }
    dtrain_torch_check(dtrain_strategy_verify(ddp.strategy(), nullptr)); // all have the same bits
}

/* Read a number of the environment, as torchrun sets it. */
static int number(const char *name, int otherwise)
{
    const char *text = std::getenv(name);
    return text ? std::atoi(text) : otherwise;
}

int main()
{
    torch::set_num_threads(1);
    try {
        const int rank = number("RANK", 0), size = number("WORLD_SIZE", 1);
        const char *host = std::getenv("MASTER_ADDR");
        c10d::TCPStoreOptions options;
        options.port = (uint16_t)number("MASTER_PORT", 29500);
        /* torchrun has a store at this address already */
        options.isServer = rank == 0 && !std::getenv("TORCHELASTIC_USE_AGENT_STORE");
        c10d::TCPStore store(host ? host : "127.0.0.1", options);
        dtrain_world *world = dtrain_torch_join(store, rank, size);
        train(world);
        dtrain_torch_check(dtrain_world_leave(world));
    } catch (const std::exception &error) {
        std::fprintf(stderr, "distributed: %s\n", error.what());
        return 1;
    }
    return 0;
}
