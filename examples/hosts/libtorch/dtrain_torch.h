/* dtrain_torch.h: data-parallel training of a torch::nn::Module of libtorch's C++ API.
 *
 *     dtrain_world *world = dtrain_torch_join(store, rank, size);  // a c10d::Store; collective
 *     {
 *         dtrain_torch ddp(world, *model);                 // all ranks get rank 0's values
 *         for (...) {
 *             optimizer.zero_grad();
 *             loss_of(model, this_ranks_batch).backward(); // hooks start the communication
 *             ddp.finish();                                // each .grad is the mean over the ranks
 *             optimizer.step();
 *         }
 *     }
 *     dtrain_world_leave(world);
 *
 * Values and gradients stay in torch's memory: contiguous tensors of the CPU in fp32, bf16 or fp16,
 * or all in fp64; others are refused by name. A gradient keeps its array from the constructor to
 * the destructor: where zero_grad drops it, the hook brings it back. Errors are std::runtime_error
 * with the sentence of dtrain_last_error(). One file of the program, in C, compiles dtrain itself:
 * dtrain.c. C++17; libtorch 1.13 or later. */
#pragma once

#include "dtrain.h"

#include <torch/torch.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

inline void dtrain_torch_check(dtrain_result result)
{
    if (result != DTRAIN_OK) throw std::runtime_error(dtrain_last_error());
}

/* Join a world whose ranks meet in a store. Collective. No key of an earlier join may be in it:
 * hand each join another c10d::PrefixStore. */
inline dtrain_world *dtrain_torch_join(c10d::Store &store, int rank, int size,
                                       dtrain_join_desc desc = {})
{
    struct members {
        c10d::Store &store;
        int rank, size, calls;
    } members = {store, rank, size, 0};
    dtrain_world *world = nullptr;
    desc.rank = rank;
    desc.size = size;
    desc.user = &members;
    desc.all_gather = [](void *user, const void *mine, void *all, size_t bytes) {
        struct members &m = *static_cast<struct members *>(user);
        const std::string call = "dtrain/" + std::to_string(m.calls++) + "/";
        const auto *from = static_cast<const uint8_t *>(mine);
        try {
            m.store.set(call + std::to_string(m.rank), std::vector<uint8_t>(from, from + bytes));
            for (int r = 0; r < m.size; r++) {
                const std::vector<uint8_t> value = m.store.get(call + std::to_string(r)); // waits
                if (value.size() != bytes) return 1;
                std::memcpy(static_cast<uint8_t *>(all) + (size_t)r * bytes, value.data(), bytes);
            }
        } catch (const std::exception &) {
            return 1; // the join fails: no exception may leave through C
        }
        return 0;
    };
    dtrain_torch_check(dtrain_world_join(&desc, &world));
    return world;
}

class dtrain_torch
{
  public:
    /* Register a module's parameters and buffers and copy rank 0's to all ranks. Collective.
     * kind: DTRAIN_STRATEGY_DDP, or ZERO1 with an optimizer of dtrain's. */
    dtrain_torch(dtrain_world *world, const torch::nn::Module &module,
                 const dtrain_strategy_desc &desc = {})
        : comm_(dtrain_world_comm(world))
    {
        if (desc.kind > DTRAIN_STRATEGY_ZERO1)
            throw std::runtime_error("dtrain_torch: torch keeps parameters and gradients whole, "
                                     "for DTRAIN_STRATEGY_DDP and DTRAIN_STRATEGY_ZERO1 only");
        named_ = module.named_parameters();
        for (const auto &item : named_) add(item.key(), item.value());
        for (const torch::Tensor &buffer : module.buffers()) exchange(buffer, false);
        buffers_ = module.buffers();
        dtrain_torch_check(
            dtrain_strategy_create(world, params_.data(), params_.size(), &desc, &strategy_));
        for (size_t i = 0; i < entries_.size(); i++) {
            entry &e = entries_[i];
            if (!e.grad.defined()) continue;
            e.node = torch::autograd::impl::grad_accumulator(e.value); // it adds to .grad
            e.hook = e.node->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
                [this, i](const auto &outputs, const auto &) {
                    ready(i);
                    return outputs;
                }));
        }
    }
    dtrain_torch(const dtrain_torch &) = delete;
    dtrain_torch &operator=(const dtrain_torch &) = delete;
    ~dtrain_torch()
    {
        for (entry &e : entries_)
            if (e.node) e.node->del_post_hook(e.hook);
        dtrain_strategy_destroy(strategy_);
    }

    /* Say before a backward whether more micro-batches of this step follow it (torch's no_sync).
     * They add up, as torch's do: divide each loss by their number. */
    void accumulate(bool more)
    {
        dtrain_torch_check(dtrain_strategy_accumulate(strategy_, more));
        more_ = more;
    }

    /* End a backward. After the last one of a step each .grad, and each floating-point buffer, is
     * the mean over the ranks; the gradient of a parameter that no rank has used is zero. */
    void finish()
    {
        dtrain_torch_check(dtrain_strategy_finish(strategy_));
        if (more_) return;
        for (entry &e : entries_)
            if (e.grad.defined()) e.value.mutable_grad() = e.grad;
        for (const torch::Tensor &buffer : buffers_)
            if (buffer.is_floating_point()) exchange(buffer, true);
    }

    dtrain_strategy *strategy() const { return strategy_; } // for what dtrain.h has beside this

  private:
    struct entry {
        torch::Tensor value, grad; // grad: undefined where the parameter is frozen
        decltype(torch::autograd::impl::grad_accumulator(torch::Tensor())) node;
        uintptr_t hook;
    };

    static dtrain_dtype dtype_of(const torch::Tensor &tensor)
    {
        switch (tensor.scalar_type()) {
        case torch::kFloat: return DTRAIN_DTYPE_F32;
        case torch::kBFloat16: return DTRAIN_DTYPE_BF16;
        case torch::kHalf: return DTRAIN_DTYPE_F16;
        case torch::kDouble: return DTRAIN_DTYPE_F64;
        case torch::kLong: return DTRAIN_DTYPE_I64;
        default: return DTRAIN_DTYPE_I32;
        }
    }

    void add(const std::string &name, const torch::Tensor &value)
    {
        const dtrain_dtype dtype = dtype_of(value);
        const char *wrong = !value.device().is_cpu() ? "is not in the CPU's memory"
                            : !value.is_contiguous() ? "is not contiguous"
                            : dtype == DTRAIN_DTYPE_I32 || dtype == DTRAIN_DTYPE_I64
                                ? "is none of fp32, bf16, fp16 and fp64"
                                : nullptr;
        if (wrong) throw std::runtime_error("dtrain_torch: parameter \"" + name + "\" " + wrong);
        for (const entry &e : entries_)
            if (e.value.is_same(value)) return; // two modules share it: it has one gradient
        dtrain_param param = {};
        entry e = {value, {}, {}, 0};
        if (value.requires_grad()) e.grad = torch::zeros_like(value);
        else param.flags = DTRAIN_PARAM_FROZEN;
        param.name = name.c_str();
        param.count = value.numel();
        for (int64_t d = 0; d < value.dim() && value.dim() <= 4; d++)
            param.shape[d] = value.size(d);
        param.dtype = dtype;
        void *grad = e.grad.defined() ? e.grad.data_ptr() : nullptr;
        if (dtype == DTRAIN_DTYPE_F32) {
            param.value = value.data_ptr<float>();
            param.grad = static_cast<float *>(grad);
        } else {
            param.typed_value = value.data_ptr();
            param.typed_grad = grad;
        }
        params_.push_back(param);
        entries_.push_back(e);
    }

    /* The post-hook of the node that has just added to this parameter's .grad. */
    void ready(size_t i)
    {
        entry &e = entries_[i];
        torch::Tensor &grad = e.value.mutable_grad();
        if (thread_ != std::this_thread::get_id())
            throw std::runtime_error("dtrain_torch: backward runs on another thread than the "
                                     "constructor did");
        if (!grad.is_same(e.grad)) { // zero_grad had dropped ours: torch has made a new one
            torch::NoGradGuard no_grad;
            grad = e.grad.copy_(grad);
        }
        dtrain_torch_check(dtrain_strategy_ready(strategy_, i));
    }

    /* Replace a buffer of any type and layout by rank 0's, or by the mean over the ranks. */
    void exchange(const torch::Tensor &buffer, bool mean)
    {
        torch::NoGradGuard no_grad;
        torch::Tensor to = buffer.is_complex() ? torch::view_as_real(buffer) : buffer;
        torch::Tensor whole = to.to(torch::kCPU).contiguous();
        if (dtype_of(whole) == DTRAIN_DTYPE_I32)
            whole = whole.to(whole.is_floating_point() ? torch::kFloat : torch::kInt);
        const size_t count = (size_t)whole.numel();
        void *data = whole.data_ptr();
        dtrain_torch_check(mean
                               ? dtrain_all_reduce(comm_, data, data, count, dtype_of(whole),
                                                   DTRAIN_REDUCE_MEAN, nullptr)
                               : dtrain_broadcast(comm_, data, count, dtype_of(whole), 0, nullptr));
        if (!whole.is_same(to)) to.copy_(whole);
    }

    dtrain_comm *comm_;
    dtrain_strategy *strategy_ = nullptr;
    torch::OrderedDict<std::string, torch::Tensor> named_; // owns the names
    std::vector<dtrain_param> params_;
    std::vector<entry> entries_; // of params_
    std::vector<torch::Tensor> buffers_;
    std::thread::id thread_ = std::this_thread::get_id();
    bool more_ = false;
};
