// vlm_cpu_pick.c: which of the builds of vlm_cpu.c is the CPU device. The Makefile compiles that file once for each
// instruction set below, and the choice falls before main(), by what the processor says or by
// VLM_CPU=avx512|avx2|plain. They differ by rounding: some sums go over as many lanes as a register has, and not every
// set fuses a product and a sum.
#include "vlm.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

Device device_cpu;

extern Device device_cpu_plain;
#if defined(__x86_64__)
extern Device device_cpu_avx512, device_cpu_avx2;

static bool has_avx512(void) { // as its build's flags: Zen 4, Sapphire Rapids and later
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

static bool has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

static bool has_any(void) { return true; }

static const struct {
    const char *name;
    const Device *device;
    bool (*has)(void);
} builds[] = {
// the best first
#if defined(__x86_64__)
    {"avx512", &device_cpu_avx512, has_avx512},
    {"avx2", &device_cpu_avx2, has_avx2},
#endif
    {"plain", &device_cpu_plain, has_any},
};

__attribute__((constructor)) static void pick(void) {
    const char *wanted = getenv("VLM_CPU");
    for (size_t i = 0; i < sizeof builds / sizeof *builds; i++) {
        if ((wanted && strcmp(wanted, builds[i].name) != 0) || !builds[i].has()) continue;
        device_cpu = *builds[i].device;
        return;
    }
    fprintf(stderr, "vlm: VLM_CPU=%s: this processor or this build has not got it\n", wanted);
    exit(1);
}
