/* The table of one instruction set. */

#define DTRAIN__ENTRY(name) DTRAIN__K(name),
#define DTRAIN__ABSENT(name) NULL,
#if DTRAIN__ISA == 3
#define DTRAIN__SHARED(name) dtrain__##name##_avx2,
#else
#define DTRAIN__SHARED DTRAIN__ENTRY
#endif
#if !DTRAIN__MODELS
#define DTRAIN__TILES NULL
#define DTRAIN__ENTRIES \
    DTRAIN__RANGES(DTRAIN__SHARED, DTRAIN__ABSENT, DTRAIN__ABSENT, DTRAIN__ABSENT)
#elif !DTRAIN__FAST
#define DTRAIN__TILES &DTRAIN__K(convolutions)
#define DTRAIN__ENTRIES \
    DTRAIN__RANGES(DTRAIN__SHARED, DTRAIN__SHARED, DTRAIN__ENTRY, DTRAIN__ABSENT)
#else
#define DTRAIN__TILES &DTRAIN__K(convolutions)
#define DTRAIN__ENTRIES DTRAIN__RANGES(DTRAIN__SHARED, DTRAIN__SHARED, DTRAIN__ENTRY, DTRAIN__ENTRY)
#endif
DTRAIN__UNUSED static const dtrain__kernels DTRAIN__K(kernels) = {DTRAIN__STRING(DTRAIN__SUFFIX),
                                                                  &DTRAIN__K(isa), DTRAIN__TILES,
                                                                  DTRAIN__K(mix), DTRAIN__ENTRIES};
#undef DTRAIN__SHARED
#undef DTRAIN__TILES
#undef DTRAIN__ENTRIES
