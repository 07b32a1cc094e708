// Runs image.c for test_image.py: commands on standard input, one a line, answers on standard output.
//   config PATCH MERGE TEMPORAL MIN MAX R G B LIMIT MEAN*3 STD*3
//   fit HEIGHT WIDTH            -> HEIGHT WIDTH
//   load BYTES, the file        -> WIDTH HEIGHT SOURCE_WIDTH SOURCE_HEIGHT KEY PEAK WORKSPACE MICROSECONDS, the pixels
//   patches TYPE N ORDER*N      -> BYTES, the rows of the picture loaded last (TYPE 0: f32, 1: bf16; N 0: all, in
//   order) flip SEED COUNT BYTES, file -> how many of COUNT files with flipped bytes are still a picture
// An error is a line: error STATUS MESSAGE
#include "fuzz/image.c"
#include <time.h>

static ImageConfig config;
static Workspace work;
static Image image;
static bool loaded;

static void say_error(const Error *err) { printf("error %d %s\n", err->status, err->message); }

static uint8_t *read_bytes(size_t n) {
    uint8_t *bytes = malloc(n + !n);
    EXPECT(bytes && fread(bytes, 1, n, stdin) == n);
    return bytes;
}

static void do_config(void) {
    int r, g, b;
    long long min, max, limit;
    EXPECT(scanf("%d %d %d %lld %lld %d %d %d %lld", &config.patch, &config.merge, &config.temporal, &min, &max, &r, &g,
                 &b, &limit) == 9);
    for (int c = 0; c < 3; c++) EXPECT(scanf("%f", &config.mean[c]) == 1);
    for (int c = 0; c < 3; c++) EXPECT(scanf("%f", &config.std[c]) == 1);
    config.min_pixels = min;
    config.max_pixels = max;
    config.max_source_pixels = limit;
    config.background[0] = (uint8_t)r;
    config.background[1] = (uint8_t)g;
    config.background[2] = (uint8_t)b;
    free(work.base);
    work = (Workspace){.size = image_workspace(&config)};
    work.base = malloc(work.size);
    EXPECT(work.base);
}

static void do_fit(void) {
    int height, width, out_height, out_width;
    Error err = {0};
    EXPECT(scanf("%d %d", &height, &width) == 2);
    if (image_fit(&config, height, width, &out_height, &out_width, &err))
        printf("%d %d\n", out_height, out_width);
    else
        say_error(&err);
}

static void do_load(void) {
    size_t n;
    Error err = {0};
    EXPECT(scanf("%zu", &n) == 1 && getchar() == '\n');
    uint8_t *bytes = read_bytes(n);
    if (loaded) image_free(&image);
    work.peak = 0;
    struct timespec t[2];
    clock_gettime(CLOCK_MONOTONIC, &t[0]);
    loaded = image_load(&config, &work, bytes, n, &image, &err);
    clock_gettime(CLOCK_MONOTONIC, &t[1]);
    free(bytes);
    if (!loaded) {
        say_error(&err);
        return;
    }
    printf("%d %d %d %d ", image.width, image.height, image.source_width, image.source_height);
    for (int i = 0; i < 32; i++) printf("%02x", image.key[i]);
    printf(" %zu %zu %ld\n", work.peak, work.size,
           (long)((t[1].tv_sec - t[0].tv_sec) * 1000000 + (t[1].tv_nsec - t[0].tv_nsec) / 1000));
    fwrite(image.pixels, 3, (size_t)image.width * image.height, stdout);
}

static void do_patches(void) {
    int type, n;
    EXPECT(loaded && scanf("%d %d", &type, &n) == 2);
    int rows = n ? n : image_patches(&image, &config);
    int32_t *order = n ? malloc(sizeof *order * n) : NULL;
    for (int i = 0; i < n; i++) EXPECT(scanf("%d", &order[i]) == 1);
    size_t bytes = (size_t)rows * 3 * config.temporal * config.patch * config.patch * (type == BF16 ? 2 : 4);
    void *out = malloc(bytes);
    image_fill_patches(&image, &config, order, rows, type, out);
    printf("%zu\n", bytes);
    fwrite(out, 1, bytes, stdout);
    free(out);
    free(order);
}

static void do_flip(void) {
    unsigned seed;
    int count, pictures = 0;
    size_t n;
    EXPECT(scanf("%u %d %zu", &seed, &count, &n) == 3 && getchar() == '\n');
    uint8_t *bytes = read_bytes(n), *flipped = malloc(n + !n);
    for (int i = 0; i < count; i++) {
        memcpy(flipped, bytes, n);
        for (int flips = 1 + i % 8; flips > 0; flips--) {
            seed = seed * 1664525 + 1013904223;
            // every other flip goes to the front, where the structure is
            size_t at = (seed >> 8) % (flips % 2 && n > 200 ? 200 : n);
            seed = seed * 1664525 + 1013904223;
            flipped[at] ^= (uint8_t)(1 + (seed >> 8) % 255);
        }
        pictures += LLVMFuzzerTestOneInput(flipped, n);
    }
    printf("%d\n", pictures);
    free(bytes);
    free(flipped);
}

int main(void) {
    char command[16];
    while (scanf("%15s", command) == 1) {
        if (!strcmp(command, "config"))
            do_config();
        else if (!strcmp(command, "fit"))
            do_fit();
        else if (!strcmp(command, "load"))
            do_load();
        else if (!strcmp(command, "patches"))
            do_patches();
        else if (!strcmp(command, "flip"))
            do_flip();
        else
            EXPECT(!"a command of the list above");
        fflush(stdout);
    }
    if (loaded) image_free(&image);
    free(work.base);
    return 0;
}
