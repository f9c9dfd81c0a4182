/* libtorch_ddp.cpp: training steps of libtorch's C++ API with dtrain, beside those of Python's
 * DistributedDataParallel: bench/libtorch.sh runs both. The arguments, the model and what is printed
 * are those of bench/torch_ddp.py; the ranks meet at MASTER_ADDR and MASTER_PORT. */
#include "dtrain_torch.h"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sched.h>

static const int64_t BATCHES = 4;
static const size_t WARM_UP = 5;

/* Read the next values of the file into a tensor of fp32. */
static void read(std::ifstream &file, torch::Tensor tensor)
{
    if (!file.read(static_cast<char *>(tensor.data_ptr()), (std::streamsize)tensor.nbytes()))
        throw std::runtime_error("the file of values is too short");
}

static void train(dtrain_world *world, char **argv, const char *scheduler)
{
    const int64_t width = std::atol(argv[2]), layers = std::atol(argv[3]);
    const int64_t batch = std::atol(argv[4]), steps = std::atol(argv[5]);
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    std::ifstream file(argv[1], std::ios::binary);
    torch::nn::Sequential model;
    for (int64_t layer = 0; layer < layers; layer++) {
        if (layer > 0) model->push_back(torch::nn::ReLU());
        model->push_back(torch::nn::Linear(width, width));
    }
    for (const torch::Tensor &value : model->parameters()) read(file, value);
    torch::Tensor data = torch::empty({BATCHES, 2, size, batch / size, width});
    read(file, data);
    data = data.select(2, rank).contiguous();

    dtrain_torch ddp(world, *model);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    std::vector<float> losses;
    std::vector<double> times;
    for (int64_t step = 0; step < steps; step++) {
        const double start = dtrain_seconds();
        torch::Tensor inputs = data[step % BATCHES][0], targets = data[step % BATCHES][1];
        torch::Tensor loss = torch::mse_loss(model->forward(inputs), targets);
        model->zero_grad(true);
        loss.backward();
        ddp.finish();
        optimizer.step();
        times.push_back(dtrain_seconds() - start);
        losses.push_back(loss.item<float>());
    }
    dtrain_torch_check(dtrain_all_reduce(dtrain_world_comm(world), losses.data(), losses.data(),
                                         losses.size(), DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MEAN,
                                         nullptr));
    if (rank > 0) return;
    for (float loss : losses) std::printf("loss %.9f\n", loss);
    std::sort(times.begin() + WARM_UP, times.end());
    std::printf("scheduler %s\n", scheduler);
    std::printf("step_ms %.4f\n", 1e3 * times[(WARM_UP + times.size()) / 2]);
}

int main(int argc, char **argv)
{
    const char *rank = std::getenv("RANK"), *size = std::getenv("WORLD_SIZE");
    const char *host = std::getenv("MASTER_ADDR"), *port = std::getenv("MASTER_PORT");
    if (argc != 6 || !rank || !size || !host || !port || std::atol(argv[5]) <= (long)WARM_UP) {
        std::fprintf(stderr, "usage: RANK= WORLD_SIZE= MASTER_ADDR= MASTER_PORT= libtorch_ddp "
                             "FILE WIDTH LAYERS BATCH STEPS\n");
        return 2;
    }
    const sched_param priority = {1};
    const char *scheduler = sched_setscheduler(0, SCHED_RR, &priority) ? "normal" : "real-time";
    torch::set_num_threads(1);
    try {
        c10d::TCPStoreOptions options;
        options.port = (uint16_t)std::atoi(port);
        options.isServer = std::atoi(rank) == 0;
        c10d::TCPStore store(host, options);
        dtrain_world *world = dtrain_torch_join(store, std::atoi(rank), std::atoi(size));
        train(world, argv, scheduler);
        dtrain_torch_check(dtrain_world_leave(world));
    } catch (const std::exception &error) {
        std::fprintf(stderr, "libtorch_ddp: %s\n", error.what());
        return 1;
    }
    return 0;
}
