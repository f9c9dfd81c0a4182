/* The sizes of public structs, as the compiler of this file sees them. */

#pragma once

#include "core/abi.h"
#include "launch/join.h"
#include "launch/launch.h"
#include "strategy/hook.h"
#include "strategy/memory.h"
#include "strategy/query.h"
#include "state/checkpoint.h"
#include "state/export.h"
#include "tape/op.h"
#include "tape/ops.h"
#include "train/data.h"
#include "monitor/metrics.h"

#define DTRAIN_ABI_END(name, last, first) \
    (uint32_t)(offsetof(dtrain_##name, last) + sizeof(((dtrain_##name *)NULL)->last)),
#define DTRAIN_ABI_SIZE(name, bytes) (uint32_t)sizeof(dtrain_##name),

/* What a program gives as dtrain_launch_desc.abi and dtrain_join_desc.abi. */
#if defined(__GNUC__)
__attribute__((unused))
#endif
static const dtrain_abi dtrain_header_abi = {sizeof(dtrain_abi) / sizeof(uint32_t) - 1,
                                             {DTRAIN_ABI_LIST(DTRAIN_ABI_END, DTRAIN_ABI_SIZE)}};
