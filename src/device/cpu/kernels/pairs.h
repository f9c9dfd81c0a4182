/* Matrix products of bf16: AMX, AVX512-BF16
 *
 * Where both operands are bf16 a panel's cell holds two neighbours in k, and one instruction
 * multiplies and adds both: VDPBF16PS of AVX512_BF16, a lane of a vector; TDPBF16PS of AMX, a tile
 * of 16 x 16 sums at once. Products are exact and sums are fp32, rounded to nearest even; denormals
 * count as zero, in and out, whatever MXCSR says. The order of additions is the instruction's own,
 * so the bits differ between the two and from those of widened operands; on one machine they depend
 * on the row of A, the column of B and k alone, like those of the other kernels.
 *
 *     B, and A for VDPBF16PS               A for AMX: tiles of 16 rows x 16 cells,
 *     [cell][width], as above              [cell / 16][row / 16][16 rows][16 cells]
 *
 * An odd end of k, and for AMX what is missing to 16 cells, is filled with zeros on both sides.
 *
 * AMX has state that the system gives to processes that ask (arch_prctl; signal frames grow by
 * 8 KiB), and per thread a configuration: loaded when a thread starts work on a product and
 * released after it, so that nobody else's context switches carry tiles. */

#if DTRAIN__ISA == 3 && DTRAIN__PAIRS
#include <cpuid.h>
#include <sys/syscall.h>

#define DTRAIN__ON_PAIRS \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")))
#define DTRAIN__ON_AMX \
    __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))

/* Full zero-masks: g++ warns of the undefined value that the plain intrinsic starts from. */
#define DTRAIN__LOW32(a, b) _mm512_maskz_unpacklo_epi32(0xffff, a, b)
#define DTRAIN__HIGH32(a, b) _mm512_maskz_unpackhi_epi32(0xffff, a, b)
#define DTRAIN__LOW64(a, b) _mm512_maskz_unpacklo_epi64(0xff, a, b)
#define DTRAIN__HIGH64(a, b) _mm512_maskz_unpackhi_epi64(0xff, a, b)
#define DTRAIN__LANES(a, b, which) _mm512_maskz_shuffle_i32x4(0xffff, a, b, which)

/* 16 x 16 cells: v[r] holds a row before and a column after. Within the four lanes of 128 bits
 * first, then the lanes. */
DTRAIN__HELPER void dtrain__transpose16(__m512i v[16])
{
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = DTRAIN__LOW32(v[i], v[i + 1]);
        t[i + 1] = DTRAIN__HIGH32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) { /* v[i + j], lane q: column 4 q + j of rows i ... i + 3 */
        v[i] = DTRAIN__LOW64(t[i], t[i + 2]);
        v[i + 1] = DTRAIN__HIGH64(t[i], t[i + 2]);
        v[i + 2] = DTRAIN__LOW64(t[i + 1], t[i + 3]);
        v[i + 3] = DTRAIN__HIGH64(t[i + 1], t[i + 3]);
    }
    for (int j = 0; j < 4; j++) {
        const __m512i even = DTRAIN__LANES(v[j], v[4 + j], 0x88);
        const __m512i odd = DTRAIN__LANES(v[j], v[4 + j], 0xdd);
        const __m512i even2 = DTRAIN__LANES(v[8 + j], v[12 + j], 0x88);
        const __m512i odd2 = DTRAIN__LANES(v[8 + j], v[12 + j], 0xdd);
        t[j] = DTRAIN__LANES(even, even2, 0x88);
        t[4 + j] = DTRAIN__LANES(odd, odd2, 0x88);
        t[8 + j] = DTRAIN__LANES(even, even2, 0xdd);
        t[12 + j] = DTRAIN__LANES(odd, odd2, 0xdd);
    }
    for (int i = 0; i < 16; i++) v[i] = t[i];
}

DTRAIN__HELPER const uint16_t *dtrain__bf16_at(const dtrain__operand *x, int64_t row,
                                               int64_t column)
{
    return (const uint16_t *)x->data + row * x->ld + column;
}

/* 16 cells of one run along k, of which the first `k` elements exist. */
DTRAIN__HELPER __m512i dtrain__cells_of_run(const uint16_t *run, int k)
{
    return k >= 32 ? _mm512_loadu_si512(run)
                   : _mm512_maskz_loadu_epi16(k > 0 ? (1u << k) - 1u : 0u, run);
}

/* One cell of each of 16 neighbours, of which the first `count` exist; k: steps left. */
DTRAIN__HELPER __m512i dtrain__cells_of_steps(const uint16_t *step, int64_t ld, int count, int k)
{
    const __mmask16 some = (__mmask16)(count >= 16 ? 0xffffu : count > 0 ? (1u << count) - 1u : 0u);
    const __m512i first = _mm512_maskz_cvtepu16_epi32(
        0xffff, _mm256_maskz_loadu_epi16(k > 0 ? some : (__mmask16)0, step));
    if (k < 2) return first;
    const __m512i second =
        _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_maskz_loadu_epi16(some, step + ld));
    return _mm512_maskz_or_epi32(0xffff, first, _mm512_maskz_slli_epi32(0xffff, second, 16));
}

/* The 16 x 16 cells from index and p on: v[c] is cell c of 16 indices where `by_cell`, else v[r] is
 * 16 cells of index r. What the operand does not have, count indices and k steps, is 0. */
DTRAIN__HELPER void dtrain__cells(__m512i v[16], const dtrain__operand *x, int64_t index, int count,
                                  int64_t p, int k, int by_cell)
{
    if (x->along_k)
        for (int r = 0; r < 16; r++)
            v[r] = r < count ? dtrain__cells_of_run(dtrain__bf16_at(x, index + r, p), k)
                             : _mm512_setzero_si512();
    else
        for (int c = 0; c < 16; c++) {
            const int left = k - 2 * c;
            v[c] = left > 0 ? dtrain__cells_of_steps(dtrain__bf16_at(x, p + 2 * c, index), x->ld,
                                                     count, left)
                            : _mm512_setzero_si512();
        }
    if (x->along_k == by_cell) dtrain__transpose16(v);
}

/* Cells side by side, `cells` of them. */
DTRAIN__HELPER void dtrain__pack_by_cell(float *panel, int width, const dtrain__operand *x,
                                         int64_t index, int count, int64_t p, int k, int cells)
{
    for (int c = 0; c < cells; c += 16)
        for (int r = 0; r < width; r += 16) {
            const int lanes = width - r < 16 ? width - r : 16,
                      some = cells - c < 16 ? cells - c : 16;
            float *to = panel + c * width + r;
            __m512i v[16];
            dtrain__cells(v, x, index + r, count - r, p + 2 * c, k - 2 * c, 1);
            if (lanes == 16 && some == 16)
                for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * width, v[i]);
            else
                for (int i = 0; i < 16; i++)
                    if (i < some)
                        _mm512_mask_storeu_epi32(to + i * width, (__mmask16)((1u << lanes) - 1u),
                                                 v[i]);
        }
}

DTRAIN__ON_PAIRS static void dtrain__pack_a_vdpbf16(float *panel, const dtrain__operand *x,
                                                    int64_t index, int count, int64_t p, int k)
{
    dtrain__pack_by_cell(panel, 12, x, index, count, p, k, (k + 1) / 2);
}

DTRAIN__ON_PAIRS static void dtrain__pack_b_vdpbf16(float *panel, const dtrain__operand *x,
                                                    int64_t index, int count, int64_t p, int k)
{
    dtrain__pack_by_cell(panel, 32, x, index, count, p, k, (k + 1) / 2);
}

DTRAIN__ON_PAIRS static void dtrain__pack_a_amx(float *panel, const dtrain__operand *x,
                                                int64_t index, int count, int64_t p, int k)
{
    for (; k > 0; k -= 32, p += 32)
        for (int r = 0; r < 32; r += 16, panel += 256) {
            __m512i v[16];
            dtrain__cells(v, x, index + r, count - r, p, k, 0);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(panel + i * 16, v[i]);
        }
}

DTRAIN__ON_PAIRS static void dtrain__pack_b_amx(float *panel, const dtrain__operand *x,
                                                int64_t index, int count, int64_t p, int k)
{
    dtrain__pack_by_cell(panel, 32, x, index, count, p, k, (k + 31) / 32 * 16);
}

/* The tile of AVX-512 with pairs for numbers. */
#define DTRAIN__PAIR_STEP(r)                                         \
    do {                                                             \
        const __m512bh x = (__m512bh)dtrain__vset(a##r[at]);         \
        left##r = _mm512_dpbf16_ps(left##r, x, (__m512bh)b_left);    \
        right##r = _mm512_dpbf16_ps(right##r, x, (__m512bh)b_right); \
    } while (0);
DTRAIN__ON_PAIRS static void dtrain__kernel_vdpbf16(int64_t k, const float *a, const float *b,
                                                    int64_t b_row, float alpha, float beta,
                                                    float *c, int64_t c_row)
{
    enum { rows = DTRAIN__MR, a_row = 1, a_step = DTRAIN__MR };
    DTRAIN__TILE(DTRAIN__ROWS, DTRAIN__PAIR_STEP)
}

/* Eight tiles of 16 rows of 64 bytes: palette, start row, reserved, bytes of each, rows of each. */
static const uint8_t dtrain__amx_config[64] __attribute__((aligned(64))) = {
    1,  0, 0,  0, 0,  0,  0,  0,  0,  0,  0,  0,  0, 0, 0, 0, 64, 0, 64, 0, 64, 0,
    64, 0, 64, 0, 64, 0,  64, 0,  64, 0,  0,  0,  0, 0, 0, 0, 0,  0, 0,  0, 0,  0,
    0,  0, 0,  0, 16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0,  0, 0,  0};

DTRAIN__ON_AMX static void dtrain__amx_begin(void) { _tile_loadconfig(dtrain__amx_config); }
DTRAIN__ON_AMX static void dtrain__amx_end(void) { _tile_release(); }

/* 32 x 32 of C in tiles 0 to 3. Without scaling the tiles start from C and end there. */
DTRAIN__ON_AMX static void dtrain__kernel_amx(int64_t cells, const float *a, const float *b,
                                              int64_t ldb, float alpha, float beta, float *c,
                                              int64_t ldc)
{
    const int64_t b_row = ldb * 4, c_row = ldc * 4;
    const bool plain = alpha == 1 && (beta == 0 || beta == 1);
    for (int r = 0; r < 32; r++) {
        __builtin_prefetch(c + r * ldc, 1);
        __builtin_prefetch(c + r * ldc + 16, 1);
    }
    if (plain && beta == 1) {
        _tile_loadd(0, c, c_row);
        _tile_loadd(1, c + 16, c_row);
        _tile_loadd(2, c + 16 * ldc, c_row);
        _tile_loadd(3, c + 16 * ldc + 16, c_row);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (; cells > 0; cells -= 16, a += 512, b += 16 * ldb) {
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, b_row);
        _tile_loadd(7, b + 16, b_row);
        _tile_loadd(5, a + 256, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    float sums[32 * 32] __attribute__((aligned(64)));
    float *to = plain ? c : sums;
    const int64_t ld = plain ? ldc : 32;
    _tile_stored(0, to, ld * 4);
    _tile_stored(1, to + 16, ld * 4);
    _tile_stored(2, to + 16 * ld, ld * 4);
    _tile_stored(3, to + 16 * ld + 16, ld * 4);
    if (plain) return;
    for (int r = 0; r < 32; r++, c += ldc)
        for (int j = 0; j < 32; j++)
            c[j] = alpha * sums[r * 32 + j] + (beta == 0 ? 0 : beta * c[j]);
}

static const dtrain__isa dtrain__isa_vdpbf16 = {"avx512_bf16",
                                                12,
                                                32,
                                                2,
                                                1,
                                                8,
                                                dtrain__kernel_vdpbf16,
                                                dtrain__pack_a_vdpbf16,
                                                dtrain__pack_b_vdpbf16,
                                                DTRAIN__K(finish_tile),
                                                DTRAIN__K(slope_tile),
                                                DTRAIN__K(load_tile),
                                                DTRAIN__K(store_tile),
                                                NULL,
                                                NULL};
static const dtrain__isa dtrain__isa_amx = {"amx_bf16",
                                            32,
                                            32,
                                            2,
                                            16,
                                            32,
                                            dtrain__kernel_amx,
                                            dtrain__pack_a_amx,
                                            dtrain__pack_b_amx,
                                            DTRAIN__K(finish_tile),
                                            DTRAIN__K(slope_tile),
                                            DTRAIN__K(load_tile),
                                            DTRAIN__K(store_tile),
                                            dtrain__amx_begin,
                                            dtrain__amx_end};

static bool dtrain__has_vdpbf16(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16");
}

/* The processor has tiles, the system saves them, and this process may use them: it asks for that
 * here, and again is harmless. The answer is no, for example, where alternative signal stacks are
 * too small for the larger frames. */
static bool dtrain__has_amx(void)
{
    enum { OSXSAVE = 1 << 27, TILE_AND_BF16 = 1 << 24 | 1 << 22, TILE_STATE = 3 << 17 };
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    uint32_t a, b, c, d, low, high;
    if (!dtrain__has_vdpbf16() || !__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
    __asm__ __volatile__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & TILE_STATE) != TILE_STATE || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (d & TILE_AND_BF16) == TILE_AND_BF16 &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#undef DTRAIN__ON_PAIRS
#undef DTRAIN__ON_AMX
#undef DTRAIN__LOW32
#undef DTRAIN__HIGH32
#undef DTRAIN__LOW64
#undef DTRAIN__HIGH64
#undef DTRAIN__LANES
#undef DTRAIN__PAIR_STEP
#endif
