// Fuzzer's entry for image.c. test/image.c includes it, to run it on flipped bytes without a fuzzer.
//   clang -g -O1 -std=c11 -D_GNU_SOURCE -Wno-psabi -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -I.
//         -isystem /usr/include/stb test/fuzz/image.c image.c -lcrypto -lm -o build/fuzz_image
//   build/fuzz_image -max_len=65536 -max_total_time=600 CORPUS
// It needs only image.c, so it brings a fail() for when the engine's is not there.
#include "vlm.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__attribute__((weak)) bool fail(Error *err, int status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    err->status = status;
    vsnprintf(err->message, sizeof err->message, format, args);
    va_end(args);
    return false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define EXPECT(what)                                                                                                   \
    do {                                                                                                               \
        if (!(what)) fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what), abort();                       \
    } while (0)

static const ImageConfig FUZZ_CONFIG = {.patch = 14,
                                        .merge = 2,
                                        .temporal = 2,
                                        .min_pixels = 3136,
                                        .max_pixels = 16 * 784,
                                        .mean = {0.5f, 0.5f, 0.5f},
                                        .std = {0.25f, 0.25f, 0.25f},
                                        .background = {255, 255, 255},
                                        .max_source_pixels = 1 << 16};

// Give the chunks of a PNG the checksums that their bytes now have, so that what is changed gets past them.
static void repair_png(uint8_t *b, size_t n) {
    for (size_t at = 8; at + 12 <= n;) {
        size_t length = (size_t)b[at] << 24 | b[at + 1] << 16 | b[at + 2] << 8 | b[at + 3];
        if (length > n - at - 12) return;
        uint32_t crc = 0xFFFFFFFF;
        for (size_t i = at + 4; i < at + 8 + length; i++) {
            crc ^= b[i];
            for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320 : 0);
        }
        for (int i = 0; i < 4; i++) b[at + 8 + length + i] = (uint8_t)(~crc >> (24 - 8 * i));
        at += 12 + length;
    }
}

// Any bytes give a picture of a legal size or a clear refusal, and the same whatever the workspace held before.
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static Workspace work;
    if (!work.base) work.base = malloc(work.size = image_workspace(&FUZZ_CONFIG));
    uint8_t *bytes = malloc(n + !n); // its own block: the sanitizer sees a read past it
    memcpy(bytes, data, n);
    if (n > 8 && !memcmp(bytes, "\x89PNG", 4)) repair_png(bytes, n);
    Image image[2];
    bool ok[2];
    for (int i = 0; i < 2; i++) {
        Error err = {0};
        memset(work.base, i ? 0x55 : 0xAA, work.peak);
        ok[i] = image_load(&FUZZ_CONFIG, &work, bytes, n, &image[i], &err);
        EXPECT(ok[i] ? !err.status : err.status == 400 || err.status == 413);
        EXPECT(ok[i] || (strlen(err.message) > 10 && !strchr(err.message, '/') && !strstr(err.message, "0x")));
        EXPECT(work.peak <= work.size);
        EXPECT(ok[i] || !strstr(err.message, "memory")); // the workspace is large enough for anything
    }
    EXPECT(ok[0] == ok[1]);
    if (ok[0]) {
        EXPECT(image[0].width > 0 && image[0].width % 28 == 0 && image[0].height > 0 && image[0].height % 28 == 0);
        EXPECT(!memcmp(image[0].key, image[1].key, sizeof image[0].key));
        image_free(&image[0]);
        image_free(&image[1]);
    }
    free(bytes);
    return ok[0];
}
