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

static const scaler_step scaler_steps_6[9] = {
    {0, 0, 0x1.fffffep+127f}, {0, 0, 0x1.fffffep+127f}, {1, 0, 0x1.fffffep+126f}, {0, 0, 0x1.7ffffep+127f},
    {0, 0, 0x1.7ffffep+127f}, {1, 0, 0x1.7ffffep+126f}, {1, 0, 0x1.7ffffep+125f}, {0, 0, 0x1.1ffffep+126f},
    {0, 0, 0x1.affffcp+126f}
};

static const scaler_step scaler_steps_7[60] = {
    {0, 1, 0x1.f4p+9f}, {0, 0, 0x1.2cp+10f}, {1, 0, 0x1.68p+8f}, {0, 1, 0x1.68p+8f},
    {0, 0, 0x1.b00002p+8f}, {0, 1, 0x1.b00002p+8f}, {0, 0, 0x1.033336p+9f}, {1, 0, 0x1.370a42p+7f},
    {0, 1, 0x1.370a42p+7f}, {1, 0, 0x1.753f84p+5f}, {1, 0, 0x1.bfe5d2p+3f}, {1, 0, 0x1.0cbd18p+2f},
    {0, 1, 0x1.0cbd18p+2f}, {0, 0, 0x1.427c84p+2f}, {0, 1, 0x1.427c84p+2f}, {0, 0, 0x1.82fbd2p+2f},
    {0, 1, 0x1.82fbd2p+2f}, {0, 0, 0x1.d06164p+2f}, {0, 1, 0x1.d06164p+2f}, {0, 0, 0x1.16a0d6p+3f},
    {1, 0, 0x1.4e5a9cp+1f}, {0, 1, 0x1.4e5a9cp+1f}, {0, 0, 0x1.91398ap+1f}, {1, 0, 0x1.e1784p-1f},
    {0, 1, 0x1.e1784p-1f}, {0, 0, 0x1.20e1cp+0f}, {0, 1, 0x1.20e1cp+0f}, {0, 0, 0x1.5aa88p+0f},
    {1, 0, 0x1.9ffd68p-2f}, {1, 0, 0x1.f33018p-4f}, {0, 1, 0x1.f33018p-4f}, {1, 0, 0x1.2b8342p-5f},
    {0, 1, 0x1.2b8342p-5f}, {0, 0, 0x1.676a5p-5f}, {0, 1, 0x1.676a5p-5f}, {0, 0, 0x1.af4c62p-5f},
    {1, 0, 0x1.02c76ep-6f}, {0, 1, 0x1.02c76ep-6f}, {1, 0, 0x1.3688ecp-8f}, {1, 0, 0x1.74a45p-10f},
    {1, 0, 0x1.bf2b94p-12f}, {0, 1, 0x1.bf2b94p-12f}, {0, 0, 0x1.0c4d5ap-11f}, {0, 1, 0x1.0c4d5ap-11f},
    {0, 0, 0x1.41f66cp-11f}, {0, 1, 0x1.41f66cp-11f}, {1, 0, 0x1.825aeap-13f}, {0, 1, 0x1.825aeap-13f},
    {0, 0, 0x1.cfa04ep-13f}, {0, 1, 0x1.cfa04ep-13f}, {0, 0, 0x1.162cfcp-12f}, {1, 0, 0x1.4dcf96p-14f},
    {0, 1, 0x1.4dcf96p-14f}, {0, 0, 0x1.9092b6p-14f}, {0, 1, 0x1.9092b6p-14f}, {1, 0, 0x1.e0b00ep-16f},
    {0, 1, 0x1.e0b00ep-16f}, {0, 0, 0x1.2069a2p-15f}, {0, 1, 0x1.2069a2p-15f}, {1, 0, 0x1.5a185cp-17f}
};

static const scaler_step scaler_steps_8[120] = {
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

static const scaler_step scaler_steps_9[80] = {
    {0, 1, 0x1p+40f}, {0, 0, 0x1p+42f}, {1, 0, 0x1p+40f}, {1, 0, 0x1p+38f},
    {1, 0, 0x1p+36f}, {0, 1, 0x1p+36f}, {1, 0, 0x1p+34f}, {0, 1, 0x1p+34f},
    {0, 0, 0x1p+36f}, {0, 1, 0x1p+36f}, {1, 0, 0x1p+34f}, {0, 1, 0x1p+34f},
    {0, 0, 0x1p+36f}, {1, 0, 0x1p+34f}, {1, 0, 0x1p+32f}, {0, 1, 0x1p+32f},
    {0, 0, 0x1p+34f}, {1, 0, 0x1p+32f}, {1, 0, 0x1p+30f}, {0, 1, 0x1p+30f},
    {1, 0, 0x1p+28f}, {1, 0, 0x1p+26f}, {0, 1, 0x1p+26f}, {1, 0, 0x1p+24f},
    {0, 1, 0x1p+24f}, {1, 0, 0x1p+22f}, {0, 1, 0x1p+22f}, {1, 0, 0x1p+20f},
    {0, 1, 0x1p+20f}, {0, 0, 0x1p+22f}, {1, 0, 0x1p+20f}, {0, 1, 0x1p+20f},
    {1, 0, 0x1p+18f}, {1, 0, 0x1p+16f}, {0, 1, 0x1p+16f}, {1, 0, 0x1p+14f},
    {1, 0, 0x1p+12f}, {1, 0, 0x1p+10f}, {0, 1, 0x1p+10f}, {1, 0, 0x1p+8f},
    {0, 1, 0x1p+8f}, {0, 0, 0x1p+10f}, {0, 1, 0x1p+10f}, {1, 0, 0x1p+8f},
    {1, 0, 0x1p+6f}, {0, 1, 0x1p+6f}, {0, 0, 0x1p+8f}, {0, 1, 0x1p+8f},
    {1, 0, 0x1p+6f}, {1, 0, 0x1p+4f}, {1, 0, 0x1p+2f}, {0, 1, 0x1p+2f},
    {1, 0, 0x1p+0f}, {0, 1, 0x1p+0f}, {1, 0, 0x1p-2f}, {0, 1, 0x1p-2f},
    {0, 0, 0x1p+0f}, {0, 1, 0x1p+0f}, {1, 0, 0x1p-2f}, {0, 1, 0x1p-2f},
    {1, 0, 0x1p-4f}, {1, 0, 0x1p-6f}, {0, 1, 0x1p-6f}, {1, 0, 0x1p-8f},
    {1, 0, 0x1p-10f}, {0, 1, 0x1p-10f}, {1, 0, 0x1p-12f}, {1, 0, 0x1p-14f},
    {0, 1, 0x1p-14f}, {1, 0, 0x1p-16f}, {1, 0, 0x1p-18f}, {0, 1, 0x1p-18f},
    {0, 0, 0x1p-16f}, {0, 1, 0x1p-16f}, {0, 0, 0x1p-14f}, {0, 1, 0x1p-14f},
    {1, 0, 0x1p-16f}, {0, 1, 0x1p-16f}, {1, 0, 0x1p-18f}, {0, 1, 0x1p-18f}
};

static const struct {
    const char *name;
    float initial_scale, growth_factor, backoff_factor;
    uint32_t growth_interval;
    int count;
    const scaler_step *steps;
} scaler_golden[10] = {
    {"the defaults, a few overflows", 0x1p+16f, 0x1p+1f, 0x1p-1f, 2000, 8, scaler_steps_0},
    {"growth at the interval", 0x1p+10f, 0x1p+1f, 0x1p-1f, 3, 10, scaler_steps_1},
    {"an overflow starts the count anew", 0x1p+10f, 0x1p+1f, 0x1p-1f, 3, 14, scaler_steps_2},
    {"growth in every step", 0x1p+2f, 0x1p+1f, 0x1p-1f, 1, 9, scaler_steps_3},
    {"one overflow after the other", 0x1p+30f, 0x1p+1f, 0x1p-1f, 2000, 24, scaler_steps_4},
    {"growth to infinity", 0x1p+124f, 0x1p+1f, 0x1p-1f, 2, 17, scaler_steps_5},
    {"the largest number", 0x1.fffffep+127f, 0x1.8p+0f, 0x1p-1f, 1, 9, scaler_steps_6},
    {"factors that round", 0x1.f4p+9f, 0x1.333334p+0f, 0x1.333334p-2f, 2, 60, scaler_steps_7},
    {"rare overflows", 0x1p+16f, 0x1p+1f, 0x1p-1f, 5, 120, scaler_steps_8},
    {"frequent overflows", 0x1p+40f, 0x1p+2f, 0x1p-2f, 2, 80, scaler_steps_9}
};

#endif
