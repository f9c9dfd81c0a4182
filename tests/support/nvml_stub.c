/* nvml_stub.c: stands for NVIDIA's management library in tests: a shared library with the functions that
 * tools/nvml.h looks for.
 *
 *     NVML_STUB="CALL=CODE,..."   what calls return instead of success: init, find, utilization, memory, clock, power,
 *                                 temperature, reasons, ecc
 *
 * GPU number i answers with figures that tell it apart. Compiled with NVML_OLD it has the name that reasons had
 * before, and neither power nor ECC. */
#include <stdlib.h>
#include <string.h>

static int code(const char *call)
{
    const char *text = getenv("NVML_STUB"), *at = text ? strstr(text, call) : NULL;
    return at && at[strlen(call)] == '=' ? atoi(at + strlen(call) + 1) : 0;
}

typedef struct gpu {
    unsigned number;
} gpu;
static gpu gpus[8];

int nvmlInit_v2(void);
int nvmlInit_v2(void) { return code("init"); }
int nvmlShutdown(void);
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    gpus[index % 8].number = index;
    *device = &gpus[index % 8];
    return code("find");
}
int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates);
int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates)
{
    rates[0] = 50 + ((gpu *)device)->number;
    rates[1] = 7;
    return code("utilization");
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory);
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory)
{
    memory[0] = 80ull << 30;
    memory[1] = 79ull << 30;
    memory[2] = (1ull << 30) + ((gpu *)device)->number * (1ull << 20);
    return code("memory");
}
int nvmlDeviceGetClockInfo(void *device, unsigned which, unsigned *mhz);
int nvmlDeviceGetClockInfo(void *device, unsigned which, unsigned *mhz)
{
    *mhz = which == 1 ? 1980 + ((gpu *)device)->number : 1;
    return code("clock");
}
int nvmlDeviceGetTemperature(void *device, unsigned which, unsigned *celsius);
int nvmlDeviceGetTemperature(void *device, unsigned which, unsigned *celsius)
{
    *celsius = which == 0 ? 60 + ((gpu *)device)->number : 1;
    return code("temperature");
}
#ifdef NVML_OLD
#define REASONS nvmlDeviceGetCurrentClocksThrottleReasons
#else
#define REASONS nvmlDeviceGetCurrentClocksEventReasons
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts);
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts)
{
    *milliwatts = 350500 + 1000 * ((gpu *)device)->number;
    return code("power");
}
int nvmlDeviceGetTotalEccErrors(void *device, unsigned type, unsigned counter,
                                unsigned long long *errors);
int nvmlDeviceGetTotalEccErrors(void *device, unsigned type, unsigned counter,
                                unsigned long long *errors)
{
    *errors = type == 1 && counter == 0 ? 3 + ((gpu *)device)->number : 99;
    return code("ecc");
}
#endif
int REASONS(void *device, unsigned long long *reasons);
int REASONS(void *device, unsigned long long *reasons)
{
    *reasons = 1ull << ((gpu *)device)->number;
    return code("reasons");
}
