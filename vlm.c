// vlm.c: the engine. It reads top to bottom as the story of a request:
//
//   model file -> config -> weights -> memory plan (five regions, each with one owner)
//
//   submit -> waiting -> admitted -> step ... step -> finished -> released
//                                     |
//     +-------------------------------+----------------------------------------+
//     | schedule   decode rows, prefill chunks, pictures they need             |
//     | vision     patches -> layers (windows, full) -> merger -> picture rows |
//     | text       embed + picture rows -> layers (paged KV) -> logits         |
//     | sample     ids, log-probabilities -> commit: blocks hashed, tokens out |
//     +------------------------------------------------------------------------+
//
// All device memory is taken once, at engine_open(). A step allocates nothing: what it needs comes
// from the arena, a bump pointer that starts over each step and whose size was found by running this
// same code on a device that only counts (vlm_null.c).
#include "vlm.h"
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#define OPENSSL_SUPPRESS_DEPRECATED // the plain SHA-256 calls: EVP allocates at each beginning, and a step must not
#include <openssl/sha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <utf8proc.h>

// ---------------------------------------------------------------------------------------------
// Small helpers

// Names are cut to a length in bytes, and need not have been text at all: keep what is said UTF-8.
static void keep_utf8(char *p) {
    while (*p) {
        utf8proc_int32_t c;
        utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)p, -1, &c);
        if (n < 1) *p = '?', n = 1;
        p += n;
    }
}

static void error_fill(Error *err, int status, const char *field, const char *format, va_list args) {
    char message[sizeof err->message]; // one of the arguments may be the error's own
    vsnprintf(message, sizeof message, format, args);
    snprintf(err->param, sizeof err->param, "%s", field);
    memcpy(err->message, message, sizeof message);
    err->status = status;
    keep_utf8(err->message);
    keep_utf8(err->param);
}

bool fail(Error *err, int status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    error_fill(err, status, "", format, args);
    va_end(args);
    return false;
}

bool fail_at(Error *err, const char *field, const char *format, ...) {
    va_list args;
    va_start(args, format);
    error_fill(err, 400, field, format, args);
    va_end(args);
    return false;
}

// Memory for the host's own bookkeeping. A machine that cannot give it cannot serve: say so and end.
static void *xcalloc(size_t n, size_t size) {
    void *p = calloc(n ? n : 1, size ? size : 1);
    if (p) return p;
    fprintf(stderr, "vlm: out of host memory for %zu bytes of bookkeeping\n", n * size);
    exit(1);
}

void ids_push(Ids *ids, int32_t id) {
    if (ids->n == ids->cap) {
        ids->cap = ids->cap ? 2 * ids->cap : 64;
        ids->data = realloc(ids->data, ids->cap * sizeof *ids->data);
        if (!ids->data) {
            fprintf(stderr, "vlm: out of host memory for %zu token ids\n", ids->cap);
            exit(1);
        }
    }
    ids->data[ids->n++] = id;
}

static const char *const dtype_names[] = {"f32", "bf16", "q8", "q4"};

const char *dtype_name(Dtype type) { return dtype_names[type]; }

bool dtype_find(const char *name, Dtype *type) {
    for (*type = F32; *type <= Q4; ++*type)
        if (!strcmp(name, dtype_names[*type])) return true;
    return false;
}

size_t dtype_bytes(Dtype type) { return type == F32 ? 4 : 2; }

size_t pair_bytes(Dtype type) { return 2 * Q_ROWS * (sizeof(uint16_t) + (type == Q8 ? Q_GROUP : Q_GROUP / 2)); }

size_t tile_bytes(Dtype type, int64_t cols) { return (cols + 2 * Q_GROUP - 1) / (2 * Q_GROUP) * pair_bytes(type); }

size_t matrix_bytes(Dtype type, int64_t rows, int64_t cols) {
    if (type >= Q8) return (rows + Q_ROWS - 1) / Q_ROWS * tile_bytes(type, cols);
    return (size_t)rows * cols * dtype_bytes(type);
}

static int div_up(int64_t a, int64_t b) { return (int)((a + b - 1) / b); }
static size_t align_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
static int min_int(int a, int b) { return a < b ? a : b; }
static int max_int(int a, int b) { return a > b ? a : b; }

// Seconds: of the host, or of the device's own clock where time is planned and not spent.
static double now(const Device *device) {
    if (device->clock) return device->clock();
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// ---------------------------------------------------------------------------------------------
// The model file: safetensors, which is an 8-byte length, a JSON header of that length that gives each tensor's
// dtype, shape and place, then the data. Nothing in it is believed before it is checked.

typedef struct Tensor {
    const char *name, *dtype; // owned by the header
    int rank;
    int64_t dims[8];
    uint64_t begin, end; // in the data
} Tensor;

struct ModelFile {
    char *path;
    uint8_t *map;
    size_t size, data; // bytes of the file; where the data begin
    json_t *header;
    Tensor *tensors; // in the order of their data
    int n_tensors;
    ModelFile *maker; // itself, when it is no file: it makes up the tensors that it is asked for
};

static int element_bytes(const char *dtype) {
    static const struct {
        const char *name;
        int bytes;
    } known[] = {{"F32", 4}, {"BF16", 2}, {"I32", 4}, {"U8", 1}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(dtype, known[i].name)) return known[i].bytes;
    return 0;
}

// One entry of the header -> *t, with its bytes inside `size` and in agreement with its shape.
static bool tensor_parse(const char *path, const char *name, json_t *entry, uint64_t size, Tensor *t, Error *err) {
    json_t *shape, *begin, *end;
    if (json_unpack(entry, "{s:s, s:o, s:[o,o]}", "dtype", &t->dtype, "shape", &shape, "data_offsets", &begin, &end) ||
        !json_is_array(shape) || !json_is_integer(begin) || !json_is_integer(end))
        return fail(err, 500, "%s: tensor %.60s has no proper dtype, shape and data_offsets: export the model again",
                    path, name);
    t->name = name, t->rank = (int)json_array_size(shape);
    int width = element_bytes(t->dtype);
    if (!width) return fail(err, 500, "%s: tensor %.60s has the unknown dtype %.20s", path, name, t->dtype);
    if (t->rank > 8) return fail(err, 500, "%s: tensor %.60s has %d dimensions, over 8", path, name, t->rank);
    uint64_t bytes = width;
    for (int i = 0; i < t->rank; i++) {
        json_t *d = json_array_get(shape, i);
        t->dims[i] = json_is_integer(d) ? json_integer_value(d) : -1;
        if (t->dims[i] < 0 || (t->dims[i] > 0 && bytes > UINT64_MAX / t->dims[i]))
            return fail(err, 500, "%s: tensor %.60s has an impossible shape", path, name);
        bytes *= t->dims[i];
    }
    t->begin = json_integer_value(begin), t->end = json_integer_value(end);
    if (t->begin > t->end || t->end > size || t->end - t->begin != bytes)
        return fail(err, 500, "%s: tensor %.60s does not lie in the file: it is cut short or damaged", path, name);
    return true;
}

enum { MAX_MADE = 4096 }; // tensors of a file that is made up

static int tensor_order(const void *a, const void *b) {
    const Tensor *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

static bool modelfile_parse(ModelFile *f, Error *err) {
    uint64_t n = 0;
    if (f->size >= 8) memcpy(&n, f->map, 8); // little-endian, as every machine this runs on
    if (f->size < 8 || n > f->size - 8 || n < 2 || f->map[8] != '{')
        return fail(err, 500,
                    "%s is not a model file (%zu bytes, no safetensors header): make one with weights_export.py",
                    f->path, f->size);
    if (n > 100 << 20) return fail(err, 500, "%s: its header has %" PRIu64 " bytes, over 100 MB", f->path, n);
    json_error_t e;
    f->header = json_loadb((const char *)f->map + 8, n, JSON_REJECT_DUPLICATES, &e);
    if (!json_is_object(f->header))
        return fail(err, 500, "%s: its header is not JSON (at byte %d): the file is damaged", f->path, e.position);
    f->data = 8 + n;
    f->tensors = xcalloc(json_object_size(f->header), sizeof *f->tensors);
    const char *name;
    json_t *entry;
    json_object_foreach(f->header, name, entry) {
        if (!strcmp(name, "__metadata__")) continue;
        if (!tensor_parse(f->path, name, entry, f->size - f->data, &f->tensors[f->n_tensors], err)) return false;
        f->n_tensors++;
    }
    qsort(f->tensors, f->n_tensors, sizeof *f->tensors, tensor_order);
    uint64_t end = 0;
    for (int i = 0; i < f->n_tensors; end = f->tensors[i++].end)
        if (f->tensors[i].begin != end)
            return fail(err, 500, "%s: tensor %.60s overlaps its neighbour or leaves a hole", f->path,
                        f->tensors[i].name);
    if (end != f->size - f->data)
        return fail(err, 500, "%s: %zu bytes of data, its tensors have %" PRIu64, f->path, f->size - f->data, end);
    return true;
}

ModelFile *modelfile_open(const char *path, Error *err) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        fail(err, 500, "cannot open the model %s: %s (name one with -m FILE)", path, strerror(errno));
        return NULL;
    }
    ModelFile *f = xcalloc(1, sizeof *f);
    f->path = strdup(path);
    struct stat st;
    bool ok = fstat(fd, &st) == 0;
    if (!ok || !S_ISREG(st.st_mode)) ok = fail(err, 500, "the model %s is not a file", path);
    if (ok && (f->size = st.st_size) > 0) {
        void *map = mmap(NULL, f->size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED)
            ok = fail(err, 500, "cannot map the model %s: %s", path, strerror(errno));
        else
            f->map = map;
        if (ok) madvise(map, f->size, MADV_HUGEPAGE); // where the file system has them, of a file not yet read
    }
    close(fd);
    const char *format = NULL;
    if (ok) ok = modelfile_parse(f, err);
    if (ok && (!(format = modelfile_text(f, "format")) || strcmp(format, "vlm 1")))
        ok = fail(err, 500, "%s has format \"%.20s\", this program reads \"vlm 1\": make it with weights_export.py",
                  path, format ? format : "");
    if (ok) return f;
    modelfile_close(f);
    return NULL;
}

void modelfile_close(ModelFile *f) {
    if (!f) return;
    if (f->map) munmap(f->map, f->size);
    json_decref(f->header);
    free(f->tensors);
    free(f->path);
    free(f);
}

size_t modelfile_bytes(const ModelFile *f) { return f->size; }

static const char *modelfile_data(const ModelFile *f) { return (const char *)f->map + f->data; }

const char *modelfile_text(const ModelFile *f, const char *key) {
    return json_string_value(json_object_get(json_object_get(f->header, "__metadata__"), key));
}

// Sixty-four random bits of a place: splitmix64, in order of places.
static uint64_t random_bits(uint64_t place) {
    uint64_t x = (place + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// The next tensor of a file that is made up: of random signs and fractions, but one exponent, so that nothing
// overflows.
static const Tensor *tensor_make(ModelFile *f, const char *name, const char *dtype, int rank, const int64_t *dims) {
    static const struct {
        const char *dtype;
        uint64_t random, fixed;
    } kinds[] = {{"F32", 0x807fffff807fffff, 0x3f0000003f000000},  // 0.5 .. 1
                 {"BF16", 0x807f807f807f807f, 0x3c803c803c803c80}, // 1/64 .. 1/32
                 {"", 0x9f9f9f9f9f9f9f9f, 0x2020202020202020}};    // bytes; pairs of them are finite as f16, too
    Tensor *t = &f->tensors[f->n_tensors++];
    json_object_set_new(f->header, name, json_null());
    t->name = json_object_iter_key(json_object_iter_at(f->header, name)); // owned there
    t->dtype = dtype, t->rank = rank, t->begin = t == f->tensors ? 0 : align_up(t[-1].end, 64);
    size_t bytes = element_bytes(dtype), kind = 0;
    for (int i = 0; i < rank; i++) bytes *= t->dims[i] = dims[i];
    t->end = t->begin + bytes;
    assert(f->n_tensors <= MAX_MADE && t->end <= f->size);
    while (*kinds[kind].dtype && strcmp(kinds[kind].dtype, dtype)) kind++;
    uint64_t *data = (uint64_t *)(f->map + t->begin), random = kinds[kind].random, fixed = kinds[kind].fixed;
#pragma omp parallel for
    for (size_t i = 0; i < bytes / 8; i++) data[i] = (random_bits(t->begin / 8 + i) & random) | fixed;
    return t;
}

typedef char ShapeText[128];

static const char *shape_text(ShapeText text, int rank, const int64_t *dims) {
    int n = 0;
    for (int i = 0; i < rank && n < (int)sizeof(ShapeText) - 24; i++)
        n += sprintf(text + n, "%s%" PRId64, i ? ", " : "", dims[i]);
    text[n] = 0;
    return text;
}

const void *modelfile_tensor(const ModelFile *f, const char *name, const char *dtype, int rank, int64_t *dims,
                             Error *err) {
    const Tensor *t = NULL;
    for (int i = 0; i < f->n_tensors && !t; i++)
        if (!strcmp(f->tensors[i].name, name)) t = &f->tensors[i];
    if (!t && f->maker) t = tensor_make(f->maker, name, dtype, rank, dims);
    if (!t) return fail(err, 500, "%s: tensor %s is missing: export the model again", f->path, name), NULL;
    bool fits = t->rank == rank && !strcmp(t->dtype, dtype);
    for (int i = 0; i < rank && fits; i++) fits = dims[i] < 0 || dims[i] == t->dims[i];
    ShapeText is, wants;
    if (!fits)
        return fail(err, 500, "%s: tensor %s is %s of shape (%s), the config wants %s (%s): export the model again",
                    f->path, name, t->dtype, shape_text(is, t->rank, t->dims), dtype, shape_text(wants, rank, dims)),
               NULL;
    if (f->data % 64 || t->begin % 64) // in the file, and in a copy of the data
        return fail(err, 500, "%s: tensor %s is not aligned to 64 bytes", f->path, name), NULL;
    memcpy(dims, t->dims, rank * sizeof *dims);
    return f->map + f->data + t->begin;
}

// ---------------------------------------------------------------------------------------------
// Config

// Reads fields of one metadata object; the first field that is absent or out of range sets the Error.
typedef struct Fields {
    const char *where; // "config.text"
    json_t *object;
    Error *err;
    bool ok;
} Fields;

static double field_number(Fields *f, const char *name, double low, double high) {
    json_t *v = json_object_get(f->object, name);
    double x = json_number_value(v);
    if (f->ok && (!json_is_number(v) || !(x >= low && x <= high)))
        f->ok = fail(f->err, 500, "the model's %s.%s is %s, not a number from %g to %g: export the model again",
                     f->where, name, json_is_number(v) ? "out of range" : "missing", low, high);
    return f->ok ? x : low;
}

static int field_int(Fields *f, const char *name, int low, int high) {
    json_t *v = json_object_get(f->object, name);
    if (f->ok && !json_is_integer(v)) f->ok = fail(f->err, 500, "the model's %s.%s is no whole number", f->where, name);
    return (int)field_number(f, name, low, high);
}

// Up to `cap` numbers from low to high; how many.
static int field_list(Fields *f, const char *name, double *out, int cap, double low, double high) {
    json_t *list = json_object_get(f->object, name), *v;
    size_t i;
    if (f->ok && (!json_is_array(list) || json_array_size(list) > (size_t)cap))
        f->ok = fail(f->err, 500, "the model's %s.%s is no list of at most %d numbers", f->where, name, cap);
    if (!f->ok) return 0;
    json_array_foreach(list, i, v) {
        out[i] = json_number_value(v);
        if (!json_is_number(v) || !(out[i] >= low && out[i] <= high))
            f->ok = fail(f->err, 500, "the model's %s.%s[%zu] is not from %g to %g", f->where, name, i, low, high);
    }
    return f->ok ? (int)json_array_size(list) : 0;
}

enum { MAX_SIZE = 1 << 20, MAX_LAYERS = 128, MAX_HEAD = 256 }; // of a model's own sizes: products of two fit 64 bits

static void text_config_read(Fields f, TextConfig *c) {
    c->layers = field_int(&f, "layers", 1, MAX_LAYERS);
    c->hidden = field_int(&f, "hidden", 1, MAX_SIZE);
    c->ff = field_int(&f, "ff", 1, MAX_SIZE);
    c->heads = field_int(&f, "heads", 1, 1024);
    c->kv_heads = field_int(&f, "kv_heads", 1, 1024);
    c->head_dim = field_int(&f, "head_dim", 2, MAX_HEAD);
    c->vocab = field_int(&f, "vocab", 1, 1 << 24);
    c->max_position = field_int(&f, "max_position", 1, 1 << 24);
    c->eps = field_number(&f, "eps", 0, 1);
    c->rope_theta = field_number(&f, "rope_theta", 1, 1e12);
    c->tied = json_is_true(json_object_get(f.object, "tied"));
    double section[3] = {0};
    int n = field_list(&f, "mrope_section", section, 3, 0, MAX_HEAD);
    for (int i = 0; i < 3; i++) c->mrope_section[i] = (int)section[i];
    if (f.ok && (n != 3 || 2 * (section[0] + section[1] + section[2]) != c->head_dim))
        f.ok = fail(f.err, 500, "the model's mrope_section does not add up to half its head size %d", c->head_dim);
    if (f.ok && c->heads % c->kv_heads)
        fail(f.err, 500, "the model's %d query heads do not divide among %d key heads", c->heads, c->kv_heads);
}

static void vision_config_read(Fields f, VisionConfig *c) {
    c->layers = field_int(&f, "layers", 1, MAX_LAYERS);
    c->hidden = field_int(&f, "hidden", 1, MAX_SIZE);
    c->ff = field_int(&f, "ff", 1, MAX_SIZE);
    c->heads = field_int(&f, "heads", 1, 1024);
    c->out = field_int(&f, "out", 1, MAX_SIZE);
    c->patch = field_int(&f, "patch", 1, 64);
    c->merge = field_int(&f, "merge", 1, 8);
    c->temporal = field_int(&f, "temporal", 1, 8);
    c->window = field_int(&f, "window", 1, 1 << 16);
    double full[MAX_LAYERS];
    int n = field_list(&f, "full_layers", full, MAX_LAYERS, 0, c->layers - 1);
    for (int i = 0; i < n; i++) c->full_layers[(int)full[i] / 64] |= (uint64_t)1 << (int)full[i] % 64;
    if (f.ok && (c->hidden % c->heads || c->hidden / c->heads % 4 || c->hidden / c->heads > MAX_HEAD))
        f.ok = fail(f.err, 500, "the vision tower's %d heads do not divide %d into heads of a multiple of 4 up to %d",
                    c->heads, c->hidden, MAX_HEAD);
    if (f.ok && c->window < c->patch * c->merge)
        fail(f.err, 500, "the vision tower's window of %d pixels is smaller than a token's %d", c->window,
             c->patch * c->merge);
}

enum { MAX_SOURCE_PIXELS = 64 << 20 }; // of a picture as it comes: 8192 x 8192

static void image_config_read(Fields f, const VisionConfig *v, ImageConfig *c) {
    int token = v->patch * v->merge;
    *c = (ImageConfig){.patch = v->patch,
                       .merge = v->merge,
                       .temporal = v->temporal,
                       .background = {255, 255, 255},
                       .max_source_pixels = MAX_SOURCE_PIXELS};
    c->min_pixels = (int64_t)field_number(&f, "min_pixels", 1, 1e9);
    c->max_pixels = (int64_t)field_number(&f, "max_pixels", token * token, 1e9);
    double mean[3], std[3];
    if (f.ok && (field_list(&f, "mean", mean, 3, -10, 10) != 3 || field_list(&f, "std", std, 3, 1e-6, 1e3) != 3))
        f.ok = fail(f.err, 500, "the model's preprocess.mean and .std are not three numbers each");
    for (int i = 0; i < 3 && f.ok; i++) c->mean[i] = (float)mean[i], c->std[i] = (float)std[i];
    if (f.ok && c->min_pixels > c->max_pixels) fail(f.err, 500, "the model's min_pixels are over its max_pixels");
}

// The matrices' types: `type`, and the others where they differ from it.
static bool types_read(const ModelFile *file, Config *c, Error *err) {
    const struct {
        const char *key;
        Dtype *type;
    } types[] = {{"type", &c->text_type},
                 {"embed_type", &c->embed_type},
                 {"head_type", &c->head_type},
                 {"vision_type", &c->vision_type}};
    for (int i = 0; i < 4; i++) {
        const char *name = modelfile_text(file, types[i].key);
        *types[i].type = c->text_type;
        if (!name && i) continue;
        if (!name || !dtype_find(name, types[i].type))
            return fail(err, 500, "%s: %s \"%.20s\" is unknown, this program reads f32, bf16, q8 and q4", file->path,
                        types[i].key, name ? name : "");
        if ((*types[i].type == F32) != (c->text_type == F32))
            return fail(err, 500, "%s: its matrices are of f32 and of other types, which do not go together",
                        file->path);
    }
    c->type = compute_type(c->text_type);
    return true;
}

void config_retype(Config *c, Dtype type) {
    c->type = compute_type(type), c->text_type = type;
    c->embed_type = c->head_type = type == Q4 ? Q8 : type;
    c->vision_type = compute_type(type);
}

static bool config_read(const ModelFile *file, Config *c, Error *err) {
    *c = (Config){0};
    *err = (Error){0};
    const char *arch = modelfile_text(file, "architecture");
    if (!arch || strcmp(arch, "qwen2.5-vl"))
        return fail(err, 500, "%s: architecture \"%.40s\" is unknown, this program runs \"qwen2.5-vl\"", file->path,
                    arch ? arch : "");
    if (!types_read(file, c, err)) return false;
    const char *config_text = modelfile_text(file, "config"), *preprocess_text = modelfile_text(file, "preprocess");
    json_t *config = json_loads(config_text ? config_text : "", JSON_REJECT_DUPLICATES, NULL);
    json_t *preprocess = json_loads(preprocess_text ? preprocess_text : "", JSON_REJECT_DUPLICATES, NULL);
    text_config_read((Fields){"config.text", json_object_get(config, "text"), err, true}, &c->text);
    if (!err->status)
        vision_config_read((Fields){"config.vision", json_object_get(config, "vision"), err, true}, &c->vision);
    if (!err->status) image_config_read((Fields){"preprocess", preprocess, err, true}, &c->vision, &c->image);
    Fields top = {"config", config, err, !err->status};
    c->image_token = field_int(&top, "image_token", 0, c->text.vocab - 1);
    double eos[8];
    c->n_eos = field_list(&top, "eos", eos, 8, 0, c->text.vocab - 1);
    for (int i = 0; i < c->n_eos; i++) c->eos[i] = (int32_t)eos[i];
    if (top.ok && c->vision.out != c->text.hidden)
        fail(err, 500, "the vision tower's rows have %d numbers, the language model's %d", c->vision.out,
             c->text.hidden);
    json_decref(config);
    json_decref(preprocess);
    return !err->status;
}

bool config_shape(const char *name, Config *config, Error *err) {
    static const struct {
        const char *name;
        int layers, hidden, ff, heads, kv_heads, vocab, vision_ff;
        bool tied;
    } shapes[] = {
        {"qwen2.5-vl-3b", 36, 2048, 11008, 16, 2, 151936, 3420, true},
        {"qwen2.5-vl-7b", 28, 3584, 18944, 28, 4, 152064, 3420, false},
        {"qwen2.5-vl-32b", 64, 5120, 27648, 40, 8, 152064, 3456, false},
        {"qwen2.5-vl-72b", 80, 8192, 29568, 64, 8, 152064, 3456, false},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (strcmp(name, shapes[i].name)) continue;
        *config = (Config){
            .text = {.layers = shapes[i].layers,
                     .hidden = shapes[i].hidden,
                     .ff = shapes[i].ff,
                     .heads = shapes[i].heads,
                     .kv_heads = shapes[i].kv_heads,
                     .head_dim = 128,
                     .vocab = shapes[i].vocab,
                     .max_position = 128000,
                     .eps = 1e-6f,
                     .rope_theta = 1e6f,
                     .mrope_section = {16, 24, 24},
                     .tied = shapes[i].tied},
            .vision = {.layers = 32,
                       .hidden = 1280,
                       .ff = shapes[i].vision_ff,
                       .heads = 16,
                       .out = shapes[i].hidden,
                       .patch = 14,
                       .merge = 2,
                       .temporal = 2,
                       .window = 112,
                       .full_layers = {0x80808080}},
            .image = {.patch = 14,
                      .merge = 2,
                      .temporal = 2,
                      .min_pixels = 3136,
                      .max_pixels = 12845056,
                      .mean = {0.48145466f, 0.4578275f, 0.40821073f},
                      .std = {0.26862954f, 0.26130258f, 0.27577711f},
                      .background = {255, 255, 255},
                      .max_source_pixels = MAX_SOURCE_PIXELS},
            .image_token = 151655,
            .eos = {151645, 151643},
            .n_eos = 2,
        };
        config_retype(config, BF16);
        return true;
    }
    return fail(err, 400, "unknown shape %.40s: known are qwen2.5-vl-3b, -7b, -32b and -72b", name);
}

// ---------------------------------------------------------------------------------------------
// Weights: pointers into the model file. The list of tensors stands once, in weights_bind(); without a file it
// only counts their bytes.

typedef struct Binder {
    const ModelFile *file; // NULL: count
    const char *place;     // where the file's data have been copied to; NULL: the map itself
    Dtype type;            // of the matrices to come
    size_t bytes;
    Error *err;
    bool ok;
} Binder;

static const void *bind_tensor(Binder *b, const char *dtype, size_t bytes, int rank, int64_t *dims, const char *format,
                               int layer) {
    b->bytes += align_up(bytes, 64);
    if (!b->file || !b->ok) return NULL;
    char name[64];
    snprintf(name, sizeof name, format, layer);
    const char *data = modelfile_tensor(b->file, name, dtype, rank, dims, b->err);
    if (!data) b->ok = false;
    return data && b->place ? b->place + (data - modelfile_data(b->file)) : data;
}

// Quantised, a matrix is bytes: tiles, of pairs of groups.
static const void *bind_matrix(Binder *b, int64_t rows, int64_t cols, const char *format, int layer) {
    size_t bytes = matrix_bytes(b->type, rows, cols);
    if (b->type >= Q8)
        return bind_tensor(b, "U8", bytes, 3,
                           (int64_t[]){div_up(rows, Q_ROWS), div_up(cols, 2 * Q_GROUP), pair_bytes(b->type)}, format,
                           layer);
    return bind_tensor(b, b->type == F32 ? "F32" : "BF16", bytes, 2, (int64_t[]){rows, cols}, format, layer);
}

static const float *bind_vector(Binder *b, int64_t n, const char *format, int layer) {
    return bind_tensor(b, "F32", n * sizeof(float), 1, &n, format, layer);
}

static bool weights_bind(Weights *w, const Config *config, const ModelFile *file, const char *place, size_t *bytes,
                         Error *err) {
    Binder b = {.file = file, .place = place, .type = config->vision_type, .err = err, .ok = true};
    const VisionConfig *v = &config->vision;
    int C = v->hidden, F = v->ff, merged = v->merge * v->merge * C;
    w->vision = xcalloc(v->layers, sizeof *w->vision);
    w->patch_embed = bind_matrix(&b, C, 3 * v->temporal * v->patch * v->patch, "vision.patch_embed", 0);
    for (int i = 0; i < v->layers; i++)
        w->vision[i] = (VisionLayer){
            .norm1 = bind_vector(&b, C, "vision.%02d.norm1", i),
            .qkv = bind_matrix(&b, 3 * C, C, "vision.%02d.qkv", i),
            .qkv_bias = bind_vector(&b, 3 * C, "vision.%02d.qkv_bias", i),
            .proj = bind_matrix(&b, C, C, "vision.%02d.proj", i),
            .proj_bias = bind_vector(&b, C, "vision.%02d.proj_bias", i),
            .norm2 = bind_vector(&b, C, "vision.%02d.norm2", i),
            .gate_up = bind_matrix(&b, 2 * F, C, "vision.%02d.gate_up", i),
            .gate_up_bias = bind_vector(&b, 2 * F, "vision.%02d.gate_up_bias", i),
            .down = bind_matrix(&b, C, F, "vision.%02d.down", i),
            .down_bias = bind_vector(&b, C, "vision.%02d.down_bias", i),
        };
    w->merger_norm = bind_vector(&b, C, "vision.merger_norm", 0);
    w->merger_up = bind_matrix(&b, merged, merged, "vision.merger_up", 0);
    w->merger_up_bias = bind_vector(&b, merged, "vision.merger_up_bias", 0);
    w->merger_down = bind_matrix(&b, v->out, merged, "vision.merger_down", 0);
    w->merger_down_bias = bind_vector(&b, v->out, "vision.merger_down_bias", 0);

    const TextConfig *t = &config->text;
    C = t->hidden, F = t->ff;
    int heads_out = t->heads * t->head_dim, qkv = heads_out + 2 * t->kv_heads * t->head_dim;
    w->text = xcalloc(t->layers, sizeof *w->text);
    b.type = config->embed_type;
    w->embed = bind_matrix(&b, t->vocab, C, "text.embed", 0);
    b.type = config->text_type;
    for (int i = 0; i < t->layers; i++)
        w->text[i] = (TextLayer){
            .norm1 = bind_vector(&b, C, "text.%02d.norm1", i),
            .qkv = bind_matrix(&b, qkv, C, "text.%02d.qkv", i),
            .qkv_bias = bind_vector(&b, qkv, "text.%02d.qkv_bias", i),
            .out = bind_matrix(&b, C, heads_out, "text.%02d.out", i),
            .norm2 = bind_vector(&b, C, "text.%02d.norm2", i),
            .gate_up = bind_matrix(&b, 2 * F, C, "text.%02d.gate_up", i),
            .down = bind_matrix(&b, C, F, "text.%02d.down", i),
        };
    w->norm = bind_vector(&b, C, "text.norm", 0);
    b.type = config->head_type;
    w->head = t->tied ? w->embed : bind_matrix(&b, t->vocab, C, "text.head", 0);
    if (bytes) *bytes = b.bytes;
    return b.ok;
}

static void weights_free(Weights *w) {
    free(w->vision);
    free(w->text);
}

size_t config_weight_bytes(const Config *config) {
    Weights w;
    size_t bytes;
    weights_bind(&w, config, NULL, NULL, &bytes, NULL);
    weights_free(&w);
    return bytes;
}

Model *model_open(const char *path, Error *err) {
    Model *m = xcalloc(1, sizeof *m);
    bool ok = (m->file = modelfile_open(path, err)) && config_read(m->file, &m->config, err) &&
              weights_bind(&m->weights, &m->config, m->file, NULL, NULL, err) &&
              (m->tokenizer = tokenizer_open(m->file, err));
    if (ok && tokenizer_vocab(m->tokenizer) > m->config.text.vocab)
        ok = fail(err, 500, "%s: its tokenizer has %d tokens, its embedding %d rows", path,
                  tokenizer_vocab(m->tokenizer), m->config.text.vocab);
    if (ok) return m;
    model_close(m);
    return NULL;
}

Model *model_shape(const Config *config) {
    Model *m = xcalloc(1, sizeof *m);
    m->config = *config;
    weights_bind(&m->weights, config, NULL, NULL, NULL, NULL);
    return m;
}

Model *model_random(const Config *config, Error *err) {
    Model *m = xcalloc(1, sizeof *m);
    ModelFile *f = m->file = xcalloc(1, sizeof *f);
    m->config = *config;
    f->maker = f, f->path = strdup("random weights"), f->header = json_object();
    f->tensors = xcalloc(MAX_MADE, sizeof *f->tensors);
    f->size = config_weight_bytes(config);
    void *map = mmap(NULL, f->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bool ok = map != MAP_FAILED || fail(err, 500, "no memory for %zu bytes of random weights", f->size);
    f->map = ok ? map : NULL;
#ifdef MADV_HUGEPAGE
    if (ok) madvise(map, f->size, MADV_HUGEPAGE);
#endif
    if (ok && weights_bind(&m->weights, config, f, NULL, NULL, err)) return m;
    model_close(m);
    return NULL;
}

void model_close(Model *m) {
    if (!m) return;
    tokenizer_close(m->tokenizer);
    weights_free(&m->weights);
    modelfile_close(m->file);
    free(m);
}

// ---------------------------------------------------------------------------------------------
// The arena: what one step needs, by a bump pointer that starts over at the top of each step. Without a base it
// measures: the addresses are false, and only the null device may be given them.

enum { ALIGN = 256 };

typedef struct Arena {
    char *base; // NULL: measuring
    size_t size, used, peak;
} Arena;

static void *arena_alloc(Arena *a, size_t bytes) {
    size_t at = a->used;
    a->used += align_up(bytes, ALIGN);
    if (a->used > a->peak) a->peak = a->used;
    if (!a->base) return (void *)(uintptr_t)(ALIGN + at);
    if (a->used > a->size) {
        fprintf(stderr, "vlm: bug: the step needs %zu bytes of arena, the plan has %zu\n", a->used, a->size);
        abort();
    }
    return a->base + at;
}

// ---------------------------------------------------------------------------------------------
// The engine's state: options, the five regions, the three things that live between steps (KV blocks,
// pictures' rows, sequences), and what the current step works on.

enum {
    SLOT_ROWS = 64, // rows of a picture that one slot of the image cache holds
    MAX_SLOTS = 1 << 16,
    ROW_CHUNK = 1024, // rows that go through a phase of the vision tower at a time
};

// A block of the KV pool. Unused ones are in a list, the next to be taken first. A block whose content is known
// by its hash stays findable there until it is taken.
typedef struct Block {
    int holders; // sequences whose table it is in
    bool hashed;
    uint8_t hash[32];
    int prev, next; // in the list of unused blocks; -1: none
    int chain;      // next block with the same bucket; -1: none
} Block;

typedef struct BlockPool {
    Block *blocks;
    int n, first, last;      // the list of unused blocks: taken at `first`
    int *buckets, n_buckets; // hash table: a power of two
    int n_free, n_cached;    // unused without and with content
    int peak_held;
} BlockPool;

// A picture whose rows are kept. Its rows lie in slots that need not be neighbours.
typedef struct ImageEntry {
    uint8_t key[32];
    int n_rows; // 0: the entry is empty
    int pins;   // sequences that are reading it
    bool ready; // its rows have been computed
    int64_t last_use;
    int *slots;
} ImageEntry;

typedef struct ImageCache {
    ImageEntry *entries; // as many as slots: a picture takes one at least
    int n_slots, slots_per_image;
    int *free_slots, n_free;
    int peak_used;
    int64_t clock, hits, misses, evictions;
} ImageCache;

// Where a picture stands in a sequence.
typedef struct Span {
    const Image *image;
    int first, n;    // its tokens
    int position;    // of the first one, on all three axes
    uint8_t key[32]; // of the rows in the image cache: the picture's, salted
    int entry;       // in the image cache while pinned, else -1
} Span;

typedef struct SequenceState {
    Sequence seq; // what the caller sees; first, so that the pointers are the same
    Sampling sampling;
    uint8_t salt[32];
    Span *spans;
    int n_spans;
    int limit;    // tokens it may have at most
    int computed; // tokens whose keys and values are in the cache
    int take;     // tokens this step computes
    bool cancelled, running, admitted_before;
    int *blocks, n_blocks;
    int n_named;          // blocks that the pool knows by their content
    uint8_t (*names)[32]; // of its full blocks: a chain of hashes,
    int n_names;          // as far as it has been asked for
    TokenCount *counts;   // of tokens whose logits are changed, each once
    int n_counts;
    int32_t *count_of;          // (V): 1 + a token's place in counts; NULL: nothing changes logits
    struct SequenceState *next; // waiting
} SequenceState;

// The step's input, in the io region. Capacities in brackets.
typedef struct Batch {
    int T, B, R, n_counts;
    int32_t *ids;         // (T): -1 where a picture's row stands
    int32_t *image_row;   // (T): row of the images region, or -1
    int32_t *positions;   // (T, 3): time, row, column
    int32_t *slot;        // (T)
    int32_t *cu_seqlens;  // (B + 1)
    int32_t *kv_len;      // (B)
    int32_t *block_table; // (B, table_stride)
    int32_t *logit_row;   // (R): row of the step's tokens
    SampleRow *rows;      // (R)
    TokenCount *counts;   // (n_counts)
    Sampled *sampled;     // (R): the step's result
} Batch;

// The picture that the vision tower is working on, in the images region.
typedef enum Phase { TOWER_IDLE, TOWER_EMBED, TOWER_QKV, TOWER_MIX, TOWER_MERGE, TOWER_PLACE } Phase;

typedef struct Tower {
    Phase phase;
    int layer, next; // where it stands: the layer, and the phase's next row
    int P, n_windows;
    int entry;        // of the image cache
    double seconds;   // so far
    float *hidden;    // (P, C)
    void *qkv;        // (P, 3, H, D), at the end the merged rows (P / merge^2, out)
    float *cos, *sin; // (P, D / 2)
    int32_t *windows; // (tokens + 1): cu_seqlens of the windows
    int32_t *whole;   // (2): cu_seqlens of the picture
    int32_t *raster;  // (tokens): where token i's row is in window order
} Tower;

// The vision tower's input, in the io region.
typedef struct VisionInput {
    int32_t *order;     // (P): patches in window order
    int32_t *positions; // (P, 2): row, column
    int32_t *windows;   // (tokens + 1)
    int32_t *raster;    // (tokens)
    void *patches;      // (ROW_CHUNK, patch_dim)
} VisionInput;

struct Engine {
    Config config; // image limits lowered to what the engine serves
    Weights weights;
    const Device *device;
    EngineOptions options;
    size_t weight_bytes;

    void *base; // the device's one allocation: weights where they are copied, kv, images, arena
    size_t reserved;
    size_t kv_bytes, image_bytes, arena_bytes, io_bytes; // the last two with what the device wants of them
    char *kv;
    float *image_rows;
    Arena arena, io;

    size_t block_bytes; // of all layers
    int table_stride;   // blocks of the longest sequence
    BlockPool pool;
    ImageCache cache;
    Batch batch;
    VisionInput vision;
    Tower tower;
    size_t tower_bytes;
    bool tower_ran;
    int32_t *text_axis, *vision_axis; // rope: axis and frequency of each pair of a head
    float *text_freq, *vision_freq;

    SequenceState **running; // (max_seqs), oldest first
    int n_running;
    SequenceState *waiting, *waiting_last;
    int n_waiting;
    int64_t n_steps, n_submitted, n_preempted, prefix_queries, prefix_hits;
    StepRecord last;
    double vision_seconds; // of the current step
    FILE *trace;           // NULL: none
    double trace_start;
};

// What an op's pointer arithmetic needs: element `i` of an array of `type`.
static void *at(const void *p, Dtype type, size_t i) { return (char *)(uintptr_t)p + i * dtype_bytes(type); }

// ---------------------------------------------------------------------------------------------
// Dump: every named intermediate as .npy. Rows of later steps and pictures are appended, so the files of a prompt in
// chunks are the files of the whole prompt.

static void npy_append(const char *path, bool ints, int64_t rows, int64_t cols, const void *data) {
    FILE *f = fopen(path, "r+b");
    if (!f) f = fopen(path, "w+b");
    if (!f) {
        fprintf(stderr, "vlm: cannot write %s: %s\n", path, strerror(errno));
        exit(1);
    }
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    int64_t before = size > 128 ? (size - 128) / 4 / cols : 0;
    char h[129];
    int n = snprintf(h, sizeof h,
                     "%c%s%c%c%c%c{'descr': '<%c4', 'fortran_order': False, 'shape': (%" PRId64 ", %" PRId64 ")}", 0x93,
                     "NUMPY", 1, 'x', 118, 'x', ints ? 'i' : 'f', before + rows, cols);
    memset(h + n, ' ', sizeof h - n);
    h[7] = h[9] = 0, h[127] = '\n'; // version 1.0, and a header of 118 bytes in all
    rewind(f);
    fwrite(h, 1, 128, f);
    fseek(f, 0, SEEK_END);
    fwrite(data, 4, rows * cols, f);
    if (ferror(f) | fclose(f)) {
        fprintf(stderr, "vlm: cannot write %s: %s\n", path, strerror(errno));
        exit(1);
    }
}

// Dump rows of a device array. `format` may name a layer.
static void tap(Engine *e, const char *format, int layer, const void *data, Dtype type, int64_t rows, int64_t cols) {
    if (!e->options.dump || !e->arena.base) return;
    char name[32], path[4096];
    snprintf(name, sizeof name, format, layer);
    snprintf(path, sizeof path, "%s/%s.npy", e->options.dump, name);
    int64_t n = rows * cols;
    float *host = xcalloc(n, sizeof *host);
    if (type == F32)
        e->device->download(host, data, n * 4);
    else {
        uint16_t *half = (uint16_t *)host + n; // widened from the front, never overtaking what is still to be read
        e->device->download(half, data, n * 2);
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits = (uint32_t)half[i] << 16;
            memcpy(host + i, &bits, 4);
        }
    }
    npy_append(path, false, rows, cols, host);
    free(host);
}

static void tap_ints(Engine *e, const char *name, const int32_t *host, int64_t rows, int64_t cols) {
    if (!e->options.dump || !e->arena.base) return;
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.npy", e->options.dump, name);
    npy_append(path, true, rows, cols, host);
}

// ---------------------------------------------------------------------------------------------
// The vision tower: Qwen2_5_VisionTransformerPretrainedModel.forward(), cut into units
//
// One picture at a time, ROW_CHUNK rows of one phase after another. What must last from unit to unit lives in the
// images region, so a step may stop after any unit: those who decode wait for some units, never for a whole
// picture, and a cancelled picture ends at once. The wide rows of a large picture never exist all at once.

// Host data to the arena. Room for `room` bytes is taken, so that a step takes what the plan took, whatever it uploads.
static const void *upload_room(Engine *e, const void *host, size_t bytes, size_t room) {
    void *p = arena_alloc(&e->arena, room);
    e->device->upload(p, host, bytes);
    return p;
}

static const void *upload(Engine *e, const void *host, size_t bytes) { return upload_room(e, host, bytes, bytes); }

// Patches are computed in window order: window by window, inside a window row by row, each token's merge * merge
// patches together, as in get_window_index() of transformers' modeling_qwen2_5_vl.py. Returns the number of windows.
static int vision_layout(VisionInput *in, const VisionConfig *v, int rows, int cols) {
    int side = v->window / v->patch / v->merge, group = v->merge * v->merge, n = 0, windows = 0;
    rows /= v->merge, cols /= v->merge; // of tokens
    in->windows[0] = 0;
    for (int wy = 0; wy < rows; wy += side)
        for (int wx = 0; wx < cols; wx += side) {
            for (int y = wy; y < min_int(wy + side, rows); y++)
                for (int x = wx; x < min_int(wx + side, cols); x++, n++) {
                    in->raster[y * cols + x] = n;
                    for (int i = 0; i < group; i++) {
                        int p = n * group + i;
                        in->order[p] = (y * cols + x) * group + i;
                        in->positions[2 * p] = y * v->merge + i / v->merge;
                        in->positions[2 * p + 1] = x * v->merge + i % v->merge;
                    }
                }
            in->windows[++windows] = n * group;
        }
    return windows;
}

// Begin a picture of rows x cols patches. image NULL: measuring.
static void tower_begin(Engine *e, const Image *image, int rows, int cols) {
    const Device *d = e->device;
    const VisionConfig *v = &e->config.vision;
    VisionInput *in = &e->vision;
    Tower *t = &e->tower;
    int P = rows * cols, half = v->hidden / v->heads / 2;
    int32_t whole[2] = {0, P};
    size_t mark = e->arena.used;
    t->phase = TOWER_EMBED, t->layer = t->next = 0, t->P = P, t->seconds = 0;
    t->n_windows = image ? vision_layout(in, v, rows, cols) : 0;
    d->upload(t->windows, in->windows, (t->n_windows + 1) * sizeof(int32_t));
    d->upload(t->whole, whole, sizeof whole);
    d->upload(t->raster, in->raster, P / (v->merge * v->merge) * sizeof(int32_t));
    d->rope_table(t->cos, t->sin, upload(e, in->positions, (size_t)P * 2 * sizeof(int32_t)), 2,
                  upload(e, e->vision_axis, half * sizeof(int32_t)), upload(e, e->vision_freq, half * sizeof(float)), P,
                  half);
    e->arena.used = mark;
}

// Patches -> hidden. A convolution whose stride is its kernel: a product.
static void tower_embed(Engine *e, const Image *image, int n) {
    const ImageConfig *c = &e->config.image;
    Tower *t = &e->tower;
    Dtype type = e->config.type;
    int C = e->config.vision.hidden, dim = 3 * c->temporal * c->patch * c->patch;
    float *hidden = t->hidden + (size_t)t->next * C;
    size_t bytes = (size_t)n * dim * dtype_bytes(type);
    if (image && image->pixels) image_fill_patches(image, c, e->vision.order + t->next, n, type, e->vision.patches);
    const void *patches = upload(e, e->vision.patches, bytes);
    tap(e, "patches", 0, patches, type, n, dim);
    e->device->linear(hidden, F32, patches, e->weights.patch_embed, e->config.vision_type, NULL, n, C, dim, false);
    tap(e, "patch_embed", 0, hidden, F32, n, C);
}

// hidden -> queries, keys and values of the layer, turned.
static void tower_qkv(Engine *e, int n) {
    const Device *d = e->device;
    const Tower *t = &e->tower;
    const VisionLayer *w = &e->weights.vision[t->layer];
    Dtype type = e->config.type;
    int C = e->config.vision.hidden, H = e->config.vision.heads, D = C / H;
    size_t row = t->next, turn = row * (D / 2);
    void *normed = arena_alloc(&e->arena, (size_t)n * C * dtype_bytes(type)), *qkv = at(t->qkv, type, row * 3 * C);
    d->rmsnorm(normed, type, t->hidden + row * C, w->norm1, 1e-6f, n, C);
    d->linear(qkv, type, normed, w->qkv, e->config.vision_type, w->qkv_bias, n, 3 * C, C, false);
    d->rope(qkv, type, 3 * C, t->cos + turn, t->sin + turn, n, 2 * H, D); // q's heads, then k's
}

static bool tower_full(const Engine *e) {
    return e->config.vision.full_layers[e->tower.layer / 64] >> e->tower.layer % 64 & 1;
}

// hidden += attention, in windows or over the whole picture; hidden += mlp. Qwen2_5_VLVisionBlock.forward().
static void tower_mix(Engine *e, int n) {
    const Device *d = e->device;
    const Tower *t = &e->tower;
    const VisionLayer *w = &e->weights.vision[t->layer];
    Dtype type = e->config.type;
    int C = e->config.vision.hidden, F = e->config.vision.ff, H = e->config.vision.heads;
    bool full = tower_full(e);
    float *hidden = t->hidden + (size_t)t->next * C;
    void *mixed = arena_alloc(&e->arena, (size_t)n * C * dtype_bytes(type)), *normed = mixed;
    void *wide = arena_alloc(&e->arena, (size_t)n * 2 * F * dtype_bytes(type));
    void *act = arena_alloc(&e->arena, (size_t)n * F * dtype_bytes(type));
    d->attention_segments(mixed, type, t->qkv, full ? t->whole : t->windows, full ? 1 : t->n_windows, t->next, n, H,
                          C / H);
    d->linear(hidden, F32, mixed, w->proj, e->config.vision_type, w->proj_bias, n, C, C, true);
    d->rmsnorm(normed, type, hidden, w->norm2, 1e-6f, n, C);
    d->linear(wide, type, normed, w->gate_up, e->config.vision_type, w->gate_up_bias, n, 2 * F, C, false);
    d->glu(act, wide, type, n, F);
    d->linear(hidden, F32, act, w->down, e->config.vision_type, w->down_bias, n, C, F, true);
    tap(e, "vision.%02d", t->layer, hidden, F32, n, C);
}

// The rows of n tokens' patches, side by side -> rows of the language model's size, still in window order. They
// take the place of the last layer's queries and keys.
static void tower_merge(Engine *e, int n) {
    const Device *d = e->device;
    const Weights *w = &e->weights;
    const Tower *t = &e->tower;
    Dtype type = e->config.type;
    int group = e->config.vision.merge * e->config.vision.merge, C = e->config.vision.hidden, wide = group * C;
    int out = e->config.vision.out;
    float *merged = (float *)t->qkv + (size_t)t->next * out;
    void *normed = arena_alloc(&e->arena, (size_t)n * wide * dtype_bytes(type));
    void *up = arena_alloc(&e->arena, (size_t)n * wide * dtype_bytes(type));
    d->rmsnorm(normed, type, t->hidden + (size_t)t->next * wide, w->merger_norm, 1e-6f, n * group, C);
    d->linear(up, type, normed, w->merger_up, e->config.vision_type, w->merger_up_bias, n, wide, wide, false);
    d->gelu(up, type, (size_t)n * wide);
    d->linear(merged, F32, up, w->merger_down, e->config.vision_type, w->merger_down_bias, n, out, wide, false);
}

// Merged rows -> the picture's slots, in raster order.
static void tower_place(Engine *e, const int *slots, int n) {
    const Tower *t = &e->tower;
    int out = e->config.vision.out;
    for (int i = 0; i < n; i += SLOT_ROWS) {
        float *slot = e->image_rows + (size_t)(slots ? slots[i / SLOT_ROWS] : 0) * SLOT_ROWS * out;
        e->device->gather_rows(slot, t->qkv, t->raster + i, min_int(SLOT_ROWS, n - i), out * sizeof(float));
        tap(e, "merger", 0, slot, F32, min_int(SLOT_ROWS, n - i), out);
    }
}

// Multiply-adds, twice, of n rows of the current phase: the tower's budget is counted in these.
static double tower_flops(const Engine *e, int n) {
    const VisionConfig *v = &e->config.vision;
    double C = v->hidden, F = v->ff, side = v->window / v->patch, wide = v->merge * v->merge * C;
    double keys = e->tower.phase == TOWER_MIX && tower_full(e) ? e->tower.P : side * side;
    switch (e->tower.phase) {
    case TOWER_EMBED: return 2.0 * n * C * 3 * v->temporal * v->patch * v->patch;
    case TOWER_QKV: return 2.0 * n * 3 * C * C;
    case TOWER_MIX: return 2.0 * n * (C * C + 3 * F * C + 2 * keys * C);
    case TOWER_MERGE: return 2.0 * n * wide * (wide + v->out);
    default: return 0;
    }
}

// A patch's share of the tower when all layers have windows: what one of --step-patches stands for.
static double patch_flops(const VisionConfig *v) {
    double C = v->hidden, side = v->window / v->patch;
    return 2.0 * v->layers * (4 * C * C + 3 * v->ff * C + 2 * side * side * C);
}

// One unit of work: up to ROW_CHUNK rows of one phase. Returns its flops. After the last one the tower is idle.
static double tower_unit(Engine *e, const Image *image, const int *slots) {
    Tower *t = &e->tower;
    int group = e->config.vision.merge * e->config.vision.merge;
    int total = t->phase >= TOWER_MERGE ? t->P / group : t->P, n = min_int(total - t->next, ROW_CHUNK);
    double flops = tower_flops(e, n);
    size_t mark = e->arena.used;
    switch (t->phase) {
    case TOWER_EMBED: tower_embed(e, image, n); break;
    case TOWER_QKV: tower_qkv(e, n); break;
    case TOWER_MIX: tower_mix(e, n); break;
    case TOWER_MERGE: tower_merge(e, n); break;
    default: tower_place(e, slots, n = total); break;
    }
    e->arena.used = mark;
    t->next += n;
    if (t->next < total) return flops;
    t->next = 0;
    bool again = t->phase == TOWER_MIX && ++t->layer < e->config.vision.layers;
    t->phase = again ? TOWER_QKV : t->phase == TOWER_PLACE ? TOWER_IDLE : t->phase + 1;
    return flops;
}

// ---------------------------------------------------------------------------------------------
// The language model

typedef struct TextInput { // the batch, on the device
    const int32_t *slot, *cu_seqlens, *kv_len, *block_table;
    const float *cos, *sin;
} TextInput;

static size_t layer_kv_bytes(const Config *c) {
    return (size_t)2 * KV_BLOCK * c->text.kv_heads * c->text.head_dim * dtype_bytes(c->type);
}

// Qwen2_5_VLDecoderLayer.forward(): hidden += attention(norm1(hidden)), hidden += mlp(norm2(hidden)).
static void text_layer(Engine *e, int layer, float *hidden, const TextInput *in, int T, int B) {
    const Device *d = e->device;
    const TextConfig *c = &e->config.text;
    const TextLayer *w = &e->weights.text[layer];
    Dtype type = e->config.type;
    int C = c->hidden, F = c->ff, D = c->head_dim, H = c->heads, H_kv = c->kv_heads, row = (H + 2 * H_kv) * D;
    size_t mark = e->arena.used, width = dtype_bytes(type);
    char *kv = e->kv + layer * layer_kv_bytes(&e->config);
    void *normed = arena_alloc(&e->arena, (size_t)T * C * width);

    void *qkv = arena_alloc(&e->arena, (size_t)T * row * width); // q's heads, k's, v's
    void *mixed = arena_alloc(&e->arena, (size_t)T * H * D * width);
    d->rmsnorm(normed, type, hidden, w->norm1, c->eps, T, C);
    d->linear(qkv, type, normed, w->qkv, e->config.text_type, w->qkv_bias, T, row, C, false);
    d->rope(qkv, type, row, in->cos, in->sin, T, H + H_kv, D);
    d->kv_store(kv, e->block_bytes, type, at(qkv, type, H * D), at(qkv, type, (H + H_kv) * D), row, in->slot, T, H_kv,
                D);
    d->attention_paged(mixed, type, qkv, row, kv, e->block_bytes, in->block_table, e->table_stride, in->cu_seqlens,
                       in->kv_len, B, H, H_kv, D, 0);
    d->linear(hidden, F32, mixed, w->out, e->config.text_type, NULL, T, C, H * D, true);

    void *wide = arena_alloc(&e->arena, (size_t)T * 2 * F * width);
    void *act = arena_alloc(&e->arena, (size_t)T * F * width);
    d->rmsnorm(normed, type, hidden, w->norm2, c->eps, T, C);
    d->linear(wide, type, normed, w->gate_up, e->config.text_type, NULL, T, 2 * F, C, false);
    d->glu(act, wide, type, T, F);
    d->linear(hidden, F32, act, w->down, e->config.text_type, NULL, T, C, F, true);
    e->arena.used = mark;
}

// Entries of all sequences' penalty lists together, at most.
static size_t counts_room(const Engine *e) {
    return (size_t)e->options.max_seqs * min_int(e->options.ctx + MAX_BIASES, e->config.text.vocab);
}

// Logits of the rows that need them, and a token from each.
static void text_sample(Engine *e, const float *hidden) {
    const Device *d = e->device;
    const TextConfig *c = &e->config.text;
    const Batch *b = &e->batch;
    Dtype type = e->config.type;
    int C = c->hidden, R = b->R;
    float *last = arena_alloc(&e->arena, (size_t)R * C * sizeof *last);
    void *normed = arena_alloc(&e->arena, (size_t)R * C * dtype_bytes(type));
    float *logits = arena_alloc(&e->arena, (size_t)R * c->vocab * sizeof *logits);
    float *work = arena_alloc(&e->arena, (size_t)R * c->vocab * sizeof *work);
    Sampled *out = arena_alloc(&e->arena, R * sizeof *out);
    d->gather_rows(last, hidden, upload(e, b->logit_row, R * sizeof(int32_t)), R, C * sizeof(float));
    d->rmsnorm(normed, type, last, e->weights.norm, c->eps, R, C);
    d->linear(logits, F32, normed, e->weights.head, e->config.head_type, NULL, R, c->vocab, C, false);
    tap(e, "logits", 0, logits, F32, R, c->vocab);
    d->sample(out, logits, work, upload(e, b->rows, R * sizeof *b->rows),
              upload_room(e, b->counts, b->n_counts * sizeof *b->counts, counts_room(e) * sizeof *b->counts), R,
              c->vocab);
    d->download(b->sampled, out, R * sizeof *out);
}

// Qwen2_5_VLTextModel.forward() over the flat batch, then sampling.
static void text_forward(Engine *e) {
    const Device *d = e->device;
    const TextConfig *c = &e->config.text;
    const Batch *b = &e->batch;
    int T = b->T, C = c->hidden, half = c->head_dim / 2;
    size_t ints = T * sizeof(int32_t);
    float *cos = arena_alloc(&e->arena, (size_t)T * half * sizeof *cos);
    float *sin = arena_alloc(&e->arena, (size_t)T * half * sizeof *sin);
    TextInput in = {
        .slot = upload(e, b->slot, ints),
        .cu_seqlens = upload(e, b->cu_seqlens, (b->B + 1) * sizeof(int32_t)),
        .kv_len = upload(e, b->kv_len, b->B * sizeof(int32_t)),
        .block_table = upload(e, b->block_table, (size_t)b->B * e->table_stride * sizeof(int32_t)),
        .cos = cos,
        .sin = sin,
    };
    d->rope_table(cos, sin, upload(e, b->positions, 3 * ints), 3, upload(e, e->text_axis, half * sizeof(int32_t)),
                  upload(e, e->text_freq, half * sizeof(float)), T, half);
    tap_ints(e, "positions", b->positions, T, 3);

    float *hidden = arena_alloc(&e->arena, (size_t)T * C * sizeof *hidden);
    d->embed(hidden, e->weights.embed, e->config.embed_type, upload(e, b->ids, ints), T, C);
    d->gather_rows(hidden, e->image_rows, upload(e, b->image_row, ints), T, C * sizeof(float));
    tap(e, "embed", 0, hidden, F32, T, C);
    for (int i = 0; i < c->layers; i++) {
        text_layer(e, i, hidden, &in, T, b->B);
        tap(e, "text.%02d", i, hidden, F32, T, C);
    }
    if (b->R) text_sample(e, hidden);
}

// ---------------------------------------------------------------------------------------------
// KV blocks. free + cached + held == total: a block without holders is free (no content) or cached (content that a
// prefix may still find). Blocks are taken from the front of one list: free ones, then the longest unused.

static void pool_list_remove(BlockPool *p, int b) {
    Block *x = &p->blocks[b];
    *(x->prev >= 0 ? &p->blocks[x->prev].next : &p->first) = x->next;
    *(x->next >= 0 ? &p->blocks[x->next].prev : &p->last) = x->prev;
    x->prev = x->next = -1;
}

static void pool_list_add(BlockPool *p, int b, bool front) {
    Block *x = &p->blocks[b];
    x->prev = front ? -1 : p->last, x->next = front ? p->first : -1;
    *(x->prev >= 0 ? &p->blocks[x->prev].next : &p->first) = b;
    *(x->next >= 0 ? &p->blocks[x->next].prev : &p->last) = b;
}

static int *pool_bucket(const BlockPool *p, const uint8_t hash[32]) {
    uint32_t h;
    memcpy(&h, hash, sizeof h);
    return &p->buckets[h & (p->n_buckets - 1)];
}

static int pool_find(const BlockPool *p, const uint8_t hash[32]) {
    int b = *pool_bucket(p, hash);
    while (b >= 0 && memcmp(p->blocks[b].hash, hash, 32)) b = p->blocks[b].chain;
    return b;
}

static void pool_unhash(BlockPool *p, int b) {
    int *link = pool_bucket(p, p->blocks[b].hash);
    while (*link != b) link = &p->blocks[*link].chain;
    *link = p->blocks[b].chain;
    p->blocks[b].hashed = false;
}

// Give a held block's content a name. If another block has it already, this one stays without.
static void pool_name(BlockPool *p, int b, const uint8_t hash[32]) {
    if (p->blocks[b].hashed || pool_find(p, hash) >= 0) return;
    int *bucket = pool_bucket(p, hash);
    p->blocks[b].hashed = true;
    memcpy(p->blocks[b].hash, hash, 32);
    p->blocks[b].chain = *bucket, *bucket = b;
}

static void pool_count_held(BlockPool *p) { p->peak_held = max_int(p->peak_held, p->n - p->n_free - p->n_cached); }

// Add a holder to a block that is held or cached.
static void pool_hold(BlockPool *p, int b) {
    if (p->blocks[b].holders++ == 0) pool_list_remove(p, b), p->n_cached--;
    pool_count_held(p);
}

// A block for new content; -1: all are held.
static int pool_take(BlockPool *p) {
    int b = p->first;
    if (b < 0) return -1;
    pool_list_remove(p, b);
    if (p->blocks[b].hashed)
        pool_unhash(p, b), p->n_cached--;
    else
        p->n_free--;
    p->blocks[b].holders = 1;
    pool_count_held(p);
    return b;
}

static void pool_drop(BlockPool *p, int b) {
    assert(p->blocks[b].holders > 0);
    if (--p->blocks[b].holders) return;
    bool hashed = p->blocks[b].hashed;
    pool_list_add(p, b, !hashed);
    if (hashed)
        p->n_cached++;
    else
        p->n_free++;
}

static void pool_open(BlockPool *p, int n) {
    *p = (BlockPool){.blocks = xcalloc(n, sizeof(Block)), .n = n, .first = -1, .last = -1, .n_free = n, .n_buckets = 1};
    while (p->n_buckets < n) p->n_buckets *= 2;
    p->buckets = xcalloc(p->n_buckets, sizeof(int));
    for (int i = 0; i < p->n_buckets; i++) p->buckets[i] = -1;
    for (int i = 0; i < n; i++) pool_list_add(p, i, false);
}

// ---------------------------------------------------------------------------------------------
// The image cache

static ImageEntry *cache_find(const ImageCache *c, const uint8_t key[32]) {
    for (int i = 0; i < c->n_slots; i++)
        if (c->entries[i].n_rows && !memcmp(c->entries[i].key, key, 32)) return &c->entries[i];
    return NULL;
}

static void cache_drop(ImageCache *c, ImageEntry *entry) {
    for (int i = 0; i < div_up(entry->n_rows, SLOT_ROWS); i++) c->free_slots[c->n_free++] = entry->slots[i];
    entry->n_rows = 0;
}

// An entry for a picture of n rows, taking slots from the least recently used pictures that nobody reads. NULL:
// those who read now must finish first.
static ImageEntry *cache_take(ImageCache *c, const uint8_t key[32], int n_rows) {
    int need = div_up(n_rows, SLOT_ROWS), evictable = 0;
    for (int i = 0; i < c->n_slots; i++)
        if (c->entries[i].n_rows && !c->entries[i].pins) evictable += div_up(c->entries[i].n_rows, SLOT_ROWS);
    if (c->n_free + evictable < need) return NULL;
    while (c->n_free < need) {
        ImageEntry *oldest = NULL;
        for (int i = 0; i < c->n_slots; i++) {
            ImageEntry *x = &c->entries[i];
            if (x->n_rows && !x->pins && (!oldest || x->last_use < oldest->last_use)) oldest = x;
        }
        cache_drop(c, oldest);
        c->evictions++;
    }
    ImageEntry *entry = c->entries;
    while (entry->n_rows) entry++;
    memcpy(entry->key, key, 32);
    entry->n_rows = n_rows, entry->pins = 0, entry->ready = false;
    for (int i = 0; i < need; i++) entry->slots[i] = c->free_slots[--c->n_free];
    c->peak_used = max_int(c->peak_used, c->n_slots - c->n_free);
    return entry;
}

static void cache_open(ImageCache *c, int n_slots, int slots_per_image) {
    *c = (ImageCache){.n_slots = n_slots, .slots_per_image = slots_per_image, .n_free = n_slots};
    c->entries = xcalloc(n_slots, sizeof *c->entries);
    c->free_slots = xcalloc(n_slots, sizeof(int));
    int *slots = xcalloc((size_t)n_slots * slots_per_image, sizeof(int));
    for (int i = 0; i < n_slots; i++) {
        c->entries[i].slots = slots + (size_t)i * slots_per_image;
        c->free_slots[i] = n_slots - 1 - i;
    }
}

// ---------------------------------------------------------------------------------------------
// Sequences

// Position of token t on the three axes. Text counts up on all of them; a picture's tokens take its first position
// plus their row and column; what follows goes on after the larger side. get_rope_index() of transformers.
static void position_of(const Engine *e, const SequenceState *s, int t, int32_t out[3]) {
    const ImageConfig *c = &e->config.image;
    int position = t;
    for (int i = 0; i < s->n_spans && t >= s->spans[i].first; i++) {
        const Span *x = &s->spans[i];
        int cols = image_cols(x->image, c) / c->merge, rows = image_rows(x->image, c) / c->merge, k = t - x->first;
        if (k < x->n) {
            out[0] = x->position, out[1] = x->position + k / cols, out[2] = x->position + k % cols;
            return;
        }
        position = x->position + max_int(rows, cols) + k - x->n;
    }
    out[0] = out[1] = out[2] = position;
}

// The name of the sequence's full block i: a hash of everything that its content depends on, the block before it
// first. Each is computed once: a sequence that waits is looked up in every step.
static const uint8_t *block_name(SequenceState *s, int i) {
    for (; s->n_names <= i; s->n_names++) {
        int n = s->n_names, first = n * KV_BLOCK;
        SHA256_CTX sha;
        SHA256_Init(&sha);
        SHA256_Update(&sha, n ? s->names[n - 1] : s->salt, 32);
        SHA256_Update(&sha, s->seq.ids + first, KV_BLOCK * sizeof(int32_t));
        for (int k = 0; k < s->n_spans; k++)
            if (s->spans[k].first < first + KV_BLOCK && s->spans[k].first + s->spans[k].n > first)
                SHA256_Update(&sha, s->spans[k].key, 32);
        SHA256_Final(s->names[n], &sha);
    }
    return s->names[i];
}

// Take over the blocks of the longest known prefix, but leave a token to compute: its logits are wanted.
static void sequence_match(Engine *e, SequenceState *s) {
    while ((s->n_blocks + 1) * KV_BLOCK < s->seq.n_tokens) {
        int b = pool_find(&e->pool, block_name(s, s->n_blocks));
        if (b < 0) break;
        pool_hold(&e->pool, b);
        s->blocks[s->n_blocks++] = b;
    }
    s->n_named = s->n_blocks;
    s->computed = s->n_blocks * KV_BLOCK;
}

// Name the blocks that have become full.
static void sequence_name_blocks(Engine *e, SequenceState *s) {
    for (; (s->n_named + 1) * KV_BLOCK <= s->computed; s->n_named++)
        pool_name(&e->pool, s->blocks[s->n_named], block_name(s, s->n_named));
}

static void sequence_unpin(Engine *e, SequenceState *s) {
    for (int i = 0; i < s->n_spans; i++) {
        if (s->spans[i].entry < 0) continue;
        e->cache.entries[s->spans[i].entry].pins--;
        s->spans[i].entry = -1;
    }
}

// Take a sequence out of the running ones and give back what it holds, its last blocks first, so that the front of
// its prefix stays findable longest.
static void sequence_stop(Engine *e, SequenceState *s) {
    for (int i = s->n_blocks - 1; i >= 0; i--) pool_drop(&e->pool, s->blocks[i]);
    sequence_unpin(e, s);
    s->n_blocks = s->n_named = s->computed = s->take = 0;
    s->running = false;
    int i = 0;
    while (e->running[i] != s) i++;
    e->n_running--;
    memmove(&e->running[i], &e->running[i + 1], (e->n_running - i) * sizeof *e->running);
}

static void sequence_finish(Engine *e, SequenceState *s, Finish why) {
    s->seq.finish = why;
    if (s->running) sequence_stop(e, s);
}

static void waiting_push_front(Engine *e, SequenceState *s) {
    s->next = e->waiting;
    e->waiting = s;
    if (!s->next) e->waiting_last = s;
    e->n_waiting++;
}

static void waiting_push_back(Engine *e, SequenceState *s) {
    s->next = NULL;
    *(e->waiting ? &e->waiting_last->next : &e->waiting) = s;
    e->waiting_last = s;
    e->n_waiting++;
}

static void waiting_remove(Engine *e, SequenceState *s) {
    SequenceState **link = &e->waiting, *before = NULL;
    while (*link != s) before = *link, link = &before->next;
    *link = s->next;
    if (e->waiting_last == s) e->waiting_last = before;
    e->n_waiting--;
}

static bool penalised(const Sampling *how) {
    return how->repetition_penalty != 1 || how->presence_penalty != 0 || how->frequency_penalty != 0;
}

// The record of a token whose logit is changed.
static TokenCount *count_entry(SequenceState *s, int32_t id) {
    if (!s->count_of[id]) {
        s->counts[s->n_counts] = (TokenCount){.id = id};
        s->count_of[id] = ++s->n_counts;
    }
    return &s->counts[s->count_of[id] - 1];
}

// A penalty needs to know which tokens the sequence has.
static void count_token(SequenceState *s, int32_t id, int written) {
    if (!penalised(&s->sampling)) return;
    TokenCount *c = count_entry(s, id);
    c->seen = true, c->count += written;
}

// ---------------------------------------------------------------------------------------------
// Schedule: who computes how many tokens in this step.
//
// First come, first served, with three rules. Decoding sequences go first, a token each, so prefill never delays
// them; the budget is larger than max_seqs, so prefill always gets a part, and the oldest gets it first. When blocks
// run out the youngest sequence gives its own back and waits to be recomputed; the oldest is never preempted, and
// engine_submit() has proved that it fits alone: so it always progresses. A picture's rows are pinned while its
// sequence prefills over them; should that one lack blocks while the one that has the blocks lacks room for its
// picture, the younger gives way as well.

static void trace_bar(Engine *e, int64_t lane, const char *name, int n, double start, double end);

static void preempt_youngest(Engine *e) {
    SequenceState *s = e->running[e->n_running - 1];
    sequence_stop(e, s);
    waiting_push_front(e, s);
    e->n_preempted++;
}

// Blocks for `tokens` tokens of s, preempting younger sequences where needed. False: s is the youngest and the pool
// is dry.
static bool sequence_grow(Engine *e, SequenceState *s, int tokens) {
    while (s->n_blocks * KV_BLOCK < tokens) {
        int b = pool_take(&e->pool);
        if (b >= 0)
            s->blocks[s->n_blocks++] = b;
        else if (e->running[e->n_running - 1] != s)
            preempt_youngest(e);
        else
            return false;
    }
    return true;
}

static void span_pin(Engine *e, Span *x, ImageEntry *entry) {
    entry->pins++, entry->last_use = ++e->cache.clock;
    x->entry = (int)(entry - e->cache.entries);
}

// Pin the picture's rows if the cache has an entry for it, finished or not.
static bool span_find(Engine *e, SequenceState *s, Span *x) {
    if (x->entry >= 0) return true;
    ImageEntry *entry = cache_find(&e->cache, x->key);
    if (!entry) return false;
    e->cache.hits++, s->seq.image_hits++;
    span_pin(e, x, entry);
    return true;
}

// How many of the next n tokens can be computed now: up to the first picture whose rows are not there.
static int sequence_acquire(Engine *e, SequenceState *s, int n) {
    for (int i = 0; i < s->n_spans; i++) {
        Span *x = &s->spans[i];
        if (x->first >= s->computed + n || x->first + x->n <= s->computed) continue;
        if (!span_find(e, s, x) || !e->cache.entries[x->entry].ready) return max_int(0, x->first - s->computed);
    }
    return n;
}

// Move waiting sequences up while there is room for their prompts. A sequence alone always has room.
static void admit(Engine *e) {
    while (e->waiting && e->n_running < e->options.max_seqs) {
        SequenceState *s = e->waiting;
        sequence_match(e, s);
        int need = div_up(s->seq.n_tokens + 1, KV_BLOCK) - s->n_blocks, left = e->pool.n_free + e->pool.n_cached;
        if (e->n_running && need > left) {
            while (s->n_blocks) pool_drop(&e->pool, s->blocks[--s->n_blocks]);
            s->computed = s->n_named = 0;
            return;
        }
        waiting_remove(e, s);
        s->running = true;
        e->running[e->n_running++] = s;
        if (!s->admitted_before) {
            s->seq.cached_tokens = s->computed, s->seq.t_admit = now(e->device);
            e->prefix_queries += s->seq.n_prompt, e->prefix_hits += s->computed;
        }
        if (e->trace && !s->admitted_before)
            trace_bar(e, s->seq.id, "waiting, prompt of", s->seq.n_prompt, s->seq.t_submit, s->seq.t_admit);
        s->admitted_before = true;
    }
}

// Give each running sequence its tokens for this step. Returns how many there are.
static int schedule(Engine *e) {
    int budget = e->options.max_batch_tokens;
    for (int i = 0; i < e->n_running; i++) e->running[i]->take = 0;
    for (int prefill = 0; prefill < 2; prefill++)
        for (int i = 0; i < e->n_running && budget > 0; i++) {
            SequenceState *s = e->running[i];
            int left = s->seq.n_tokens - s->computed;
            if ((left > 1) != prefill) continue;
            int n = sequence_acquire(e, s, min_int(left, budget)); // no blocks for what waits for a picture
            s->take = sequence_grow(e, s, s->computed + n) ? n : min_int(n, s->n_blocks * KV_BLOCK - s->computed);
            budget -= s->take;
        }
    int total = 0; // not what the budget lost: who was preempted on the way computes nothing
    for (int i = 0; i < e->n_running; i++) total += e->running[i]->take;
    return total;
}

// ---------------------------------------------------------------------------------------------
// Step

// Write token t of s as the batch's next row.
static void batch_add_token(const Engine *e, Batch *b, const SequenceState *s, int t) {
    int row = b->T++;
    b->ids[row] = s->seq.ids[t], b->image_row[row] = -1;
    for (int i = 0; i < s->n_spans; i++) {
        const Span *x = &s->spans[i];
        if (t < x->first || t >= x->first + x->n) continue;
        int k = t - x->first;
        b->ids[row] = -1;
        b->image_row[row] = e->cache.entries[x->entry].slots[k / SLOT_ROWS] * SLOT_ROWS + k % SLOT_ROWS;
    }
    position_of(e, s, t, &b->positions[3 * row]);
    b->slot[row] = s->blocks[t / KV_BLOCK] * KV_BLOCK + t % KV_BLOCK;
}

static void batch_build(Engine *e) {
    Batch *b = &e->batch;
    b->T = b->B = b->R = b->n_counts = b->cu_seqlens[0] = 0;
    for (int i = 0; i < e->n_running; i++) {
        SequenceState *s = e->running[i];
        if (!s->take) continue;
        for (int t = s->computed; t < s->computed + s->take; t++) batch_add_token(e, b, s, t);
        memcpy(b->block_table + (size_t)b->B * e->table_stride, s->blocks, s->n_blocks * sizeof(int32_t));
        b->kv_len[b->B++] = s->computed + s->take;
        b->cu_seqlens[b->B] = b->T;
        if (s->computed + s->take < s->seq.n_tokens) continue;
        if (s->n_counts) memcpy(b->counts + b->n_counts, s->counts, s->n_counts * sizeof *s->counts);
        b->rows[b->R] = (SampleRow){s->sampling, s->seq.n_tokens - s->seq.n_prompt, b->n_counts, s->n_counts};
        b->n_counts += s->n_counts;
        b->logit_row[b->R++] = b->T - 1;
    }
}

// The next picture to compute: of the oldest sequence that has one within its next tokens and finds no rows for
// it. False: none, or those who read now must first make room.
static bool vision_begin(Engine *e) {
    const ImageConfig *c = &e->config.image;
    for (int i = 0; i < e->n_running; i++) {
        SequenceState *s = e->running[i];
        for (int k = 0; k < s->n_spans; k++) {
            Span *x = &s->spans[k];
            bool near = x->first < s->computed + e->options.max_batch_tokens && x->first + x->n > s->computed;
            if (!near || span_find(e, s, x)) continue;
            ImageEntry *entry = cache_take(&e->cache, x->key, x->n);
            if (!entry) return false;
            e->cache.misses++, s->seq.vision_runs++;
            span_pin(e, x, entry);
            e->tower.entry = x->entry;
            e->tower_ran = true;
            tower_begin(e, x->image, image_rows(x->image, c), image_cols(x->image, c));
            return true;
        }
    }
    return false;
}

// One of the sequences that want the picture in the tower, through its span; NULL: all have gone.
static Span *vision_wanted(const Engine *e, int i, SequenceState **who) {
    for (; i < e->n_running; i++)
        for (int k = 0; k < e->running[i]->n_spans; k++)
            if (e->running[i]->spans[k].entry == e->tower.entry) {
                *who = e->running[i];
                return &e->running[i]->spans[k];
            }
    return NULL;
}

static void vision_end(Engine *e) {
    SequenceState *s;
    e->cache.entries[e->tower.entry].ready = true;
    for (int i = 0; i < e->n_running; i++)
        if (vision_wanted(e, i, &s) && s == e->running[i]) s->seq.vision_seconds += e->tower.seconds;
}

// Let the tower work, up to the step's budget. Returns the flops.
static double step_vision(Engine *e) {
    double begin = now(e->device);
    double budget = e->options.step_patches * patch_flops(&e->config.vision), done = 0;
    while (done < budget) {
        if (e->tower.phase == TOWER_IDLE && !vision_begin(e)) break;
        SequenceState *s;
        ImageEntry *entry = &e->cache.entries[e->tower.entry];
        Span *x = vision_wanted(e, 0, &s);
        if (!x) { // cancelled or preempted: what is done of it is lost
            cache_drop(&e->cache, entry);
            e->tower.phase = TOWER_IDLE;
            continue;
        }
        double start = now(e->device);
        done += tower_unit(e, x->image, entry->slots);
        e->tower.seconds += now(e->device) - start;
        if (e->tower.phase == TOWER_IDLE) vision_end(e);
    }
    e->vision_seconds = now(e->device) - begin;
    return done;
}

static bool is_eos(const Config *c, int32_t id) {
    for (int i = 0; i < c->n_eos; i++)
        if (c->eos[i] == id) return true;
    return false;
}

static void sequence_append(Engine *e, SequenceState *s, const Sampled *sampled) {
    Sequence *q = &s->seq;
    q->sampled[q->n_tokens - q->n_prompt] = *sampled;
    q->ids[q->n_tokens++] = sampled->id;
    count_token(s, sampled->id, 1);
    q->t_last = now(e->device);
    if (q->n_tokens == q->n_prompt + 1) q->t_first = q->t_last;
    if (is_eos(&e->config, sampled->id))
        sequence_finish(e, s, FINISH_STOP);
    else if (q->n_tokens == s->limit)
        sequence_finish(e, s, FINISH_LENGTH);
}

// What the step computed becomes part of the sequences.
static void commit(Engine *e) {
    int r = 0;
    for (int i = 0; i < e->n_running;) {
        SequenceState *s = e->running[i];
        s->computed += s->take;
        sequence_name_blocks(e, s);
        for (int k = 0; k < s->n_spans; k++) {
            Span *x = &s->spans[k];
            if (x->entry < 0 || x->first + x->n > s->computed) continue;
            e->cache.entries[x->entry].pins--;
            x->entry = -1;
        }
        if (s->take && s->computed == s->seq.n_tokens) sequence_append(e, s, &e->batch.sampled[r++]);
        if (s->running) i++; // a finished one has made room for the next
    }
}

// ---------------------------------------------------------------------------------------------
// Seeing it: --explain writes a line a step, --trace a Chrome trace (chrome://tracing, ui.perfetto.dev) with a lane
// for the vision tower, one for each request, and counters for the regions.

static void explain(const Engine *e, double patches, double seconds) {
    fprintf(stderr, "step %" PRId64 ":", e->n_steps);
    for (int i = 0; i < e->n_running; i++)
        if (e->running[i]->take == 1) fprintf(stderr, " decode #%" PRId64, e->running[i]->seq.id);
    for (int i = 0; i < e->n_running; i++) {
        const SequenceState *s = e->running[i];
        if (s->take > 1)
            fprintf(stderr, " prefill #%" PRId64 " +%d (%d of %d)", s->seq.id, s->take, s->computed + s->take,
                    s->seq.n_tokens);
    }
    if (patches > 0) fprintf(stderr, " picture %.0f patches", patches);
    fprintf(stderr, " | arena %.1f MB, kv %d held %d cached of %d, images %d of %d, waiting %d | %.1f ms\n",
            e->arena.peak / 1e6, e->pool.n - e->pool.n_free - e->pool.n_cached, e->pool.n_cached, e->pool.n,
            e->cache.n_slots - e->cache.n_free, e->cache.n_slots, e->n_waiting, seconds * 1e3);
}

static void explain_plan(const Engine *e) {
    fprintf(stderr,
            "plan: weights %.1f MB, kv %.1f MB in %d blocks, images %.1f MB in %d slots and the tower, arena %.1f MB, "
            "io %.1f MB\n",
            e->weight_bytes / 1e6, e->kv_bytes / 1e6, e->pool.n, e->image_bytes / 1e6, e->cache.n_slots,
            e->arena_bytes / 1e6, e->io_bytes / 1e6);
}

// A bar on a lane, from `start` to `end`, in the trace's microseconds.
static void trace_bar(Engine *e, int64_t lane, const char *name, int n, double start, double end) {
    fprintf(e->trace, "{\"ph\":\"X\",\"pid\":1,\"tid\":%" PRId64 ",\"name\":\"%s %d\",\"ts\":%.1f,\"dur\":%.1f},\n",
            lane, name, n, (start - e->trace_start) * 1e6, (end - start) * 1e6);
}

static void trace_step(Engine *e, double patches, double start, double end) {
    if (patches > 0) trace_bar(e, 0, "patches", (int)patches, start, start + e->vision_seconds);
    for (int i = 0; i < e->n_running; i++) {
        const SequenceState *s = e->running[i];
        if (s->take)
            trace_bar(e, s->seq.id, s->take > 1 ? "prefill" : "decode", s->take, start + e->vision_seconds, end);
    }
    fprintf(e->trace,
            "{\"ph\":\"C\",\"pid\":1,\"name\":\"kv blocks\",\"ts\":%.1f,\"args\":{\"held\":%d,\"cached\":%d}},\n"
            "{\"ph\":\"C\",\"pid\":1,\"name\":\"image slots\",\"ts\":%.1f,\"args\":{\"used\":%d}},\n"
            "{\"ph\":\"C\",\"pid\":1,\"name\":\"arena bytes\",\"ts\":%.1f,\"args\":{\"used\":%zu}},\n"
            "{\"ph\":\"C\",\"pid\":1,\"name\":\"sequences\",\"ts\":%.1f,\"args\":{\"running\":%d,\"waiting\":%d}},\n",
            (start - e->trace_start) * 1e6, e->pool.n - e->pool.n_free - e->pool.n_cached, e->pool.n_cached,
            (start - e->trace_start) * 1e6, e->cache.n_slots - e->cache.n_free, (start - e->trace_start) * 1e6,
            e->arena.used, (start - e->trace_start) * 1e6, e->n_running, e->n_waiting);
}

static bool trace_open(Engine *e, Error *err) {
    if (!e->options.trace) return true;
    e->trace = fopen(e->options.trace, "w");
    if (!e->trace) return fail(err, 400, "--trace %.150s: %s", e->options.trace, strerror(errno));
    e->trace_start = now(e->device);
    fprintf(e->trace,
            "[{\"ph\":\"M\",\"pid\":1,\"tid\":0,\"name\":\"thread_name\",\"args\":{\"name\":\"vision tower\"}},\n");
    return true;
}

static void trace_close(Engine *e) {
    if (!e->trace) return;
    fprintf(e->trace, "{\"ph\":\"M\",\"pid\":1,\"name\":\"process_name\",\"args\":{\"name\":\"vlm.c\"}}]\n");
    if (ferror(e->trace) | fclose(e->trace)) {
        fprintf(stderr, "vlm: cannot write %s: %s\n", e->options.trace, strerror(errno));
        exit(1);
    }
}

static void report(Engine *e, double flops, double start) {
    double patches = flops / patch_flops(&e->config.vision), end = now(e->device);
    e->last = (StepRecord){.n = ++e->n_steps,
                           .start = start,
                           .seconds = end - start,
                           .patches = (int)patches,
                           .running = e->n_running,
                           .waiting = e->n_waiting,
                           .blocks_held = e->pool.n - e->pool.n_free - e->pool.n_cached,
                           .blocks_cached = e->pool.n_cached,
                           .slots_used = e->cache.n_slots - e->cache.n_free};
    for (int i = 0; i < e->n_running; i++) {
        int take = e->running[i]->take;
        *(take > 1 ? &e->last.prefill : &e->last.decode) += take;
    }
    if (e->trace) trace_step(e, patches, start, end);
    if (e->options.explain) explain(e, patches, end - start);
}

// ---------------------------------------------------------------------------------------------
// The step itself

static void drop_cancelled(Engine *e) {
    for (int i = 0; i < e->n_running;)
        if (e->running[i]->cancelled)
            sequence_finish(e, e->running[i], FINISH_CANCELLED);
        else
            i++;
    for (SequenceState *s = e->waiting, *next; s; s = next) {
        next = s->next;
        if (!s->cancelled) continue;
        waiting_remove(e, s);
        sequence_finish(e, s, FINISH_CANCELLED);
    }
}

bool engine_step(Engine *e) {
    double start = now(e->device);
    e->arena.used = 0;
    drop_cancelled(e);
    admit(e);
    double flops = step_vision(e);
    while (!schedule(e) && !flops && e->n_running > 1) { // each holds what the other needs
        preempt_youngest(e);
        flops = step_vision(e); // which may have made room for a picture
    }
    if (!e->n_running) return false;
    batch_build(e);
    assert(e->batch.T || flops);
    if (e->batch.T) text_forward(e);
    report(e, flops, start);
    commit(e);
    return true;
}

// ---------------------------------------------------------------------------------------------
// Submit, cancel, release

static bool request_check(const Engine *e, const Request *r, int room, Error *err) {
    if (r->n < 1) return fail(err, 400, "the prompt is empty");
    if (r->n >= e->options.ctx)
        return fail(err, 400, "the prompt has %d tokens, the context %d: shorten it, or start with a larger --ctx",
                    r->n, e->options.ctx);
    if (r->n >= room)
        return fail(err, 400,
                    "the prompt has %d tokens, all KV blocks together hold %d: start with more --memory or --kv-blocks",
                    r->n, room);
    for (int i = 0; i < r->n; i++)
        if (r->ids[i] < 0 || r->ids[i] >= e->config.text.vocab)
            return fail(err, 400, "token id %d is not in the vocabulary of %d", r->ids[i], e->config.text.vocab);
    if (r->max_tokens < 0) return fail(err, 400, "max_tokens is %d: give 1 or more, or 0 for no limit", r->max_tokens);
    if (r->n_biases > MAX_BIASES) return fail(err, 400, "%d biases, the limit is %d", r->n_biases, MAX_BIASES);
    for (int i = 0; i < r->n_biases; i++)
        if (r->biases[i].id < 0 || r->biases[i].id >= e->config.text.vocab)
            return fail(err, 400, "a bias is for token id %d, the vocabulary has %d", r->biases[i].id,
                        e->config.text.vocab);
    return true;
}

// Find each picture's run of placeholder ids.
static bool request_spans(Engine *e, const Request *r, SequenceState *s, Error *err) {
    const ImageConfig *c = &e->config.image;
    int t = 0, k = 0;
    while (t < r->n) {
        if (r->ids[t] != e->config.image_token) {
            t++;
            continue;
        }
        int n = k < r->n_images ? image_tokens(r->images[k], c) : 0, run = 0;
        while (t + run < r->n && r->ids[t + run] == e->config.image_token && run < n) run++;
        if (!n || run < n) return fail(err, 400, "the prompt's placeholders do not match its %d pictures", r->n_images);
        if (n > e->cache.slots_per_image * SLOT_ROWS)
            return fail(err, 413, "a picture takes %d tokens, the engine's limit is %d: lower its max_pixels", n,
                        e->cache.slots_per_image * SLOT_ROWS);
        Span *x = &s->spans[k];
        *x = (Span){.image = r->images[k], .first = t, .n = n, .entry = -1};
        int32_t position[3];
        position_of(e, s, t, position); // by the spans before it
        x->position = position[0];
        uint8_t salted[64];
        memcpy(salted, r->salt, 32);
        memcpy(salted + 32, x->image->key, 32);
        SHA256(salted, sizeof salted, x->key);
        s->n_spans = ++k;
        s->seq.image_tokens += n;
        t += n;
    }
    return k == r->n_images || fail(err, 400, "the prompt has placeholders for %d of its %d pictures", k, r->n_images);
}

static void sequence_free(SequenceState *s) {
    free(s->seq.ids);
    free(s->seq.sampled);
    free(s->spans);
    free(s->blocks);
    free(s->names);
    free(s->counts);
    free(s->count_of);
    free(s);
}

Sequence *engine_submit(Engine *e, const Request *r, Error *err) {
    int room = min_int(e->options.ctx, e->pool.n * KV_BLOCK);
    if (!request_check(e, r, e->pool.n * KV_BLOCK, err)) return NULL;
    SequenceState *s = xcalloc(1, sizeof *s);
    s->limit = r->max_tokens && r->max_tokens < room - r->n ? r->n + r->max_tokens : room;
    s->sampling = r->sampling;
    memcpy(s->salt, r->salt, 32);
    s->seq.n_prompt = s->seq.n_tokens = r->n;
    s->seq.ids = xcalloc(s->limit, sizeof *s->seq.ids);
    s->seq.sampled = xcalloc(s->limit - r->n, sizeof *s->seq.sampled);
    s->spans = xcalloc(r->n_images, sizeof *s->spans);
    s->blocks = xcalloc(div_up(s->limit, KV_BLOCK), sizeof *s->blocks);
    s->names = xcalloc(s->limit / KV_BLOCK, sizeof *s->names);
    if (r->n_biases || penalised(&r->sampling)) {
        s->counts = xcalloc(min_int(s->limit + r->n_biases, e->config.text.vocab), sizeof *s->counts);
        s->count_of = xcalloc(e->config.text.vocab, sizeof *s->count_of);
    }
    memcpy(s->seq.ids, r->ids, r->n * sizeof *r->ids);
    if (!request_spans(e, r, s, err)) {
        sequence_free(s);
        return NULL;
    }
    for (int i = 0; i < r->n_biases; i++) count_entry(s, r->biases[i].id)->bias = r->biases[i].bias;
    for (int i = 0; i < r->n; i++)
        if (r->ids[i] != e->config.image_token) count_token(s, r->ids[i], 0);
    s->seq.id = ++e->n_submitted;
    s->seq.t_submit = now(e->device);
    s->seq.state = s;
    waiting_push_back(e, s);
    return &s->seq;
}

void engine_cancel(Engine *e, Sequence *seq) {
    (void)e;
    if (!seq->finish) seq->state->cancelled = true;
}

void engine_release(Engine *e, Sequence *seq) {
    if (!seq) return;
    SequenceState *s = seq->state;
    if (!seq->finish && !s->running) waiting_remove(e, s);
    sequence_finish(e, s, FINISH_CANCELLED);
    sequence_free(s);
}

void engine_flush(Engine *e) {
    BlockPool *p = &e->pool;
    for (int b = 0; b < p->n; b++) {
        if (p->blocks[b].holders || !p->blocks[b].hashed) continue;
        pool_list_remove(p, b);
        pool_unhash(p, b), p->n_cached--;
        pool_list_add(p, b, true), p->n_free++;
    }
    for (ImageEntry *x = e->cache.entries; x < e->cache.entries + e->cache.n_slots; x++)
        if (x->n_rows && !x->pins && x->ready) cache_drop(&e->cache, x);
}

const StepRecord *engine_last_step(const Engine *e) { return &e->last; }

// ---------------------------------------------------------------------------------------------
// The memory plan. Sizes of the regions follow from the options and the model; the KV pool gets what is left.

// The most tokens that a picture can take: within max_pixels; or a strip, one token high, whose
// sides are in the largest ratio; or the smallest size, rounded up.
static int largest_image_tokens(const ImageConfig *c) {
    double side = c->patch * c->merge, ratio = 200;
    double area = c->max_pixels / (side * side), strip = sqrt(ratio * c->max_pixels) / side;
    double small = (sqrt(c->min_pixels / ratio) / side + 1) * (sqrt(c->min_pixels * ratio) / side + 1);
    return (int)fmax(area, fmax(strip, small));
}

static void io_layout(Engine *e) {
    Arena *a = &e->io;
    Batch *b = &e->batch;
    VisionInput *v = &e->vision;
    const ImageConfig *c = &e->config.image;
    size_t T = e->options.max_batch_tokens, B = e->options.max_seqs, tokens = largest_image_tokens(c);
    size_t P = tokens * c->merge * c->merge, width = sizeof(int32_t);
    b->ids = arena_alloc(a, T * width);
    b->image_row = arena_alloc(a, T * width);
    b->positions = arena_alloc(a, 3 * T * width);
    b->slot = arena_alloc(a, T * width);
    b->cu_seqlens = arena_alloc(a, (B + 1) * width);
    b->kv_len = arena_alloc(a, B * width);
    b->block_table = arena_alloc(a, B * e->table_stride * width);
    b->logit_row = arena_alloc(a, B * width);
    b->rows = arena_alloc(a, B * sizeof *b->rows);
    b->counts = arena_alloc(a, counts_room(e) * sizeof *b->counts);
    b->sampled = arena_alloc(a, B * sizeof *b->sampled);
    v->order = arena_alloc(a, P * width);
    v->positions = arena_alloc(a, 2 * P * width);
    v->windows = arena_alloc(a, (tokens + 1) * width);
    v->raster = arena_alloc(a, tokens * width);
    v->patches =
        arena_alloc(a, (size_t)ROW_CHUNK * 3 * c->temporal * c->patch * c->patch * dtype_bytes(e->config.type));
}

// The vision tower's part of the images region.
static void tower_layout(Engine *e, Arena *a) {
    Tower *t = &e->tower;
    const VisionConfig *v = &e->config.vision;
    size_t tokens = largest_image_tokens(&e->config.image), P = tokens * v->merge * v->merge,
           half = v->hidden / v->heads / 2;
    size_t qkv = P * 3 * v->hidden * dtype_bytes(e->config.type), merged = tokens * v->out * sizeof(float);
    t->hidden = arena_alloc(a, P * v->hidden * sizeof(float));
    t->qkv = arena_alloc(a, qkv > merged ? qkv : merged);
    t->cos = arena_alloc(a, P * half * sizeof(float));
    t->sin = arena_alloc(a, P * half * sizeof(float));
    t->windows = arena_alloc(a, (tokens + 1) * sizeof(int32_t));
    t->whole = arena_alloc(a, 2 * sizeof(int32_t));
    t->raster = arena_alloc(a, tokens * sizeof(int32_t));
}

// The worst legal step, on the null device: the largest picture through the tower, and a full batch with
// a logits row and a full list of penalties for each sequence.
static void measure_step(Engine *e) {
    const Device *device = e->device;
    Batch *b = &e->batch;
    int merge = e->config.image.merge;
    e->device = &device_null;
    null_measure(true);
    e->kv = (char *)(uintptr_t)ALIGN, e->image_rows = (float *)(uintptr_t)ALIGN; // false, as the arena's addresses are
    b->T = e->options.max_batch_tokens, b->B = b->R = e->options.max_seqs;
    tower_begin(e, NULL, merge, largest_image_tokens(&e->config.image) * merge);
    while (e->tower.phase != TOWER_IDLE) tower_unit(e, NULL, NULL);
    text_forward(e);
    null_measure(false);
    e->device = device;
}

static bool option_check(const char *name, int64_t value, int64_t low, int64_t high, Error *err) {
    if (value >= low && value <= high) return true;
    return fail(err, 400, "--%s %" PRId64 " is out of range: from %" PRId64 " to %" PRId64 " here", name, value, low,
                high);
}

// The largest max_pixels whose pictures leave room for a question in the context.
static int64_t pixels_for_context(ImageConfig c, int ctx) {
    int room = ctx - ctx / 8;
    int64_t token = c.patch * c.merge * c.patch * c.merge;
    while (c.max_pixels >= token && largest_image_tokens(&c) > room) c.max_pixels = c.max_pixels * 15 / 16;
    return c.max_pixels;
}

static bool options_fill(Engine *e, Error *err) {
    EngineOptions *o = &e->options;
    ImageConfig *c = &e->config.image;
    int longest = e->config.text.max_position;
    if (!o->ctx) o->ctx = min_int(longest, 4096);
    if (!option_check("ctx", o->ctx, min_int(longest, 64), longest, err)) return false;
    if (!o->max_seqs) o->max_seqs = 8;
    if (!option_check("max-seqs", o->max_seqs, 1, 4096, err)) return false;
    if (!o->max_batch_tokens) o->max_batch_tokens = max_int(512, o->max_seqs + 256);
    if (!option_check("max-batch-tokens", o->max_batch_tokens, o->max_seqs + 1, 1 << 16, err)) return false;
    if (!o->step_patches) o->step_patches = e->device->step_patches;
    if (!option_check("step-patches", o->step_patches, 1, 1 << 24, err)) return false;
    int64_t fits = pixels_for_context(*c, o->ctx);
    if (o->max_pixels && !option_check("max-pixels", o->max_pixels, c->min_pixels, fits, err)) return false;
    c->max_pixels = o->max_pixels = o->max_pixels ? o->max_pixels : fits;
    if (c->max_pixels < c->min_pixels)
        return fail(err, 400, "--ctx %d has no room for the smallest picture of %" PRId64 " pixels: give more", o->ctx,
                    c->min_pixels);
    if (o->kv_blocks && !option_check("kv-blocks", o->kv_blocks, 2, 1 << 24, err)) return false;
    e->table_stride = div_up(o->ctx, KV_BLOCK);
    return true;
}

size_t model_weight_bytes(const Model *m, const Device *device) {
    if (!m->file) return config_weight_bytes(&m->config);
    return device->unified ? m->file->size : align_up(m->file->size - m->file->data, ALIGN);
}

// Sizes of all regions into e. Nothing is taken yet.
static bool engine_size(Engine *e, const Config *config, size_t weight_bytes, const EngineOptions *options,
                        Error *err) {
    e->config = *config, e->options = *options, e->weight_bytes = weight_bytes;
    if (!options_fill(e, err)) return false;
    EngineOptions *o = &e->options;
    e->block_bytes = layer_kv_bytes(config) * config->text.layers;
    io_layout(e);
    Arena tower = {0};
    tower_layout(e, &tower);
    e->tower_bytes = tower.peak;
    measure_step(e);
    e->io_bytes = e->io.peak + e->device->staging, e->arena_bytes = e->arena.peak + e->device->scratch;

    size_t slot_bytes = (size_t)SLOT_ROWS * config->vision.out * sizeof(float);
    int slots_per_image = div_up(largest_image_tokens(&e->config.image), SLOT_ROWS);
    if (!o->image_cache) o->image_cache = 2 * slots_per_image * slot_bytes;
    if (o->image_cache < slots_per_image * slot_bytes)
        return fail(err, 400, "--image-cache %zu does not hold the largest picture: give %zu, or lower --max-pixels",
                    o->image_cache, slots_per_image * slot_bytes);
    if (o->image_cache / slot_bytes > MAX_SLOTS)
        return fail(err, 400, "--image-cache %zu is out of range: to %zu here", o->image_cache, MAX_SLOTS * slot_bytes);
    e->cache.n_slots = (int)(o->image_cache / slot_bytes), e->cache.slots_per_image = slots_per_image;
    e->image_bytes = align_up(e->cache.n_slots * slot_bytes, ALIGN) + e->tower_bytes;

    size_t fixed = weight_bytes + e->image_bytes + e->arena_bytes + e->io_bytes;
    if (!o->memory && !o->kv_blocks && e->device->memory) { // nine tenths of what is free there
        DeviceMemory m;
        e->device->memory(&m);
        o->memory = m.available / 10 * 9;
    }
    size_t least = fixed + align_up((o->kv_blocks ? o->kv_blocks : e->table_stride) * e->block_bytes, ALIGN);
    if (o->memory && o->memory < least)
        return fail(err, 400,
                    "--memory %zu is too small: %zu is the least for %d tokens of context (or lower --ctx, "
                    "--max-pixels, --max-batch-tokens)",
                    o->memory, least, o->ctx);
    if (!o->kv_blocks && o->memory) o->kv_blocks = (int)fmin((o->memory - fixed) / e->block_bytes, 1 << 24);
    if (!o->kv_blocks) o->kv_blocks = e->table_stride * min_int(o->max_seqs, 4);
    e->kv_bytes = align_up(o->kv_blocks * e->block_bytes, ALIGN);
    o->memory = fixed + e->kv_bytes;
    return true;
}

void engine_map(const Engine *e, MemoryMap *m) {
    const BlockPool *p = &e->pool;
    const ImageCache *c = &e->cache;
    int held = p->n - p->n_free - p->n_cached, slots_used = c->n_slots - c->n_free;
    size_t slot_bytes = (size_t)SLOT_ROWS * e->config.vision.out * sizeof(float);
    *m = (MemoryMap){
        .device = e->device->name,
        .owners =
            {
                {"weights", e->weight_bytes, e->weight_bytes, e->weight_bytes},
                {"kv", e->kv_bytes, held * e->block_bytes, p->peak_held * e->block_bytes},
                {"images", e->image_bytes, slots_used * slot_bytes + (e->tower.phase ? e->tower_bytes : 0),
                 c->peak_used * slot_bytes + (e->tower_ran ? e->tower_bytes : 0)},
                {"arena", e->arena_bytes, e->arena.used + e->device->scratch, e->arena.peak + e->device->scratch},
                {"io", e->io_bytes, e->io_bytes, e->io_bytes},
            },
        .blocks = p->n,
        .blocks_free = p->n_free,
        .blocks_cached = p->n_cached,
        .blocks_held = held,
        .slots = c->n_slots,
        .slots_used = slots_used,
        .slot_bytes = slot_bytes,
        .tower_bytes = e->tower_bytes,
        .image_hits = c->hits,
        .image_misses = c->misses,
        .image_evictions = c->evictions,
        .prefix_queries = e->prefix_queries,
        .prefix_hits = e->prefix_hits,
        .preemptions = e->n_preempted,
        .running = e->n_running,
        .waiting = e->n_waiting,
    };
    for (int i = 0; i < c->n_slots && c->entries; i++)
        if (c->entries[i].n_rows && c->entries[i].pins) m->slots_pinned += div_up(c->entries[i].n_rows, SLOT_ROWS);
    for (int i = 0; i < N_OWNERS; i++) m->total += m->owners[i].bytes;
    if (e->device->memory) e->device->memory(&m->driver);
}

// ---------------------------------------------------------------------------------------------
// Open and close

// Rope turns pair i of a head by positions[axis[i]] * theta^(-2i/size), computed in f32 as transformers does.
static void rope_setup(Engine *e) {
    const TextConfig *t = &e->config.text;
    const VisionConfig *v = &e->config.vision;
    int half = t->head_dim / 2;
    e->text_axis = xcalloc(half, sizeof(int32_t)), e->text_freq = xcalloc(half, sizeof(float));
    for (int i = 0; i < half; i++) {
        e->text_axis[i] = (i >= t->mrope_section[0]) + (i >= t->mrope_section[0] + t->mrope_section[1]);
        e->text_freq[i] = 1.0f / powf(t->rope_theta, (float)(2 * i) / t->head_dim);
    }
    half = v->hidden / v->heads / 2;
    e->vision_axis = xcalloc(half, sizeof(int32_t)), e->vision_freq = xcalloc(half, sizeof(float));
    for (int i = 0; i < half; i++) { // the first half of the pairs by row, the second by column
        e->vision_axis[i] = i >= half / 2;
        e->vision_freq[i] = 1.0f / powf(10000.0f, (float)(2 * (i % (half / 2))) / half);
    }
}

static Engine *engine_new(const Config *config, size_t weight_bytes, const Device *device, const EngineOptions *options,
                          Error *err) {
    Engine *e = xcalloc(1, sizeof *e);
    e->device = device;
    weights_bind(&e->weights, config, NULL, NULL, NULL, NULL); // places without pointers, for the measuring
    if (engine_size(e, config, weight_bytes, options, err)) return e;
    engine_close(e);
    return NULL;
}

bool engine_plan(const Config *config, size_t weight_bytes, const Device *device, const EngineOptions *options,
                 MemoryMap *map, Error *err) {
    if (device->start && !device->start(err)) return false;
    Engine *e = engine_new(config, weight_bytes, device, options, err);
    if (!e) return false;
    e->pool.n = e->pool.n_free = e->options.kv_blocks;
    e->cache.n_free = e->cache.n_slots;
    engine_map(e, map);
    engine_close(e);
    return true;
}

// The folder for the dump must be new or empty: rows are appended to the files there.
static bool dump_check(const char *path, Error *err) {
    if (mkdir(path, 0777) == 0 || rmdir(path) + mkdir(path, 0777) == 0) return true;
    return fail(err, 400, "--dump %s: the folder must be new or empty (%s)", path, strerror(errno));
}

// Take the regions: one allocation on the device, io on the host. Weights are copied unless the device reads them in
// place.
static bool engine_reserve(Engine *e, const Model *model, Error *err) {
    const Device *d = e->device;
    const ModelFile *file = model->file;
    size_t weights = d->unified ? 0 : e->weight_bytes;
    e->reserved = weights + e->kv_bytes + e->image_bytes + e->arena_bytes;
    e->base = d->reserve(e->reserved);
    if (!e->base)
        return fail(err, 500, "the %s device has no %zu bytes: lower --memory or --ctx", d->name, e->reserved);
    char *host = d->reserve_host(e->io_bytes);
    if (!host) return fail(err, 500, "the host has no %zu bytes for transfers: lower --ctx or --max-seqs", e->io_bytes);
    if (weights) d->upload(e->base, modelfile_data(file), file->size - file->data);
    weights_free(&e->weights);
    weights_bind(&e->weights, &e->config, file, weights ? e->base : NULL, NULL, err); // model_open() has bound the same
    e->kv = (char *)e->base + weights;
    e->image_rows = (float *)(e->kv + e->kv_bytes);
    e->arena = (Arena){.base = (char *)e->image_rows + e->image_bytes, .size = e->arena_bytes - d->scratch};
    e->io = (Arena){.base = host, .size = e->io_bytes - d->staging};
    io_layout(e);
    tower_layout(e, &(Arena){.base = e->arena.base - e->tower_bytes, .size = e->tower_bytes});
    return true;
}

Engine *engine_open(const Model *model, const Device *device, const EngineOptions *options, Error *err) {
    assert(model->file || device->clock); // a shape without weights can only be planned
    if (options->dump && !dump_check(options->dump, err)) return NULL;
    const Config *c = &model->config;
    if (!device->quantised && (c->text_type >= Q8 || c->embed_type >= Q8 || c->head_type >= Q8 || c->vision_type >= Q8))
        return fail(err, 400, "the %s device computes with f32 and bf16 only: export the model with --type bf16",
                    device->name),
               NULL;
    if (device->start && !device->start(err)) return NULL;
    Engine *e = engine_new(&model->config, model_weight_bytes(model, device), device, options, err);
    if (!e) return NULL;
    if (!trace_open(e, err) || !engine_reserve(e, model, err)) {
        engine_close(e);
        return NULL;
    }
    pool_open(&e->pool, e->options.kv_blocks);
    cache_open(&e->cache, e->cache.n_slots, e->cache.slots_per_image);
    rope_setup(e);
    e->running = xcalloc(e->options.max_seqs, sizeof(SequenceState *));
    if (options->explain) explain_plan(e);
    return e;
}

void engine_close(Engine *e) {
    if (!e) return;
    trace_close(e);
    if (e->base) e->device->release(e->base, e->reserved);
    if (e->io.base) e->device->release_host(e->io.base, e->io_bytes);
    weights_free(&e->weights);
    free(e->pool.blocks), free(e->pool.buckets);
    if (e->cache.entries) free(e->cache.entries[0].slots);
    free(e->cache.entries), free(e->cache.free_slots);
    free(e->text_axis), free(e->text_freq), free(e->vision_axis), free(e->vision_freq);
    free(e->running);
    free(e);
}

const EngineOptions *engine_options(const Engine *e) { return &e->options; }
const ImageConfig *engine_image_config(const Engine *e) { return &e->config.image; }

bool engine_check(const Engine *e, Error *err) {
    const BlockPool *p = &e->pool;
    int unused = 0, hashed = 0;
    for (int b = p->first; b >= 0; b = p->blocks[b].next) {
        unused++, hashed += p->blocks[b].hashed;
        if (p->blocks[b].holders)
            return fail(err, 500, "block %d is unused and has %d holders", b, p->blocks[b].holders);
    }
    if (unused != p->n_free + p->n_cached || hashed != p->n_cached)
        return fail(err, 500, "%d unused blocks, %d with content; counted are %d free, %d cached", unused, hashed,
                    p->n_free, p->n_cached);
    for (int b = 0; b < p->n; b++) {
        int holders = 0;
        int64_t one = 0; // of them, for the message
        for (int i = 0; i < e->n_running; i++)
            for (int k = 0; k < e->running[i]->n_blocks; k++)
                if (e->running[i]->blocks[k] == b) holders++, one = e->running[i]->seq.id;
        if (holders != p->blocks[b].holders)
            return fail(err, 500, "block %d counts %d holders, %d tables have it, #%" PRId64 "'s among them", b,
                        p->blocks[b].holders, holders, one);
        unused += holders > 0;
    }
    if (unused != p->n) return fail(err, 500, "%d blocks are unused or held, of %d", unused, p->n);
    int pins = 0, span_pins = 0;
    for (int i = 0; i < e->cache.n_slots; i++) pins += e->cache.entries[i].n_rows ? e->cache.entries[i].pins : 0;
    for (int i = 0; i < e->n_running; i++)
        for (int k = 0; k < e->running[i]->n_spans; k++) span_pins += e->running[i]->spans[k].entry >= 0;
    if (pins != span_pins) return fail(err, 500, "pictures have %d pins, sequences %d", pins, span_pins);
    return true;
}
