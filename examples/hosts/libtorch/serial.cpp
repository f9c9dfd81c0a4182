/* serial.cpp: a libtorch program as it was before dtrain: an MLP learns a function of four numbers,
 * in one process. distributed.cpp is the same program on several ranks; see there. */
#include <torch/torch.h>

#include <cmath>
#include <cstdio>

static const int64_t BATCH = 64, STEPS = 200;

/* Draw inputs (BATCH, 4) in [-1, 1); the target (BATCH, 1) is a smooth function of them. */
static std::pair<torch::Tensor, torch::Tensor> draw_batch(int64_t step)
{
    torch::manual_seed(1000 + (uint64_t)step);
    torch::Tensor x = 2 * torch::rand({BATCH, 4}) - 1;
    return {x, torch::sin(2 * x.sum(1, true))};
}

static void train()
{
    torch::manual_seed(1);
    torch::nn::Sequential model(torch::nn::Linear(4, 256), torch::nn::GELU(),
                                torch::nn::Linear(256, 256), torch::nn::GELU(),
                                torch::nn::Linear(256, 1));
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int64_t step = 1; step <= STEPS; step++) {
        auto [x, y] = draw_batch(step);
        torch::Tensor loss = torch::mse_loss(model->forward(x), y);
        optimizer.zero_grad();
        loss.backward();
        optimizer.step();
        float value = loss.item<float>();
        if (step % 20 == 0) std::printf("step %3d  loss %.7f\n", (int)step, value);
    }
}

int main()
{
    torch::set_num_threads(1);
    train();
    return 0;
}
