/* Matrix products of bf16: AMX
 *
 * If both operands are bf16, a panel's cell holds two neighbours in k, and TDPBF16PS multiplies and
 * adds a tile of 16 x 16 sums of 16 cells at once. Products are exact and sums are fp32, rounded to
 * nearest even; denormals count as zero, in and out, whatever MXCSR says. The instruction has its
 * own order of additions, so the bits differ from the product of widened operands; as in the other
 * kernels they depend only on the row of A, the column of B and k.
 *
 *     B                        A: tiles of 16 rows x 16 cells,
 *     [cell][32 columns]       [cell / 16][row / 16][16 rows][16 cells]
 *
 * Both sides are filled with zeros up to 16 cells.
 *
 * The system grants AMX state to processes that ask (arch_prctl; signal frames grow by 8 KiB). A
 * thread loads its tile configuration before a product and releases it afterwards, so that other
 * context switches carry no tiles. */

#if DTRAIN__PAIRS && \
    (DTRAIN__ISA == 3 || (defined(DTRAIN__TEST_WIDE) && defined(DTRAIN__TEST_TILES)))
#if DTRAIN__ISA == 3
#include <cpuid.h>
#include <sys/syscall.h>
#define DTRAIN__ON_AMX \
    __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#else /* a test brings its own tiles */
#define DTRAIN__ON_AMX
#endif

/* Copy four runs along k, from `index` on, as cells; 0 beyond `count` indices and k steps. */
DTRAIN__HELPER void DTRAIN__K(cells_of_runs)(float to[4][DTRAIN__KC], const dtrain__operand *x,
                                             int64_t index, int count, int64_t p, int k, int cells)
{
    for (int r = 0; r < 4; r++) {
        const uint16_t *run = (const uint16_t *)x->data + (index + r) * x->ld + p;
        memset(to[r], 0, (size_t)cells * sizeof(float));
        if (r < count) memcpy(to[r], run, (size_t)k * sizeof *run);
    }
}

/* Make cells side by side, each from two steps of k: the first is the lower half, the second the
 * upper half. */
DTRAIN__HELPER void DTRAIN__K(cells_of_steps)(float *to, const dtrain__operand *x, int64_t index,
                                              int count, int64_t p, int k, int cells)
{
    for (int c = 0; c < cells; c++)
        for (int j = 0; j < 32; j += DTRAIN__W, to += DTRAIN__W) {
            const int64_t at = (p + 2 * c) * x->ld + index + j;
            dtrain__v low = dtrain__vset(0), high = low;
            if (2 * c < k && j < count)
                low = dtrain__vload_as(x->data, DTRAIN_DTYPE_BF16, at, count - j);
            if (2 * c + 1 < k && j < count)
                high = dtrain__vload_as(x->data, DTRAIN_DTYPE_BF16, at + x->ld, count - j);
            dtrain__vstore(to, (dtrain__v)((DTRAIN__K(vwords))low >> 16 | (DTRAIN__K(vwords))high));
        }
}

DTRAIN__ROUTINE void DTRAIN__K(pack_b_amx)(float *panel, const dtrain__operand *x, int64_t index,
                                           int count, int64_t p, int k)
{
    const int cells = (k + 31) / 32 * 16;
    float runs[4][DTRAIN__KC];
    const float *const in[4] = {runs[0], runs[1], runs[2], runs[3]};
    if (!x->along_k) DTRAIN__K(cells_of_steps)(panel, x, index, count, p, k, cells);
    else
        for (int r = 0; r < 32; r += 4) {
            DTRAIN__K(cells_of_runs)(runs, x, index + r, count - r, p, k, cells);
            DTRAIN__K(interleave4)(panel + r, 32, in, cells);
        }
}

DTRAIN__ROUTINE void DTRAIN__K(pack_a_amx)(float *panel, const dtrain__operand *x, int64_t index,
                                           int count, int64_t p, int k)
{
    const int cells = (k + 31) / 32 * 16;
    float runs[4][DTRAIN__KC], steps[16 * 32];
    for (int r = 0; x->along_k && r < 32; r += 4) {
        DTRAIN__K(cells_of_runs)(runs, x, index + r, count - r, p, k, cells);
        for (int i = 0; i < 4; i++)
            for (int c = 0; c < cells; c += 16)
                memcpy(panel + c * 32 + (r + i) * 16, runs[i] + c, 16 * sizeof(float));
    }
    for (int c = 0; !x->along_k && c < cells; c += 16) {
        DTRAIN__K(cells_of_steps)(steps, x, index, count, p + 2 * c, k - 2 * c, 16);
        for (int r = 0; r < 32; r += 16)
            for (int i = 0; i < 16; i += 4) {
                const float *from = steps + i * 32 + r;
                const float *const in[4] = {from, from + 32, from + 64, from + 96};
                DTRAIN__K(interleave4)(panel + c * 32 + r * 16 + i, 16, in, 16);
            }
    }
}

/* Configure eight tiles of 16 rows of 64 bytes: palette, start row, reserved, bytes of each, rows
 * of each. gcc 12 assumes that the instruction reads only the first 8 bytes (the "m" of its
 * amxtileintrin.h): without the barrier it would never store the others. */
DTRAIN__ON_AMX static void DTRAIN__K(amx_begin)(void)
{
    uint8_t config[64] = {1};
    for (int i = 0; i < 8; i++) {
        config[16 + 2 * i] = 64;
        config[48 + i] = 16;
    }
    __asm__ __volatile__("" : : "r"(config) : "memory");
    _tile_loadconfig(config);
}

DTRAIN__ON_AMX static void DTRAIN__K(amx_end)(void) { _tile_release(); }

/* Compute 32 x 32 elements of C in tiles 0 to 3. Without scaling the tiles load and store C. */
DTRAIN__ON_AMX static void DTRAIN__K(kernel_amx)(int64_t cells, const float *a, const float *b,
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

static const dtrain__isa DTRAIN__K(isa_amx) = DTRAIN__ISA_OF("amx_bf16", 32, 32, 2, 16, 32, 0,
                                                             kernel_amx, pack_a_amx, pack_b_amx,
                                                             DTRAIN__K(amx_begin),
                                                             DTRAIN__K(amx_end));

#if DTRAIN__ISA == 3
/* Return whether the processor has tiles, the system saves them, and this process can use them: the
 * request for permission can be repeated. It fails, for example, if alternative signal stacks are
 * too small for the larger frames. */
static bool dtrain__has_amx(void)
{
    enum { OSXSAVE = 1 << 27, TILE_AND_BF16 = 1 << 24 | 1 << 22, TILE_STATE = 3 << 17 };
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    uint32_t a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
    __asm__ __volatile__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & TILE_STATE) != TILE_STATE || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (d & TILE_AND_BF16) == TILE_AND_BF16 &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif
#undef DTRAIN__ON_AMX
#endif
