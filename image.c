// image.c: the bytes of a picture become rows for the vision tower. It reads in the order of the work:
//
//   bytes -> sniff -> scan (size, whole?, EXIF) -> decode -> upright RGB on the background
//         -> fit -> resize -> key                                           image_load()
//         -> patches                                                        image_fill_patches()
//
// A picture is hostile input. Nothing is decoded before a scan of our own has walked its structure:
// the size is within the limits, nothing is cut off, checksums hold, and what is known to hurt the
// decoder (stb_image 2.27, single-frame entry points only) is not in it. The decoder's memory is a
// workspace of fixed size; its messages go nowhere.
#include "vlm.h"
#include <math.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined __has_include
#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>
#endif
#endif
#ifndef ASAN_POISON_MEMORY_REGION
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

enum {
    ALIGN = 16,           // of a block in the workspace; also the red zone that AddressSanitizer sees behind it
    LANES = 24,           // bytes that the resize works on at once: 8 pixels of RGB
    ROWS = 8,             // rows that its horizontal pass works on at once
    MAX_RATIO = 200,      // of the sides, as transformers has it
    MAX_SCANS = 100,      // of a JPEG: each one walks the whole picture, at 10 bytes of file
    SLACK = 1 << 16,      // bytes of a file's data that its pixels do not explain
    MAX_PIXELS = 1 << 27, // stb_image counts bytes in int: 8 bytes a pixel must fit
};

static const char *const TAKEN = "taken are JPEG, PNG, GIF, BMP";

// ---------------------------------------------------------------------------------------------
// Workspace: a bump pointer. Nothing is given back before the next picture starts over, so a
// decoder that frees twice or too early does no harm.

// A block of `bytes`, not cleared. NULL when the workspace is full.
static void *work_alloc(Workspace *work, size_t bytes) {
    size_t at = work->used + (-(uintptr_t)(work->base + work->used) & (ALIGN - 1));
    if (at > work->size || bytes > work->size - at || ALIGN > work->size - at - bytes) return NULL;
    work->used = at + bytes + ALIGN;
    if (work->peak < work->used) work->peak = work->used;
    ASAN_UNPOISON_MEMORY_REGION(work->base + at, bytes);
    return work->base + at;
}

// stb_image's allocator has no context, so the workspace of the picture in hand is the thread's.
static _Thread_local struct {
    Workspace *work;
    bool full; // an allocation failed
} decoder;

// Cleared, because a file may leave out data: what it then shows must not be the previous picture.
static void *decoder_malloc(size_t bytes) {
    void *p = work_alloc(decoder.work, bytes);
    if (!p) return decoder.full = true, NULL;
    return memset(p, 0, bytes);
}

#define STB_IMAGE_IMPLEMENTATION
#define STBI_ONLY_JPEG
#define STBI_ONLY_GIF
#define STBI_SUPPORT_ZLIB
#define STBI_NO_STDIO
#define STBI_NO_LINEAR
#define STBI_NO_HDR
#define STBI_NO_FAILURE_STRINGS
#define STBI_MAX_DIMENSIONS (1 << 20)
#define STBI_ASSERT(x) ((void)0) // none guards memory; a damaged file must not end the program
#define STBI_MALLOC(bytes) decoder_malloc(bytes)
#define STBI_REALLOC(p, bytes) ((void)(p), (void)(bytes), NULL) // what is called here never grows a block
#define STBI_FREE(p) ((void)(p))
// On damaged JPEGs the decoder shifts by more than 31 and overflows sums. What comes out is wrong on
// every machine and is only ever a pixel, so its functions are exempt from these two checks of
// UndefinedBehaviorSanitizer, and from no other. GCC has no pragma for that, but all functions of stb
// start with `static`.
#ifdef __clang__
#pragma clang attribute push(__attribute__((no_sanitize("shift", "signed-integer-overflow"))), apply_to = function)
#else
#define static __attribute__((no_sanitize("shift", "signed-integer-overflow"))) static
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wattributes" // static data gets the attribute too, and ignores it
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <stb_image.h>
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC diagnostic pop
#undef static
#endif

// ---------------------------------------------------------------------------------------------
// Sniff: the format is what the first bytes say, never a name or a declared type.

typedef enum Format { UNKNOWN, JPEG, PNG, GIF, BMP } Format;

static const struct {
    Format format; // UNKNOWN: one that is named and refused
    const char *name;
    size_t at, n;
    const char *magic;
} MAGICS[] = {
    {JPEG, "JPEG", 0, 3, "\xff\xd8\xff"},
    {PNG, "PNG", 0, 8, "\x89PNG\r\n\x1a\n"},
    {GIF, "GIF", 0, 6, "GIF87a"},
    {GIF, "GIF", 0, 6, "GIF89a"},
    {BMP, "BMP", 0, 2, "BM"},
    {UNKNOWN, "a WebP picture", 8, 4, "WEBP"},
    {UNKNOWN, "an AVIF picture", 4, 8, "ftypavif"},
    {UNKNOWN, "an AVIF picture", 4, 8, "ftypavis"},
    {UNKNOWN, "a HEIC picture", 4, 7, "ftyphei"},
    {UNKNOWN, "a HEIC picture", 4, 7, "ftyphev"},
    {UNKNOWN, "a HEIF picture", 4, 8, "ftypmif1"},
    {UNKNOWN, "a HEIF picture", 4, 8, "ftypmsf1"},
    {UNKNOWN, "a video", 4, 4, "ftyp"},
    {UNKNOWN, "a video", 0, 4, "\x1a\x45\xdf\xa3"},
    {UNKNOWN, "a video", 8, 4, "AVI "},
    {UNKNOWN, "a TIFF picture", 0, 4, "II*\0"},
    {UNKNOWN, "a TIFF picture", 0, 4, "MM\0*"},
    {UNKNOWN, "a JPEG XL picture", 0, 2, "\xff\x0a"},
    {UNKNOWN, "a JPEG XL picture", 4, 4, "JXL "},
    {UNKNOWN, "a JPEG 2000 picture", 4, 4, "jP  "},
    {UNKNOWN, "an icon", 0, 4, "\0\0\1\0"},
    {UNKNOWN, "a Photoshop file", 0, 4, "8BPS"},
    {UNKNOWN, "a QOI picture", 0, 4, "qoif"},
    {UNKNOWN, "a PDF document", 0, 5, "%PDF-"},
    {UNKNOWN, "a PostScript document", 0, 4, "%!PS"},
    {UNKNOWN, "a ZIP archive", 0, 4, "PK\3\4"},
    {UNKNOWN, "a gzip archive", 0, 2, "\x1f\x8b"},
};

// SVG and HTML start with one of several tags, after white space or a byte order mark.
static const char *sniff_markup(const uint8_t *b, size_t n) {
    char text[1025];
    size_t kept = n < sizeof text - 1 ? n : sizeof text - 1;
    for (size_t i = 0; i < kept; i++) text[i] = b[i] ? (char)b[i] : ' ';
    text[kept] = 0;
    const char *start = text + (strncmp(text, "\xef\xbb\xbf", 3) ? 0 : 3);
    start += strspn(start, " \t\r\n");
    if (*start != '<') return NULL;
    if (strcasestr(start, "<svg")) return "an SVG picture";
    if (strcasestr(start, "<html") || strcasestr(start, "<!doctype html")) return "an HTML page";
    return "an XML document";
}

static Format sniff(const uint8_t *b, size_t n, Error *err) {
    for (size_t i = 0; i < sizeof MAGICS / sizeof *MAGICS; i++) {
        if (n < MAGICS[i].at + MAGICS[i].n || memcmp(b + MAGICS[i].at, MAGICS[i].magic, MAGICS[i].n)) continue;
        if (MAGICS[i].format == UNKNOWN) fail(err, 400, "this is %s; %s", MAGICS[i].name, TAKEN);
        return MAGICS[i].format;
    }
    const char *markup = sniff_markup(b, n);
    if (n == 0)
        fail(err, 400, "the picture is empty; %s", TAKEN);
    else if (markup)
        fail(err, 400, "this is %s; %s", markup, TAKEN);
    else
        fail(err, 400, "this is not a picture; %s", TAKEN);
    return UNKNOWN;
}

// ---------------------------------------------------------------------------------------------
// Scan: walk the structure of a file without decoding it.

typedef struct Scan {
    int64_t limit;         // of width * height
    int64_t width, height; // as stored; 0: not found
    int orientation;       // EXIF's 1..8
    size_t frame, bytes;   // the picture's data starts, ends here; what follows does not matter
    const char *other;     // what it is, when sound but of a kind that is not taken
    // Of a PNG:
    const uint8_t *palette, *transparency, *data; // the chunks PLTE, tRNS and the first IDAT, from their length on
    size_t data_bytes;                            // in all IDAT chunks
} Scan;

static uint32_t be16(const uint8_t *b) { return (uint32_t)b[0] << 8 | b[1]; }
static uint32_t le16(const uint8_t *b) { return (uint32_t)b[1] << 8 | b[0]; }
static uint32_t be32(const uint8_t *b) { return be16(b) << 16 | be16(b + 2); }
static uint32_t le32(const uint8_t *b) { return le16(b + 2) << 16 | le16(b); }

// Note the size. False: no use in looking further, the picture will be refused.
static bool scan_size(Scan *s, int64_t width, int64_t height) {
    s->width = width;
    s->height = height;
    return width > 0 && height > 0 && width <= s->limit / height;
}

static bool scan_other(Scan *s, const char *other) {
    s->other = other;
    return false;
}

// The orientation in an EXIF block (a little TIFF file); 1 if it has none, or is broken.
static int exif_orientation(const uint8_t *b, size_t n) {
    if (n < 8 || (memcmp(b, "MM\0*", 4) && memcmp(b, "II*\0", 4))) return 1;
    uint32_t (*get16)(const uint8_t *) = b[0] == 'M' ? be16 : le16;
    size_t at = b[0] == 'M' ? be32(b + 4) : le32(b + 4);
    if (at > n - 2) return 1;
    size_t entries = get16(b + at);
    for (at += 2; entries > 0 && n - at >= 12; entries--, at += 12) {
        if (get16(b + at) != 0x0112) continue;
        uint32_t type = get16(b + at + 2), value = get16(b + at + 8);
        return type == 3 && value >= 1 && value <= 8 ? (int)value : 1;
    }
    return 1;
}

static void scan_exif(Scan *s, const uint8_t *b, size_t n) {
    if (s->orientation == 1) s->orientation = exif_orientation(b, n);
}

// A Huffman table may have 256 codes. stb_image 2.27 believes the counts, and writes past its tables.
static bool jpeg_huffman_fits(const uint8_t *b, size_t n) {
    while (n >= 17) {
        size_t codes = 0;
        for (int i = 1; i <= 16; i++) codes += b[i];
        if (codes > 256 || n < 17 + codes) return false;
        b += 17 + codes;
        n -= 17 + codes;
    }
    return n == 0;
}

// One segment: `b` is what follows its length.
static bool jpeg_segment(Scan *s, int marker, const uint8_t *b, size_t n) {
    if (marker == 0xC4) return jpeg_huffman_fits(b, n);
    if (marker == 0xE1 && n > 6 && !memcmp(b, "Exif\0", 6)) scan_exif(s, b + 6, n - 6);
    if (marker < 0xC0 || marker > 0xCF || marker == 0xC8 || marker == 0xCC) return true;
    if (s->width || n < 6 || !scan_size(s, be16(b + 3), be16(b + 1))) return false; // a start of frame
    if (marker > 0xC2 || b[0] != 8) return scan_other(s, "an arithmetic, lossless or 12-bit JPEG");
    return true;
}

// Where the marker that ends entropy-coded data starts; n if there is none.
static size_t jpeg_skip_entropy(const uint8_t *b, size_t n, size_t at) {
    while (at < n) {
        const uint8_t *ff = memchr(b + at, 0xFF, n - at);
        if (!ff || (at = (size_t)(ff - b)) + 1 >= n) return n;
        uint8_t next = b[at + 1];
        if (next == 0xFF)
            at++;
        else if (next == 0 || (next >= 0xD0 && next <= 0xD7))
            at += 2; // a 0xFF of data, a restart
        else
            return at;
    }
    return n;
}

static bool jpeg_scan(Scan *s, const uint8_t *b, size_t n) {
    int scans = 0;
    for (size_t at = 2; n - at >= 2;) {
        if (b[at] != 0xFF || b[at + 1] == 0xFF) { // padding
            at++;
            continue;
        }
        int marker = b[at + 1];
        at += 2;
        if (marker == 0xD9) return s->bytes = at, scans > 0;
        size_t length = n - at < 2 ? 0 : be16(b + at);
        if (length < 2 || length > n - at || !jpeg_segment(s, marker, b + at + 2, length - 2)) return false;
        at += length;
        if (marker == 0xDA) {
            if (!s->width || ++scans > MAX_SCANS) return false;
            at = jpeg_skip_entropy(b, n, at);
        }
    }
    return false; // no end of image: cut short
}

static void crc_table(uint32_t table[256]) {
    for (uint32_t i = 0; i < 256; i++) {
        table[i] = i;
        for (int bit = 0; bit < 8; bit++) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xEDB88320 : 0);
    }
}

static uint32_t crc(const uint32_t table[256], const uint8_t *b, size_t n) {
    uint32_t sum = 0xFFFFFFFF;
    for (size_t i = 0; i < n; i++) sum = table[(sum ^ b[i]) & 255] ^ sum >> 8;
    return ~sum;
}

static bool png_scan(Scan *s, const uint8_t *b, size_t n) {
    if (n < 33 || be32(b + 8) != 13 || memcmp(b + 12, "IHDR", 4)) return false;
    if (!scan_size(s, be32(b + 16), be32(b + 20))) return false;
    uint32_t table[256];
    crc_table(table);
    for (size_t at = 8, length; n - at >= 12; at += 12 + length) {
        const uint8_t *chunk = b + at, *type = chunk + 4;
        length = be32(chunk);
        if (length > n - at - 12 || crc(table, type, length + 4) != be32(type + 4 + length)) return false;
        if (!memcmp(type, "IEND", 4)) return s->bytes = at + 12 + length, s->data_bytes > 0;
        if (!memcmp(type, "eXIf", 4))
            scan_exif(s, type + 4, length);
        else if (!memcmp(type, "PLTE", 4))
            s->palette = chunk;
        else if (!memcmp(type, "tRNS", 4))
            s->transparency = chunk;
        else if (!memcmp(type, "IDAT", 4))
            s->data = s->data ? s->data : chunk, s->data_bytes += length;
        else if (!(type[0] & 0x20) && at > 8)
            return false; // critical by its capital letter, and unknown
    }
    return false;
}

// Move past a chain of sub-blocks. False: the file ends first.
static bool gif_skip_blocks(const uint8_t *b, size_t n, size_t *at) {
    while (*at < n && b[*at]) *at += 1 + (size_t)b[*at];
    return (*at)++ < n;
}

static size_t gif_colors(uint8_t flags) { return flags & 0x80 ? (size_t)6 << (flags & 7) : 0; }

// The first frame must be whole.
static bool gif_scan(Scan *s, const uint8_t *b, size_t n) {
    if (n < 13 || !scan_size(s, le16(b + 6), le16(b + 8))) return false;
    size_t at = 13 + gif_colors(b[10]), control = 0;
    while (at < n && b[at] == 0x21) { // extensions; one of them may belong to the frame
        if (n - at >= 8 && b[at + 1] == 0xF9 && b[at + 2] == 4) control = at;
        at += 2;
        if (!gif_skip_blocks(b, n, &at)) return false;
    }
    if (at >= n || n - at < 11 || b[at] != 0x2C) return false;
    s->frame = control ? control : at;
    s->bytes = at + 11 + gif_colors(b[at + 9]);
    return gif_skip_blocks(b, n, &s->bytes);
}

static bool bmp_scan(Scan *s, const uint8_t *b, size_t n) {
    if (n < 26) return false;
    size_t header = le32(b + 14);
    bool core = header == 12; // OS/2's: 16-bit sizes, palette of 3 bytes
    if ((!core && header < 40) || header > 124 || n < 14 + header) return false;
    int64_t width = core ? (int64_t)le16(b + 18) : (int32_t)le32(b + 18);
    int64_t height = core ? (int64_t)le16(b + 20) : (int32_t)le32(b + 22);
    if (!scan_size(s, width, height < 0 ? -height : height)) return false;
    uint32_t bits = le16(b + (core ? 24 : 28)), compression = core ? 0 : le32(b + 30);
    bool masks = compression == 3 && (bits == 16 || bits == 32);
    if (compression && !masks) return scan_other(s, "a compressed BMP");
    if (bits != 1 && bits != 4 && bits != 8 && bits != 16 && bits != 24 && bits != 32) return false;
    s->frame = le32(b + 10);
    s->bytes = n;
    size_t row = (size_t)(width * bits + 31) / 32 * 4, last = (size_t)(width * bits + 7) / 8;
    return s->frame >= 14 + header && s->frame <= n && n - s->frame >= row * (size_t)(s->height - 1) + last &&
           (!masks || n >= 70);
}

// ---------------------------------------------------------------------------------------------
// Decode: stb_image reads JPEG and GIF, and inflates. PNG and BMP are unpacked here: that takes a third of
// the memory, and stb_image reads colours that a short palette leaves out from its stack.

// Pixels as decoded: `channels` are gray, gray and alpha, RGB, or RGB and alpha.
typedef struct Decoded {
    uint8_t *pixels;
    int width, height, channels;
} Decoded;

static bool decode_stb(const uint8_t *bytes, size_t n, Decoded *d) {
    int width, height;
    d->pixels = n > INT32_MAX ? NULL : stbi_load_from_memory(bytes, (int)n, &width, &height, &d->channels, 0);
    return d->pixels && width == d->width && height == d->height;
}

// Header, first frame and nothing else, with no background colour: where the frame draws nothing it is
// transparent, as browsers have it (and stb_image would swap red and blue there).
static bool gif_decode(const Scan *s, const uint8_t *b, Decoded *d) {
    size_t header = 13 + gif_colors(b[10]), frame = s->bytes - s->frame;
    if (frame > 2 * (size_t)(s->width * s->height) + SLACK) return false; // a code takes 12 bits at most
    uint8_t *copy = decoder_malloc(header + frame);
    if (!copy) return false;
    memcpy(copy, b, header);
    memcpy(copy + header, b + s->frame, frame);
    copy[11] = 0;
    return decode_stb(copy, header + frame, d);
}

// What a mask selects, scaled to 0..255.
static uint8_t bmp_field(uint32_t pixel, uint32_t mask) {
    if (!mask) return 0;
    uint64_t shift = (uint64_t)__builtin_ctz(mask), most = mask >> shift;
    return (uint8_t)((((pixel & mask) >> shift) * 255 + most / 2) / most);
}

static bool bmp_decode(const Scan *s, const uint8_t *b, Decoded *d) {
    size_t header = le32(b + 14), entry = header == 12 ? 3 : 4, entries = (s->frame - 14 - header) / entry;
    uint32_t bits = le16(b + (header == 12 ? 24 : 28));
    bool masked = header != 12 && le32(b + 30) == 3, bottom_up = header == 12 || (int32_t)le32(b + 22) > 0;
    uint32_t mask[4] = {0xFF0000, 0xFF00, 0xFF, 0}; // red, green, blue; alpha only where the header names it
    if (bits == 16) mask[0] = 0x7C00, mask[1] = 0x3E0, mask[2] = 0x1F;
    if (masked)
        for (int c = 0; c < (header >= 56 ? 4 : 3); c++) mask[c] = le32(b + 54 + 4 * c);
    d->channels = mask[3] ? 4 : 3;
    uint8_t *out = d->pixels = decoder_malloc((size_t)d->width * d->height * d->channels);
    size_t stride = ((size_t)d->width * bits + 31) / 32 * 4;
    if (!out) return false;
    for (int y = 0; y < d->height; y++) {
        const uint8_t *row = b + s->frame + stride * (bottom_up ? d->height - 1 - y : y);
        for (size_t x = 0; x < (size_t)d->width; x++, out += d->channels) {
            const uint8_t *in = row + x * bits / 8;
            if (bits <= 8) { // an index; beyond the palette is black
                size_t index = *in >> (8 - bits - x * bits % 8) & ((1u << bits) - 1);
                const uint8_t *bgr = b + 14 + header + entry * index;
                for (int c = 0; c < 3 && index < entries; c++) out[c] = bgr[2 - c];
            } else if (bits == 24) {
                for (int c = 0; c < 3; c++) out[c] = in[2 - c];
            } else {
                for (int c = 0; c < d->channels; c++) out[c] = bmp_field(bits == 16 ? le16(in) : le32(in), mask[c]);
            }
        }
    }
    return true;
}

typedef struct Png {
    int depth, samples;      // bits a sample, samples a pixel as stored
    bool indexed, keyed;     // samples are places in the palette; one colour is transparent
    uint32_t key[3];         // that colour
    uint8_t palette[256][4]; // black where the file has no entry
} Png;

static bool png_open(Png *p, const Scan *s, const uint8_t *b, Decoded *d) {
    static const uint8_t SAMPLES[7] = {1, 0, 3, 1, 2, 0, 4};
    int color = b[25];
    *p = (Png){.depth = b[24], .samples = color < 7 ? SAMPLES[color] : 0, .indexed = color == 3};
    bool depth = p->depth == 8 || (p->depth == 16 && color != 3) ||
                 ((color == 0 || color == 3) && (p->depth == 1 || p->depth == 2 || p->depth == 4));
    if (!p->samples || !depth || b[26] || b[27] || b[28] > 1) return false;
    d->channels = p->samples;
    size_t clear = s->transparency ? be32(s->transparency) : 0;
    if (p->indexed) {
        size_t n = s->palette ? be32(s->palette) / 3 : 0;
        if (n == 0 || n > 256 || clear > 256) return false;
        for (size_t i = 0; i < n; i++) memcpy(p->palette[i], s->palette + 8 + 3 * i, 3);
        for (size_t i = 0; i < 256; i++) p->palette[i][3] = i < clear ? s->transparency[8 + i] : 255;
        d->channels = clear ? 4 : 3;
    } else if (p->samples % 2 && clear) {
        if (clear != 2 * (size_t)p->samples) return false;
        for (int c = 0; c < p->samples; c++) p->key[c] = be16(s->transparency + 8 + 2 * c);
        p->keyed = true;
        d->channels++;
    }
    return true;
}

static uint8_t paeth(int a, int b, int c) {
    int pa = abs(b - c), pb = abs(a - c), pc = abs(a + b - 2 * c);
    return (uint8_t)(pa <= pb && pa <= pc ? a : pb <= pc ? b : c);
}

// Undo the filter of a row of n bytes: each was stored less what its neighbours to the left (`back` bytes away),
// above, and above left predict.
static bool png_unfilter(int filter, uint8_t *row, const uint8_t *above, size_t n, size_t back) {
    if (back > n) back = n;
    switch (filter) {
    case 0: return true;
    case 1:
        for (size_t i = back; i < n; i++) row[i] += row[i - back];
        return true;
    case 2:
        for (size_t i = 0; i < n; i++) row[i] += above[i];
        return true;
    case 3:
        for (size_t i = 0; i < back; i++) row[i] += above[i] / 2;
        for (size_t i = back; i < n; i++) row[i] += (row[i - back] + above[i]) / 2;
        return true;
    case 4:
        for (size_t i = 0; i < back; i++) row[i] += above[i];
        for (size_t i = back; i < n; i++) row[i] += paeth(row[i - back], above[i], above[i - back]);
        return true;
    }
    return false;
}

// Pixel x of an unfiltered row.
static void png_pixel(const Png *p, const uint8_t *row, size_t x, uint8_t *out, int channels) {
    uint32_t v[4];
    bool clear = p->keyed;
    for (int c = 0; c < p->samples; c++) {
        size_t at = (x * p->samples + c) * p->depth;
        const uint8_t *in = row + at / 8;
        v[c] = p->depth == 16 ? be16(in) : *in >> (8 - p->depth - at % 8) & ((1u << p->depth) - 1);
        clear = clear && v[c] == p->key[c];
        out[c] = (uint8_t)(p->depth == 16 ? v[c] >> 8 : v[c] * 255 / ((1u << p->depth) - 1));
    }
    if (p->indexed)
        memcpy(out, p->palette[v[0]], channels);
    else if (p->keyed)
        out[p->samples] = clear ? 0 : 255;
}

// An interlaced PNG holds seven pictures one after another, a plain one holds one: the pixels from
// (x, y) on, with steps of dx and dy.
typedef struct Pass {
    int x, y, dx, dy, width, height;
    size_t row; // bytes, without the filter's
} Pass;

static int png_passes(const Png *p, bool interlaced, const Decoded *d, Pass passes[7]) {
    static const Pass PLAIN = {0, 0, 1, 1, 0, 0, 0},
                      ADAM7[7] = {{0, 0, 8, 8, 0, 0, 0}, {4, 0, 8, 8, 0, 0, 0}, {0, 4, 4, 8, 0, 0, 0},
                                  {2, 0, 4, 4, 0, 0, 0}, {0, 2, 2, 4, 0, 0, 0}, {1, 0, 2, 2, 0, 0, 0},
                                  {0, 1, 1, 2, 0, 0, 0}};
    int n = 0;
    for (int i = 0; i < (interlaced ? 7 : 1); i++) {
        Pass a = interlaced ? ADAM7[i] : PLAIN;
        a.width = (d->width - a.x + a.dx - 1) / a.dx;
        a.height = (d->height - a.y + a.dy - 1) / a.dy;
        a.row = ((size_t)a.width * p->samples * p->depth + 7) / 8;
        if (a.width > 0 && a.height > 0) passes[n++] = a;
    }
    return n;
}

// All IDAT chunks are one zlib stream of `raw_bytes`. NULL if it is not.
static uint8_t *png_inflate(const Scan *s, size_t raw_bytes) {
    // Deflate's worst, 9 bits a byte, bounds what an honest file has.
    if (s->data_bytes > raw_bytes + raw_bytes / 8 + SLACK || raw_bytes + SLACK > INT32_MAX) return NULL;
    uint8_t *packed = decoder_malloc(s->data_bytes), *raw = decoder_malloc(raw_bytes + SLACK);
    if (!packed || !raw) return NULL;
    size_t at = 0;
    for (const uint8_t *chunk = s->data; at < s->data_bytes; chunk += 12 + be32(chunk)) {
        if (memcmp(chunk + 4, "IDAT", 4)) continue;
        memcpy(packed + at, chunk + 8, be32(chunk));
        at += be32(chunk);
    }
    // Some writers add zeros at the end: SLACK takes them.
    int n = stbi_zlib_decode_buffer((char *)raw, (int)(raw_bytes + SLACK), (char *)packed, (int)s->data_bytes);
    return n >= 0 && (size_t)n >= raw_bytes ? raw : NULL;
}

static bool png_decode(const Scan *s, const uint8_t *b, Decoded *d) {
    Png p;
    Pass passes[7];
    if (!png_open(&p, s, b, d)) return false;
    int n = png_passes(&p, b[28], d, passes);
    size_t raw_bytes = 0, back = (size_t)(p.samples * p.depth + 7) / 8;
    for (int i = 0; i < n; i++) raw_bytes += (passes[i].row + 1) * passes[i].height;
    uint8_t *raw = png_inflate(s, raw_bytes);
    d->pixels = decoder_malloc((size_t)d->width * d->height * d->channels);
    const uint8_t *nothing = decoder_malloc((size_t)d->width * back); // what is above a first row
    if (!raw || !d->pixels || !nothing) return false;
    for (const Pass *a = passes; a < passes + n; a++) {
        const uint8_t *above = nothing;
        for (int y = 0; y < a->height; y++, raw += a->row + 1) {
            if (!png_unfilter(raw[0], raw + 1, above, a->row, back)) return false;
            above = raw + 1;
            uint8_t *out = d->pixels + ((size_t)(a->y + y * a->dy) * d->width + a->x) * d->channels;
            if (p.depth == 8 && d->channels == p.samples && !p.indexed && a->dx == 1)
                memcpy(out, above, a->row);
            else
                for (int x = 0; x < a->width; x++)
                    png_pixel(&p, above, x, out + (size_t)x * a->dx * d->channels, d->channels);
        }
    }
    return true;
}

static bool scan(Format format, Scan *s, const uint8_t *b, size_t n) {
    switch (format) {
    case JPEG: return jpeg_scan(s, b, n);
    case PNG: return png_scan(s, b, n);
    case GIF: return gif_scan(s, b, n);
    case BMP: return bmp_scan(s, b, n);
    default: return false;
    }
}

static bool no_room(Error *err) { return fail(err, 413, "the picture needs more memory than is set aside for it"); }

static bool decode(Format format, Workspace *work, const Scan *s, const uint8_t *bytes, Decoded *d, Error *err) {
    decoder.work = work;
    decoder.full = false;
    *d = (Decoded){.width = (int)s->width, .height = (int)s->height};
    bool ok = format == JPEG  ? decode_stb(bytes, s->bytes, d)
              : format == PNG ? png_decode(s, bytes, d)
              : format == GIF ? gif_decode(s, bytes, d)
                              : bmp_decode(s, bytes, d);
    if (decoder.full) return no_room(err);
    if (!ok) return fail(err, 400, "the picture is damaged");
    // What else the decoder left in the workspace is of no use any more: the pixels move to its front.
    uint8_t *pixels = d->pixels;
    size_t n = (size_t)d->width * d->height * d->channels;
    work->used = 0;
    d->pixels = work_alloc(work, n + LANES);
    if (!d->pixels) return no_room(err);
    memmove(d->pixels, pixels, n);
    ASAN_POISON_MEMORY_REGION(work->base + work->used, work->size - work->used);
    return true;
}

// ---------------------------------------------------------------------------------------------
// Upright, on the background

static inline void pixel_rgb(uint8_t *out, const uint8_t *in, int channels, const uint8_t background[3]) {
    int gray = channels < 3, alpha = channels % 2 ? 255 : in[channels - 1];
    for (int c = 0; c < 3; c++) {
        int t = in[gray ? 0 : c] * alpha + background[c] * (255 - alpha) + 128;
        out[c] = (uint8_t)((t + (t >> 8)) >> 8); // t / 255, rounded
    }
}

// Turn as EXIF's `orientation` says, lay on the background, and make it RGB: (height, width, 3).
static void upright(const Decoded *d, int orientation, const uint8_t background[3], uint8_t *out) {
    bool turned = orientation >= 5;
    int width = turned ? d->height : d->width, height = turned ? d->width : d->height;
    ptrdiff_t c = d->channels, row = c * d->width;
    // Which stored row and column does the upright picture start with, and in which direction does it go on?
    int o = orientation;
    bool from_right = o == 2 || o == 3 || o == 7 || o == 8, from_bottom = o == 3 || o == 4 || o == 6 || o == 7;
    const uint8_t *origin = d->pixels + (from_right ? row - c : 0) + (from_bottom ? row * (d->height - 1) : 0);
    ptrdiff_t right = from_right ? -c : c, down = from_bottom ? -row : row;
    ptrdiff_t step_x = turned ? down : right, step_y = turned ? right : down;
    enum { TILE = 32 }; // turned, a row reads a column: tiles keep its cache lines until they are used up
    for (int y0 = 0; y0 < height; y0 += TILE)
        for (int x0 = 0; x0 < width; x0 += TILE)
            for (int y = y0; y < y0 + TILE && y < height; y++)
                for (int x = x0; x < x0 + TILE && x < width; x++)
                    pixel_rgb(out + 3 * ((size_t)y * width + x), origin + y * step_y + x * step_x, d->channels,
                              background);
}

// ---------------------------------------------------------------------------------------------
// Fit

bool image_fit(const ImageConfig *config, int height, int width, int *out_height, int *out_width, Error *err) {
    double factor = config->patch * config->merge, h = height, w = width;
    if (height <= 0 || width <= 0) return fail(err, 400, "the picture has no pixels");
    if (fmax(h, w) / fmin(h, w) > MAX_RATIO)
        return fail(err, 400, "the picture is %d x %d: its longer side is over %d times the shorter", width, height,
                    MAX_RATIO);
    double fit_h = rint(h / factor) * factor, fit_w = rint(w / factor) * factor; // half to even, as Python's round()
    if (fit_h * fit_w > config->max_pixels) {
        double beta = sqrt(h * w / config->max_pixels);
        fit_h = fmax(factor, floor(h / beta / factor) * factor);
        fit_w = fmax(factor, floor(w / beta / factor) * factor);
    } else if (fit_h * fit_w < config->min_pixels) {
        double beta = sqrt(config->min_pixels / (h * w));
        fit_h = ceil(h * beta / factor) * factor;
        fit_w = ceil(w * beta / factor) * factor;
    }
    *out_height = (int)fmax(factor, fit_h);
    *out_width = (int)fmax(factor, fit_w);
    return true;
}

// ---------------------------------------------------------------------------------------------
// Resize: Pillow's Image.resize(BICUBIC), bit for bit. Weights are rounded to 22 bits; one pass narrows or
// widens the columns, one the rows, and each rounds to 8 bits.

enum { PRECISION = 32 - 8 - 2 };

// Output pixel i is the sum of `taps` input pixels from first[i] on, weighted.
typedef struct Filter {
    int taps, *first, *count;
    int32_t *weight; // (size, taps)
} Filter;

static double bicubic(double x) {
    const double a = -0.5;
    x = fabs(x);
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
    return 0;
}

// Pillow's precompute_coeffs(). Shrinking widens the bicubic by the scale, so that it averages what it skips.
static bool filter_make(Workspace *work, int in, int out, Filter *f) {
    double scale = (double)in / out, stretch = fmax(scale, 1), support = 2 * stretch;
    f->taps = 2 * (int)ceil(support) + 1;
    f->first = work_alloc(work, sizeof(int) * out);
    f->count = work_alloc(work, sizeof(int) * out);
    f->weight = work_alloc(work, sizeof(int32_t) * out * f->taps);
    double *w = work_alloc(work, sizeof(double) * f->taps);
    if (!f->first || !f->count || !f->weight || !w) return false;
    for (int i = 0; i < out; i++) {
        double center = (i + 0.5) * scale, sum = 0;
        int first = (int)(center - support + 0.5), end = (int)(center + support + 0.5);
        if (first < 0) first = 0;
        if (end > in) end = in;
        for (int k = 0; k < end - first; k++) sum += w[k] = bicubic((k + first - center + 0.5) * (1 / stretch));
        for (int k = 0; k < end - first; k++) {
            double v = (sum != 0 ? w[k] / sum : w[k]) * (1 << PRECISION);
            f->weight[(size_t)i * f->taps + k] = (int32_t)(v < 0 ? v - 0.5 : v + 0.5);
        }
        f->first[i] = first;
        f->count[i] = end - first;
    }
    return true;
}

typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint8_t u8x8 __attribute__((vector_size(8)));

static inline i32x8 widen(const uint8_t *b) {
    u8x8 v;
    memcpy(&v, b, sizeof v);
    return __builtin_convertvector(v, i32x8);
}

static inline void narrow(uint8_t *out, i32x8 sum) {
    i32x8 v = sum >> PRECISION;
    v &= ~(v >> 31); // below 0: 0
    i32x8 over = v > 255;
    u8x8 r = __builtin_convertvector((v & ~over) | (over & 255), u8x8);
    memcpy(out, &r, sizeof r);
}

// out[j] = sum over i of weight[i] * in[i * stride + j], rounded to a byte, for LANES neighbours j.
// The weights' absolute values sum to less than 2, so 255 of them stay within 31 bits.
static void blend(uint8_t *out, const uint8_t *in, size_t stride, const int32_t *weight, int n) {
    i32x8 half = {0};
    half += 1 << (PRECISION - 1);
    i32x8 a = half, b = half, c = half;
    for (int i = 0; i < n; i++, in += stride) {
        a += widen(in) * weight[i];
        b += widen(in + 8) * weight[i];
        c += widen(in + 16) * weight[i];
    }
    narrow(out, a);
    narrow(out + 8, b);
    narrow(out + 16, c);
}

// `in`, (rows, in_width, 3), to out_width. ROWS rows go together, transposed to (pixel, channel, row), so
// that lanes are rows and all lanes have the same weights.
static bool resize_columns(Workspace *work, const Filter *f, const uint8_t *in, int in_width, int rows, uint8_t *out,
                           int out_width) {
    uint8_t *slab = work_alloc(work, (size_t)in_width * LANES);
    if (!slab) return false;
    size_t in_row = 3 * (size_t)in_width, out_row = 3 * (size_t)out_width;
    for (int y = 0; y < rows; y += ROWS) {
        for (int r = 0; r < ROWS; r++) {
            const uint8_t *row = in + in_row * (y + r < rows ? y + r : rows - 1);
            for (size_t x = 0; x < in_row; x++) slab[x * ROWS + r] = row[x];
        }
        for (int x = 0; x < out_width; x++) {
            uint8_t pixel[LANES]; // (channel, row)
            blend(pixel, slab + (size_t)f->first[x] * LANES, LANES, f->weight + (size_t)x * f->taps, f->count[x]);
            uint8_t *to = out + out_row * y + 3 * (size_t)x;
            for (int r = 0; r < ROWS && y + r < rows; r++, to += out_row)
                for (int c = 0; c < 3; c++) to[c] = pixel[c * ROWS + r];
        }
    }
    return true;
}

// `in` must be readable for LANES bytes past its end.
static void resize_rows(const Filter *f, const uint8_t *in, uint8_t *out, int width, int height) {
    size_t row = 3 * (size_t)width;
    for (int y = 0; y < height; y++, out += row) {
        const uint8_t *top = in + row * f->first[y];
        const int32_t *weight = f->weight + (size_t)y * f->taps;
        size_t x = 0;
        for (; x + LANES <= row; x += LANES) blend(out + x, top + x, row, weight, f->count[y]);
        if (x < row) {
            uint8_t rest[LANES];
            blend(rest, top + x, row, weight, f->count[y]);
            memcpy(out + x, rest, row - x);
        }
    }
}

// `in`: (in_height, in_width, 3), with LANES readable bytes behind. The order of the passes shows in the result:
// it is Pillow 13's, which starts with the rows when that leaves clearly fewer pixels (earlier versions never do).
static bool resize(Workspace *work, const uint8_t *in, int in_width, int in_height, Image *out) {
    Filter columns, rows;
    bool wide = in_width != out->width, high = in_height != out->height;
    bool rows_first = in_height > out->height && in_height - out->height > 2 * (in_width - out->width);
    if (!wide && !high) return memcpy(out->pixels, in, 3 * (size_t)in_width * in_height), true;
    if (wide && !filter_make(work, in_width, out->width, &columns)) return false;
    if (high && !filter_make(work, in_height, out->height, &rows)) return false;
    if (!high) return resize_columns(work, &columns, in, in_width, in_height, out->pixels, out->width);
    if (wide) {
        size_t pixels = rows_first ? (size_t)in_width * out->height : (size_t)out->width * in_height;
        uint8_t *between = work_alloc(work, 3 * pixels + LANES);
        if (!between) return false;
        if (rows_first) {
            resize_rows(&rows, in, between, in_width, out->height);
            return resize_columns(work, &columns, between, in_width, out->height, out->pixels, out->width);
        }
        if (!resize_columns(work, &columns, in, in_width, in_height, between, out->width)) return false;
        in = between;
    }
    resize_rows(&rows, in, out->pixels, out->width, out->height);
    return true;
}

// ---------------------------------------------------------------------------------------------
// Load

// SHA-256 over what the vision tower's answer depends on.
static bool image_key(const ImageConfig *c, Image *image) {
    int32_t shape[] = {image->width, image->height, c->patch, c->merge, c->temporal};
    size_t bytes = 3 * (size_t)image->width * image->height;
    EVP_MD_CTX *md = EVP_MD_CTX_new();
    bool ok = md && EVP_DigestInit_ex(md, EVP_sha256(), NULL) && EVP_DigestUpdate(md, shape, sizeof shape) &&
              EVP_DigestUpdate(md, c->mean, sizeof c->mean) && EVP_DigestUpdate(md, c->std, sizeof c->std) &&
              EVP_DigestUpdate(md, c->background, sizeof c->background) && EVP_DigestUpdate(md, image->pixels, bytes) &&
              EVP_DigestFinal_ex(md, image->key, NULL);
    EVP_MD_CTX_free(md);
    return ok;
}

// N pixels of file, and sides that follow from the ratio: width + height <= (sqrt(200) + 1) sqrt(N).
// Decoding, bytes a pixel at the most:
//   JPEG  4 planes (4), their coefficients when progressive (2 * 4), RGB (3)                        15
//   PNG   16-bit RGBA packed (8 * 9/8), inflated (8), at 8 bits (4)                                 21
//   GIF   codes (2), canvas, background, history (4 + 4 + 1)                                        11
//   BMP   pixels (4)                                                                                 4
// Resizing keeps the decoded pixels (4), them upright (3), and them at their new width (3): 10, where
// new width * old height <= N + rounding of the sides to `unit` (with min_pixels for N when a picture grows).
// What grows with a side: a JPEG's planes end on 32 pixels (12 * 31 bytes a pixel of side), a PNG's rows
// have a byte more and interlaced ones end on bytes (8 * 3), the resize has 24 bytes a column, 4 * (4 + 3) a
// weight for both axes, and the rounding (3 * unit). Rounded up: 512 + 3 * unit.
size_t image_workspace(const ImageConfig *config) {
    int64_t pixels = config->max_source_pixels < MAX_PIXELS ? config->max_source_pixels : MAX_PIXELS;
    if (pixels < config->min_pixels) pixels = config->min_pixels;
    size_t unit = (size_t)config->patch * config->merge, sides = (size_t)(16 * sqrt((double)pixels)) + 2 * unit;
    return 21 * (size_t)pixels + sides * (512 + 3 * unit) + (1 << 20);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// All that can be said of the file without decoding it.
static bool probe(const ImageConfig *config, const uint8_t *bytes, size_t n, Format *out_format, Scan *out_scan,
                  Image *out, Error *err) {
    Format format = sniff(bytes, n, err);
    if (format == UNKNOWN) return false;
    Scan s = {.orientation = 1, .limit = config->max_source_pixels};
    if (s.limit > MAX_PIXELS) s.limit = MAX_PIXELS;
    bool whole = scan(format, &s, bytes, n);
    if (s.width > 0 && s.height > 0 && s.width > s.limit / s.height)
        return fail(err, 413, "the picture has %lld x %lld pixels, over the limit of %lld", (long long)s.width,
                    (long long)s.height, (long long)s.limit);
    if (s.other) return fail(err, 400, "this is %s, which is not taken; %s", s.other, TAKEN);
    if (!whole) return fail(err, 400, "the picture is damaged or cut short");
    bool turned = s.orientation >= 5;
    out->source_width = (int)(turned ? s.height : s.width);
    out->source_height = (int)(turned ? s.width : s.height);
    *out_format = format, *out_scan = s;
    return image_fit(config, out->source_height, out->source_width, &out->height, &out->width, err);
}

bool image_probe(const ImageConfig *config, const void *bytes, size_t n, Image *out, Error *err) {
    Format format;
    Scan scan;
    *out = (Image){0};
    return probe(config, bytes, n, &format, &scan, out, err);
}

// image_load() in the workspace as it comes.
static bool load(const ImageConfig *config, Workspace *work, const uint8_t *bytes, size_t n, Image *out, Error *err) {
    double start = seconds();
    Format format;
    Scan s;
    if (!probe(config, bytes, n, &format, &s, out, err)) return false;
    Decoded d;
    if (!decode(format, work, &s, bytes, &d, err)) return false;
    uint8_t *rgb = d.pixels;
    if (d.channels != 3 || s.orientation != 1) {
        rgb = work_alloc(work, 3 * (size_t)d.width * d.height + LANES);
        if (!rgb) return no_room(err);
        upright(&d, s.orientation, config->background, rgb);
    }
    double decoded = seconds();
    out->pixels = malloc(3 * (size_t)out->width * out->height);
    if (!out->pixels) return fail(err, 500, "the machine has no memory for the resized picture");
    if (!resize(work, rgb, out->source_width, out->source_height, out)) return no_room(err);
    if (!image_key(config, out)) return fail(err, 500, "the picture's hash cannot be computed");
    out->decode_seconds = decoded - start, out->resize_seconds = seconds() - decoded;
    out->decode_bytes = work->used;
    return true;
}

bool image_load(const ImageConfig *config, Workspace *work, const void *bytes, size_t n, Image *out, Error *err) {
    *out = (Image){0};
    work->used = 0;
    ASAN_POISON_MEMORY_REGION(work->base, work->size);
    bool ok = load(config, work, bytes, n, out, err);
    ASAN_UNPOISON_MEMORY_REGION(work->base, work->size); // it is the caller's again
    if (!ok) image_free(out);
    return ok;
}

void image_free(Image *image) {
    free(image->pixels);
    image->pixels = NULL;
}

// ---------------------------------------------------------------------------------------------
// Patches

// Round a float to bf16, half to even.
static bf16 to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return (bf16)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

void image_fill_patches(const Image *image, const ImageConfig *config, const int32_t *order, int n, Dtype type,
                        void *out) {
    int patch = config->patch, merge = config->merge, groups = image->width / (patch * merge);
    float table[3][256]; // a byte, normalised: the f32 arithmetic of Qwen2VLImageProcessorPil
    bf16 half[3][256];
    for (int c = 0; c < 3; c++)
        for (int v = 0; v < 256; v++) {
            table[c][v] = ((float)(v * (1 / 255.0)) - config->mean[c]) / config->std[c];
            half[c][v] = to_bf16(table[c][v]);
        }
    float *f = out;
    bf16 *h = out;
    for (int i = 0; i < n; i++) {
        int p = order ? order[i] : i, group = p / (merge * merge), member = p % (merge * merge);
        int y0 = (group / groups * merge + member / merge) * patch,
            x0 = (group % groups * merge + member % merge) * patch;
        for (int c = 0; c < 3; c++)
            for (int t = 0; t < config->temporal; t++)
                for (int y = y0; y < y0 + patch; y++) {
                    const uint8_t *in = image->pixels + 3 * ((size_t)y * image->width + x0) + c;
                    if (type == BF16)
                        for (int x = 0; x < patch; x++) *h++ = half[c][in[3 * x]];
                    else
                        for (int x = 0; x < patch; x++) *f++ = table[c][in[3 * x]];
                }
    }
}
