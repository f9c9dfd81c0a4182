/* Written by make_scaler_golden.py; see its first comment for what is here. Do not edit. */
#ifndef SCALER_GOLDEN_H
#define SCALER_GOLDEN_H

#include <stdint.h>

typedef struct scaler_step {
    int found_inf;
    uint32_t growth_tracker;
    float scale;
} scaler_step;

static const scaler_step scaler_steps_0[8] = {
    {0, 1, 0x1p+16f}, {0, 2, 0x1p+16f}, {1, 0, 0x1p+15f}, {0, 1, 0x1p+15f},
    {1, 0, 0x1p+14f}, {1, 0, 0x1p+13f}, {0, 1, 0x1p+13f}, {0, 2, 0x1p+13f}
};

static const scaler_step scaler_steps_1[10] = {
    {0, 1, 0x1p+10f}, {0, 2, 0x1p+10f}, {0, 0, 0x1p+11f}, {0, 1, 0x1p+11f},
    {0, 2, 0x1p+11f}, {0, 0, 0x1p+12f}, {0, 1, 0x1p+12f}, {0, 2, 0x1p+12f},
    {0, 0, 0x1p+13f}, {0, 1, 0x1p+13f}
};

static const scaler_step scaler_steps_2[14] = {
    {0, 1, 0x1p+10f}, {0, 2, 0x1p+10f}, {1, 0, 0x1p+9f}, {0, 1, 0x1p+9f},
    {0, 2, 0x1p+9f}, {0, 0, 0x1p+10f}, {0, 1, 0x1p+10f}, {1, 0, 0x1p+9f},
    {0, 1, 0x1p+9f}, {0, 2, 0x1p+9f}, {1, 0, 0x1p+8f}, {0, 1, 0x1p+8f},
    {0, 2, 0x1p+8f}, {0, 0, 0x1p+9f}
};

static const scaler_step scaler_steps_3[9] = {
    {0, 0, 0x1p+3f}, {0, 0, 0x1p+4f}, {1, 0, 0x1p+3f}, {0, 0, 0x1p+4f},
    {1, 0, 0x1p+3f}, {1, 0, 0x1p+2f}, {0, 0, 0x1p+3f}, {0, 0, 0x1p+4f},
    {0, 0, 0x1p+5f}
};

static const scaler_step scaler_steps_4[24] = {
    {1, 0, 0x1p+29f}, {1, 0, 0x1p+28f}, {1, 0, 0x1p+27f}, {1, 0, 0x1p+26f},
    {1, 0, 0x1p+25f}, {1, 0, 0x1p+24f}, {1, 0, 0x1p+23f}, {1, 0, 0x1p+22f},
    {1, 0, 0x1p+21f}, {1, 0, 0x1p+20f}, {1, 0, 0x1p+19f}, {1, 0, 0x1p+18f},
    {1, 0, 0x1p+17f}, {1, 0, 0x1p+16f}, {1, 0, 0x1p+15f}, {1, 0, 0x1p+14f},
    {1, 0, 0x1p+13f}, {1, 0, 0x1p+12f}, {1, 0, 0x1p+11f}, {1, 0, 0x1p+10f},
    {1, 0, 0x1p+9f}, {1, 0, 0x1p+8f}, {1, 0, 0x1p+7f}, {1, 0, 0x1p+6f}
};

static const scaler_step scaler_steps_5[17] = {
    {0, 1, 0x1p+124f}, {0, 0, 0x1p+125f}, {0, 1, 0x1p+125f}, {0, 0, 0x1p+126f},
    {0, 1, 0x1p+126f}, {0, 0, 0x1p+127f}, {0, 1, 0x1p+127f}, {0, 0, 0x1p+127f},
    {0, 1, 0x1p+127f}, {0, 0, 0x1p+127f}, {0, 1, 0x1p+127f}, {0, 0, 0x1p+127f},
    {1, 0, 0x1p+126f}, {0, 1, 0x1p+126f}, {0, 0, 0x1p+127f}, {0, 1, 0x1p+127f},
    {0, 0, 0x1p+127f}
};

static const scaler_step scaler_steps_6[120] = {
    {0, 1, 0x1p+16f}, {0, 2, 0x1p+16f}, {0, 3, 0x1p+16f}, {1, 0, 0x1p+15f},
    {0, 1, 0x1p+15f}, {0, 2, 0x1p+15f}, {1, 0, 0x1p+14f}, {0, 1, 0x1p+14f},
    {0, 2, 0x1p+14f}, {0, 3, 0x1p+14f}, {0, 4, 0x1p+14f}, {0, 0, 0x1p+15f},
    {0, 1, 0x1p+15f}, {0, 2, 0x1p+15f}, {0, 3, 0x1p+15f}, {0, 4, 0x1p+15f},
    {1, 0, 0x1p+14f}, {0, 1, 0x1p+14f}, {0, 2, 0x1p+14f}, {1, 0, 0x1p+13f},
    {0, 1, 0x1p+13f}, {0, 2, 0x1p+13f}, {0, 3, 0x1p+13f}, {0, 4, 0x1p+13f},
    {0, 0, 0x1p+14f}, {0, 1, 0x1p+14f}, {0, 2, 0x1p+14f}, {0, 3, 0x1p+14f},
    {0, 4, 0x1p+14f}, {0, 0, 0x1p+15f}, {0, 1, 0x1p+15f}, {0, 2, 0x1p+15f},
    {0, 3, 0x1p+15f}, {0, 4, 0x1p+15f}, {0, 0, 0x1p+16f}, {0, 1, 0x1p+16f},
    {0, 2, 0x1p+16f}, {1, 0, 0x1p+15f}, {0, 1, 0x1p+15f}, {0, 2, 0x1p+15f},
    {0, 3, 0x1p+15f}, {0, 4, 0x1p+15f}, {0, 0, 0x1p+16f}, {0, 1, 0x1p+16f},
    {0, 2, 0x1p+16f}, {0, 3, 0x1p+16f}, {0, 4, 0x1p+16f}, {1, 0, 0x1p+15f},
    {0, 1, 0x1p+15f}, {0, 2, 0x1p+15f}, {0, 3, 0x1p+15f}, {0, 4, 0x1p+15f},
    {0, 0, 0x1p+16f}, {0, 1, 0x1p+16f}, {0, 2, 0x1p+16f}, {1, 0, 0x1p+15f},
    {0, 1, 0x1p+15f}, {0, 2, 0x1p+15f}, {0, 3, 0x1p+15f}, {0, 4, 0x1p+15f},
    {0, 0, 0x1p+16f}, {0, 1, 0x1p+16f}, {0, 2, 0x1p+16f}, {0, 3, 0x1p+16f},
    {0, 4, 0x1p+16f}, {0, 0, 0x1p+17f}, {0, 1, 0x1p+17f}, {0, 2, 0x1p+17f},
    {0, 3, 0x1p+17f}, {0, 4, 0x1p+17f}, {0, 0, 0x1p+18f}, {0, 1, 0x1p+18f},
    {0, 2, 0x1p+18f}, {0, 3, 0x1p+18f}, {0, 4, 0x1p+18f}, {0, 0, 0x1p+19f},
    {0, 1, 0x1p+19f}, {0, 2, 0x1p+19f}, {0, 3, 0x1p+19f}, {0, 4, 0x1p+19f},
    {0, 0, 0x1p+20f}, {0, 1, 0x1p+20f}, {0, 2, 0x1p+20f}, {0, 3, 0x1p+20f},
    {0, 4, 0x1p+20f}, {0, 0, 0x1p+21f}, {0, 1, 0x1p+21f}, {1, 0, 0x1p+20f},
    {0, 1, 0x1p+20f}, {0, 2, 0x1p+20f}, {0, 3, 0x1p+20f}, {0, 4, 0x1p+20f},
    {0, 0, 0x1p+21f}, {0, 1, 0x1p+21f}, {0, 2, 0x1p+21f}, {0, 3, 0x1p+21f},
    {0, 4, 0x1p+21f}, {0, 0, 0x1p+22f}, {0, 1, 0x1p+22f}, {0, 2, 0x1p+22f},
    {0, 3, 0x1p+22f}, {0, 4, 0x1p+22f}, {0, 0, 0x1p+23f}, {0, 1, 0x1p+23f},
    {0, 2, 0x1p+23f}, {0, 3, 0x1p+23f}, {0, 4, 0x1p+23f}, {0, 0, 0x1p+24f},
    {0, 1, 0x1p+24f}, {0, 2, 0x1p+24f}, {0, 3, 0x1p+24f}, {0, 4, 0x1p+24f},
    {0, 0, 0x1p+25f}, {0, 1, 0x1p+25f}, {1, 0, 0x1p+24f}, {0, 1, 0x1p+24f},
    {0, 2, 0x1p+24f}, {0, 3, 0x1p+24f}, {0, 4, 0x1p+24f}, {0, 0, 0x1p+25f}
};

static const struct {
    const char *name;
    float initial_scale;
    uint32_t growth_interval;
    int count;
    const scaler_step *steps;
} scaler_golden[7] = {
    {"the defaults, a few overflows", 0x1p+16f, 2000, 8, scaler_steps_0},
    {"growth at the interval", 0x1p+10f, 3, 10, scaler_steps_1},
    {"an overflow starts the count anew", 0x1p+10f, 3, 14, scaler_steps_2},
    {"growth in every step", 0x1p+2f, 1, 9, scaler_steps_3},
    {"one overflow after the other", 0x1p+30f, 2000, 24, scaler_steps_4},
    {"growth to infinity", 0x1p+124f, 2, 17, scaler_steps_5},
    {"rare overflows", 0x1p+16f, 5, 120, scaler_steps_6}
};

#endif
