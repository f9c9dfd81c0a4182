/* The table of one instruction set. */

#define DTRAIN__ENTRY(name) DTRAIN__K(name),
static const dtrain__kernels DTRAIN__K(kernels) = {DTRAIN__STRING(DTRAIN__SUFFIX), &DTRAIN__K(isa),
                                                   &DTRAIN__K(convolutions), DTRAIN__K(mix),
                                                   DTRAIN__RANGES(DTRAIN__ENTRY)};
