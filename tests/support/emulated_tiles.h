/* emulated_tiles.h: the tiles of AMX in plain C, in the place of the compiler's intrinsics. Include it
 * before dtrain.h. */
#ifndef EMULATED_TILES_H
#define EMULATED_TILES_H

#define _GNU_SOURCE 1 /* which dtrain.h wants of the first header */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define DTRAIN__TEST_TILES
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) tiles_configure(config)
#define _tile_release() tiles_configure(NULL)
#define _tile_zero(t) memset(tiles[t], 0, sizeof tiles[t])
#define _tile_loadd(t, from, stride) tile_load(t, from, stride)
#define _tile_stored(t, to, stride) tile_store(t, to, stride)
#define _tile_dpbf16ps(c, a, b) tile_multiply(c, a, b)

static __thread float tiles[8][16][16]; /* rows of 64 bytes */
static __thread int tiles_ready;

/* Eight tiles of 16 rows of 64 bytes are the only configuration there is. */
static inline void tiles_configure(const void *config)
{
    const uint8_t *bytes = (const uint8_t *)config;
    tiles_ready = config != NULL && bytes[0] == 1;
    for (int i = 0; i < 8 && tiles_ready; i++)
        tiles_ready = bytes[16 + 2 * i] == 64 && bytes[17 + 2 * i] == 0 && bytes[48 + i] == 16;
}

static inline void tile_load(int t, const void *from, int64_t stride)
{
    for (int r = 0; r < 16; r++) memcpy(tiles[t][r], (const char *)from + r * stride, 64);
}

static inline void tile_store(int t, void *to, int64_t stride)
{
    for (int r = 0; r < 16; r++) memcpy((char *)to + r * stride, tiles[t][r], 64);
}

static inline float tile_half(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* c (16, 16) += a (16, 16 pairs) b (16 pairs, 16). Without a configuration: NaN. */
static inline void tile_multiply(int c, int a, int b)
{
    for (int i = 0; i < 16; i++)
        for (int p = 0; p < 16; p++)
            for (int j = 0; j < 16; j++) {
                uint32_t x, y;
                memcpy(&x, &tiles[a][i][p], sizeof x);
                memcpy(&y, &tiles[b][p][j], sizeof y);
                tiles[c][i][j] += tile_half(x << 16) * tile_half(y << 16);
                tiles[c][i][j] += tile_half(x & 0xffff0000u) * tile_half(y & 0xffff0000u);
                if (!tiles_ready) tiles[c][i][j] = tile_half(0x7fc00000u);
            }
}

#endif
