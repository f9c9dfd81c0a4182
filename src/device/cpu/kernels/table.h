/* The table of one instruction set. */

#define DTRAIN__ENTRY(name) DTRAIN__K(name),
#define DTRAIN__PATCH_ENTRY(name) NULL,
#if DTRAIN__FAST
#undef DTRAIN__PATCH_ENTRY
#define DTRAIN__PATCH_ENTRY DTRAIN__ENTRY
#endif
static const dtrain__kernels DTRAIN__K(kernels) = {
    DTRAIN__STRING(DTRAIN__SUFFIX), &DTRAIN__K(isa), &DTRAIN__K(convolutions), DTRAIN__K(mix),
    DTRAIN__RANGES(DTRAIN__ENTRY) DTRAIN__PATCH_RANGES(DTRAIN__PATCH_ENTRY)};
#undef DTRAIN__PATCH_ENTRY
