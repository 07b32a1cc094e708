// races.c: the race detector of cuda_on_cpu.h. The file under test is compiled with -fsanitize=thread, so that it calls
// __tsan_read4() and the like before each load and store, and linked with the functions here in place of the
// sanitizer's. Each two bytes of device and shared memory remember who wrote and who read them last. Two accesses of
// different threads, one of them a write, must have something between them: a barrier of the block, a __syncwarp if
// both are of one warp, the end of the launch. It finds a race whatever the order was in this run. It does not see
// plain memcpy (cp.async reports itself) nor atomics.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

typedef struct Access {
    uint32_t launch, block, barriers, warp_barriers;
    int32_t thread; // plus 1; 0: nobody
} Access;

typedef struct Cell {
    Access write, read;
} Cell;

typedef struct Region {
    const char *base;
    size_t bytes, mapped;
    int device;
    Cell *cells;
} Region;

enum { REGIONS = 16 };
static Region regions[REGIONS];
static Access now; // thread 0: the host or the scheduler runs

void cuda_races_now(int thread, uint32_t launch, uint32_t block, uint32_t barriers, uint32_t warp_barriers) {
    now = (Access){launch, block, barriers, warp_barriers, thread + 1};
}

// Watch a region of memory, or forget it (bytes 0).
void cuda_races_watch(const void *base, size_t bytes, int device) {
    Region *r = regions;
    while (r < regions + REGIONS && r->base != (bytes ? NULL : base)) r++;
    if (r == regions + REGIONS) return;
    if (!bytes) {
        munmap(r->cells, r->mapped);
        *r = (Region){0};
        return;
    }
    size_t mapped = (bytes / 2 + 1) * sizeof(Cell);
    Cell *cells = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (cells == MAP_FAILED) abort();
    *r = (Region){base, bytes, mapped, device, cells};
}

void cuda_races_fault(const char *memory, const char *how, int other, const void *pc);

// Whether `before` and the access now may be in either order.
static int unordered(const Region *r, const Access *before) {
    if (!before->thread || before->launch != now.launch) return 0;
    if (before->block != now.block) return r->device;
    if (before->thread == now.thread || before->barriers != now.barriers) return 0;
    return (before->thread - 1) / 32 != (now.thread - 1) / 32 || before->warp_barriers == now.warp_barriers;
}

static void touch(const void *p, size_t bytes, int write, const void *pc) {
    if (!now.thread) return;
    for (Region *r = regions; r < regions + REGIONS; r++) {
        size_t at = (const char *)p - r->base;
        if (!r->base || at >= r->bytes) continue;
        for (Cell *c = r->cells + at / 2; c <= r->cells + (at + bytes - 1) / 2; c++) {
            const char *memory = r->device ? "device" : "shared";
            if (unordered(r, &c->write))
                cuda_races_fault(memory, write ? "two writes" : "a write, a read", c->write.thread - 1, pc);
            if (write && unordered(r, &c->read)) cuda_races_fault(memory, "a read, a write", c->read.thread - 1, pc);
            *(write ? &c->write : &c->read) = now;
        }
        return;
    }
}

void cuda_races_touch(const void *p, size_t bytes, int write) { touch(p, bytes, write, __builtin_return_address(0)); }

#define PC __builtin_return_address(0)
void __tsan_init(void) {}
void __tsan_func_entry(void *pc) { (void)pc; }
void __tsan_func_exit(void) {}
void __tsan_vptr_update(void **p, void *v) { (void)p, (void)v; }
void __tsan_vptr_read(void **p) { (void)p; }
void __tsan_read1(void *p) { touch(p, 1, 0, PC); }
void __tsan_read2(void *p) { touch(p, 2, 0, PC); }
void __tsan_read4(void *p) { touch(p, 4, 0, PC); }
void __tsan_read8(void *p) { touch(p, 8, 0, PC); }
void __tsan_read16(void *p) { touch(p, 16, 0, PC); }
void __tsan_write1(void *p) { touch(p, 1, 1, PC); }
void __tsan_write2(void *p) { touch(p, 2, 1, PC); }
void __tsan_write4(void *p) { touch(p, 4, 1, PC); }
void __tsan_write8(void *p) { touch(p, 8, 1, PC); }
void __tsan_write16(void *p) { touch(p, 16, 1, PC); }
void __tsan_unaligned_read2(void *p) { touch(p, 2, 0, PC); }
void __tsan_unaligned_read4(void *p) { touch(p, 4, 0, PC); }
void __tsan_unaligned_read8(void *p) { touch(p, 8, 0, PC); }
void __tsan_unaligned_read16(void *p) { touch(p, 16, 0, PC); }
void __tsan_unaligned_write2(void *p) { touch(p, 2, 1, PC); }
void __tsan_unaligned_write4(void *p) { touch(p, 4, 1, PC); }
void __tsan_unaligned_write8(void *p) { touch(p, 8, 1, PC); }
void __tsan_unaligned_write16(void *p) { touch(p, 16, 1, PC); }
void __tsan_read_range(void *p, size_t n) { touch(p, n, 0, PC); }
void __tsan_write_range(void *p, size_t n) { touch(p, n, 1, PC); }
