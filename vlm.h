// vlm.h: the contract between the files of vlm.c.
//
//   image.c      bytes of a picture -> upright, resized RGB -> patches
//   tokenizer.c  text <-> ids, the chat template
//   vlm.c        model file, memory plan, vision tower, language model, KV blocks, scheduler, step
//   vlm_cpu.c    the operations of the Device table in C, built for several instruction sets (vlm_cpu_pick.c)
//   request.c    OpenAI's JSON <-> prompts and answers (request.h)
//   chat.c       main(): command line and REPL
//   server.c     the HTTP server
//
// Letters used for sizes, everywhere:
//   B sequences in the step    T tokens in the step    R rows of logits    S keys (tokens in the cache)
//   L layers   C hidden size   F feed-forward size     V vocabulary
//   H query heads   H_kv key/value heads   D head size
//   P patches of a picture (each becomes a row of the vision tower; merge*merge rows become one token)
#pragma once
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus // vlm.cu
extern "C" {
#endif
#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__ // for functions that kernels call too
#else
#define HOST_DEVICE
#endif

// ---------------------------------------------------------------------------------------------
// Errors. What a request, a file or the machine does wrong is an Error that names it and the
// remedy; what the program does wrong is an assert. Functions that can fail return false or NULL
// and fill the Error. `status` is an HTTP status, so that a server can pass it on: 400 the request
// is at fault, 413 too large, 500 the machine.

typedef struct Error {
    int status;
    char message[240];
    char param[48]; // the request's field at fault; "": none
} Error;

// Fill `err` and return false, so that a function can `return fail(err, 400, ...)`.
bool fail(Error *err, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));
// The same for a field of a request, with status 400.
bool fail_at(Error *err, const char *field, const char *format, ...) __attribute__((format(printf, 3, 4)));

// A growing list of token ids. Zero-initialise; free(ids.data) ends it.
typedef struct Ids {
    int32_t *data;
    size_t n, cap;
} Ids;
void ids_push(Ids *ids, int32_t id);

// ---------------------------------------------------------------------------------------------
// The model file (vlm.c): a safetensors file with the tensors in the order and layout that the
// engine reads, and everything else as strings in its metadata. docs/format.md lists them.

// Q8 and Q4 are for matrices only: whole numbers of 8 or 4 bits with one scale for each group of 64 along a row, laid
// out in tiles of 16 rows for the products (docs/format.md). What is computed from them is BF16.
typedef enum Dtype { F32, BF16, Q8, Q4 } Dtype;
typedef uint16_t bf16; // the upper half of a float

enum { Q_ROWS = 16, Q_GROUP = 64 }; // rows of a tile, columns of a group

const char *dtype_name(Dtype type);                          // "f32", "bf16", "q8", "q4"
bool dtype_find(const char *name, Dtype *type);              // false: no such name
size_t dtype_bytes(Dtype type);                              // of an F32 or a BF16
size_t tile_bytes(Dtype type, int64_t cols);                 // of a Q8 or Q4 tile: 16 rows
size_t pair_bytes(Dtype type);                               // of its part for two groups: scales, then numbers
size_t matrix_bytes(Dtype type, int64_t rows, int64_t cols); // of any type
static inline Dtype compute_type(Dtype matrix) { return matrix == F32 ? F32 : BF16; }

typedef struct ModelFile ModelFile;

// Map `path` and check its header as hostile input: bounds, overlaps, sizes, version.
ModelFile *modelfile_open(const char *path, Error *err);
void modelfile_close(ModelFile *file);
size_t modelfile_bytes(const ModelFile *file);
// The metadata string `key`, or NULL. Owned by the file.
const char *modelfile_text(const ModelFile *file, const char *key);
// The data of tensor `name`, which must have the safetensors dtype `dtype` ("F32", "BF16", "I32",
// "U8") and the `rank` dimensions given; a dimension of -1 takes any size and is written back.
// Owned by the file, aligned to 64 bytes. NULL and an Error otherwise.
const void *modelfile_tensor(const ModelFile *file, const char *name, const char *dtype, int rank, int64_t *dims,
                             Error *err);

// ---------------------------------------------------------------------------------------------
// Tokenizer (tokenizer.c): byte-level BPE exactly as Hugging Face `tokenizers` does it for
// Qwen2.5. Immutable after opening, so any number of threads may share one.

typedef struct Tokenizer Tokenizer;

// Tables come from the model file and stay there. The template pieces and special tokens too.
Tokenizer *tokenizer_open(const ModelFile *file, Error *err);
void tokenizer_close(Tokenizer *tok);
int tokenizer_vocab(const Tokenizer *tok);
// The template's default system message; "" if it has none.
const char *tokenizer_default_system(const Tokenizer *tok);
// Append the ids of `n` bytes of text. What looks like a special token in it is plain text.
// Fails (400) on invalid UTF-8, naming the byte, and (413) over 1 GiB; `out` is then as it was. Time is O(n log n).
bool tokenizer_encode(const Tokenizer *tok, const char *text, size_t n, Ids *out, Error *err);
// The bytes of one token, not terminated; a special token gives its name. NULL for an id outside the vocabulary.
const char *tokenizer_bytes(const Tokenizer *tok, int32_t id, size_t *n);
bool tokenizer_is_special(const Tokenizer *tok, int32_t id);

// Incremental decoding: bytes wait here until they make whole UTF-8 characters.
typedef struct TextStream {
    char held[4];
    int n;
} TextStream;
// Bytes that `stream_push` may write for one token of `tok`.
size_t stream_room(const Tokenizer *tok);
// Add a token; write the characters that are now whole to `out`, return their bytes. Special tokens
// write nothing. Bytes that can be no UTF-8 become U+FFFD, as Python's errors="replace" does.
size_t stream_push(TextStream *stream, const Tokenizer *tok, int32_t id, char *out);
// End of the text: a cut character becomes U+FFFD. Room: 3 bytes.
size_t stream_end(TextStream *stream, char *out);

// ---------------------------------------------------------------------------------------------
// Pictures (image.c)

// What the preprocessor of the checkpoint says, and our own bounds.
typedef struct ImageConfig {
    int patch, merge, temporal;     // 14, 2, 2: patch side, patches per side of a token, frames per patch
    int64_t min_pixels, max_pixels; // of the resized picture
    float mean[3], std[3];          // of RGB in 0..1
    uint8_t background[3];          // what shows through transparent pixels
    int64_t max_source_pixels;      // width * height of a file, checked in its header before decoding
} ImageConfig;

// Decoding works in memory of a fixed size, given by the caller, so that no file can take more.
// Not shared between threads.
typedef struct Workspace {
    uint8_t *base;
    size_t size, used, peak;
} Workspace;

// A picture ready for the vision tower. Owns `pixels`.
typedef struct Image {
    uint8_t *pixels;                       // (height, width, 3); NULL: a shape, for the null device
    int width, height;                     // resized: multiples of patch * merge
    int source_width, source_height;       // as in the file, upright
    uint8_t key[32];                       // SHA-256 over pixels, shape and settings: equal keys, equal pictures
    double decode_seconds, resize_seconds; // file -> upright RGB; RGB -> pixels and key
    size_t decode_bytes;                   // of the workspace, at most
} Image;

// Rows, columns of patches and their product.
static inline int image_rows(const Image *im, const ImageConfig *c) { return im->height / c->patch; }
static inline int image_cols(const Image *im, const ImageConfig *c) { return im->width / c->patch; }
static inline int image_patches(const Image *im, const ImageConfig *c) { return image_rows(im, c) * image_cols(im, c); }
// Tokens of the language model that the picture takes.
static inline int image_tokens(const Image *im, const ImageConfig *c) {
    return image_patches(im, c) / (c->merge * c->merge);
}

// Size in pixels that a picture is resized to: `smart_resize` of transformers'
// image_processing_qwen2_vl.py, with Python's rounding (half to even). Fails (400) when the sides'
// ratio is over 200 or a side is 0.
bool image_fit(const ImageConfig *config, int height, int width, int *out_height, int *out_width, Error *err);
// Bytes of workspace that any file within config->max_source_pixels can need.
size_t image_workspace(const ImageConfig *config);
// JPEG, PNG, GIF (first frame) or BMP by magic bytes -> upright, on the background, resized as
// Pillow's bicubic does it. Errors: 400 for what is no such picture, 413 over a limit; fixed texts,
// nothing of the decoder's. On success image_free() ends the picture.
bool image_load(const ImageConfig *config, Workspace *work, const void *bytes, size_t n, Image *out, Error *err);
// The sizes of it only, with the same errors but for damage that decoding alone finds. Takes microseconds to
// milliseconds and no memory; out->pixels stays NULL.
bool image_probe(const ImageConfig *config, const void *bytes, size_t n, Image *out, Error *err);
void image_free(Image *image);
// Rows of patches for the vision tower, normalised: row i is patch order[i] (NULL: i), counted in merge order
// (groups of merge x merge patches row by row, inside a group row by row); a row is (channel,
// temporal, patch, patch), the frame repeated `temporal` times, as transformers lays it out.
void image_fill_patches(const Image *image, const ImageConfig *config, const int32_t *order, int n, Dtype type,
                        void *out); // (n, 3 * temporal * patch * patch)

// ---------------------------------------------------------------------------------------------
// Chat template (tokenizer.c): a conversation as ids, with a run of image_token ids per picture
// that only this code can place.

typedef struct Part {
    const char *text; // NULL for a picture
    size_t n;         // bytes of text
    const Image *image;
    bool markup; // the text is a tag of the template, "<tool_call>": one id where the vocabulary has it as one
} Part;

typedef struct Prompt {
    Ids ids;
    const Image **images; // borrowed, in order of their runs in ids
    int n_images, cap_images;
    bool started;
} Prompt;

// Append one message. The first one, unless its role is "system", is preceded by the template's
// default system message. Fails (400) on invalid UTF-8 or an unknown role, and leaves the prompt as it was.
bool prompt_add(Prompt *prompt, const Tokenizer *tok, const ImageConfig *config, const char *role, const Part *parts,
                int n_parts, Error *err);
// Open the assistant's turn: the model writes from here.
void prompt_open_reply(Prompt *prompt, const Tokenizer *tok);
// Begin the open turn in the model's place, so that it goes on from there.
bool prompt_begin_reply(Prompt *prompt, const Tokenizer *tok, const Part *parts, int n_parts, Error *err);
// Append what the model wrote and close its turn (a special id at its end, such as the end of turn, gives way to the
// template's own), so that the next turn's ids continue these and the KV of them can be used again.
void prompt_close_reply(Prompt *prompt, const Tokenizer *tok, const int32_t *ids, size_t n);
void prompt_free(Prompt *prompt);

// ---------------------------------------------------------------------------------------------
// The model (vlm.c)

typedef struct TextConfig {
    int layers, hidden, ff, heads, kv_heads, head_dim, vocab, max_position;
    float eps, rope_theta;
    int mrope_section[3]; // frequencies turned by time, row, column; their sum is head_dim / 2
    bool tied;            // the output head is the embedding
} TextConfig;

typedef struct VisionConfig {
    int layers, hidden, ff, heads, out, patch, merge, temporal, window; // window: pixels a side
    uint64_t full_layers[2];                                            // bit i: layer i attends to the whole picture
} VisionConfig;

typedef struct Config {
    Dtype type;                                          // of activations that feed a product, and KV: F32 or BF16
    Dtype text_type, embed_type, head_type, vision_type; // of the matrices: all F32, or none
    TextConfig text;
    VisionConfig vision;
    ImageConfig image;
    int32_t image_token; // the id that stands for a picture's rows
    int32_t eos[8];      // ids that end an answer
    int n_eos;
} Config;

// Weights point into the model file. Norms and biases are f32 in every file: they are small, and
// exact from bf16. Products are y = x W^T, so a weight is (outputs, inputs), rows contiguous (or in tiles: Q8, Q4).
typedef struct VisionLayer {
    const float *norm1;        // (C)
    const void *qkv;           // (3C, C)
    const float *qkv_bias;     // (3C)
    const void *proj;          // (C, C)
    const float *proj_bias;    // (C)
    const float *norm2;        // (C)
    const void *gate_up;       // (2F, C): gate's rows, then up's
    const float *gate_up_bias; // (2F)
    const void *down;          // (C, F)
    const float *down_bias;    // (C)
} VisionLayer;

typedef struct TextLayer {
    const float *norm1;    // (C)
    const void *qkv;       // ((H + 2 H_kv) D, C)
    const float *qkv_bias; // ((H + 2 H_kv) D)
    const void *out;       // (C, H D)
    const float *norm2;    // (C)
    const void *gate_up;   // (2F, C)
    const void *down;      // (C, F)
} TextLayer;

typedef struct Weights {
    const void *patch_embed;  // (C, 3 temporal patch patch)
    VisionLayer *vision;      // (vision layers)
    const float *merger_norm; // (C)
    const void *merger_up;    // (merge^2 C, merge^2 C)
    const float *merger_up_bias;
    const void *merger_down; // (text C, merge^2 C)
    const float *merger_down_bias;
    const void *embed; // (V, C)
    TextLayer *text;   // (text layers)
    const float *norm; // (C)
    const void *head;  // (V, C); == embed when tied
} Weights;

typedef struct Model {
    ModelFile *file; // owns what the weights point to
    Config config;
    Weights weights;
    Tokenizer *tokenizer;
} Model;

Model *model_open(const char *path, Error *err);
// A shape without weights and tokenizer: for the null device only.
Model *model_shape(const Config *config);
// The same with random weights, in memory: they cost what true ones cost, and what comes out means nothing.
Model *model_random(const Config *config, Error *err);
void model_close(Model *model);
// The Config of a published shape ("qwen2.5-vl-3b", "-7b", "-32b", "-72b"). No weights; their type is BF16.
bool config_shape(const char *name, Config *config, Error *err);
// Let the matrices be what weights_export.py --type makes of them: Q8 and Q4 leave the vision tower in BF16, and Q4 has
// embedding and head in Q8.
void config_retype(Config *config, Dtype type);
// Bytes that the weights of `config` take in a model file.
size_t config_weight_bytes(const Config *config);

// ---------------------------------------------------------------------------------------------
// Sampling

enum { MAX_LOGPROBS = 20, MAX_BIASES = 1024 };

typedef struct Sampling {
    float temperature;                         // 0: the most likely token, the lowest id among equals
    float top_p;                               // 1: off
    float min_p;                               // 0: off
    float repetition_penalty;                  // 1: off; counts prompt and output, pictures' rows excluded
    float presence_penalty, frequency_penalty; // 0: off; count the output only
    int32_t top_k;                             // 0: off
    int32_t logprobs;                          // how many alternatives to report, 0..MAX_LOGPROBS
    uint64_t seed;
} Sampling;

// A token whose logit is changed: penalised because it is in the prompt (seen) or was written `count` times, and moved
// by `bias`.
typedef struct TokenCount {
    int32_t id, count;
    bool seen; // in the prompt or the answer
    float bias;
} TokenCount;

// One row of logits to sample from.
typedef struct SampleRow {
    Sampling how;
    uint64_t step;    // how many tokens the sequence has written: the random numbers depend on (seed, step, id) only
    int32_t first, n; // the sequence's part of the array of TokenCounts, each id once; n 0: no penalties
} SampleRow;

typedef struct Sampled {
    int32_t id;
    float logprob; // raw: log softmax of the logits as the model gave them, before penalties and temperature
    int32_t top_id[MAX_LOGPROBS];    // -1 past what the row asks for
    float top_logprob[MAX_LOGPROBS]; // falling; the lowest id first among equals
} Sampled;

// ---------------------------------------------------------------------------------------------
// The Device: what a port fills in. Operations take pointers and sizes only, never a Config, a
// Sequence or a layer number. All pointers are the device's, rows are contiguous unless a stride is
// named, and nothing aliases unless it says so. `type` is the compute type: F32 or BF16 for
// operands and KV; sums, norms, softmax and the residual stream are f32. Results round to nearest even.
//
// The one rule of arithmetic: the order in which the terms of an output element are added depends
// only on the model's sizes (C, F, D, ...) and, for attention, on key positions; never on T, B, P or
// how rows are split over threads. Then the same request gives the same bytes in any company.
// test/ops checks every operation against double-precision loops, and this rule with ==.

enum { KV_BLOCK = 16 }; // tokens a KV block holds

// A device's own memory, as its driver reports it: total == available + context + slack + what reserve() was asked for,
// unless other programs have taken some since.
typedef struct DeviceMemory {
    size_t total, available;
    size_t context; // in use when this program had reserved nothing: the driver's context, our code, other programs
    size_t slack;   // what reserve() took over what it was asked for: the driver gives whole pages
} DeviceMemory;

typedef struct Device {
    const char *name;

    bool unified;   // its memory is the host's: weights are read in place, from the map of the model file
    bool quantised; // its embed and linear know Q8 and Q4

    int step_patches;      // patches through the vision tower that take it some tens of milliseconds: a step's share by
                           // default
    double (*clock)(void); // seconds; NULL: the host's monotonic clock

    // Begin to use it; false, and why, where the machine has none. NULL: it is always there.
    bool (*start)(Error *err);
    // NULL: it has no memory of its own.
    void (*memory)(DeviceMemory *memory);

    // The one allocation, aligned to 256 bytes, and the host's end of transfers (page-locked where that helps), one of
    // each at a time. NULL: no such memory. And their ends. Operations may use the last `scratch` bytes of the first
    // for results in between, and uploads may pass through the last `staging` bytes of the second: whoever reserves
    // asks for so much more.
    size_t scratch, staging;
    void *(*reserve)(size_t bytes);
    void *(*reserve_host)(size_t bytes);
    void (*release)(void *base, size_t bytes);
    void (*release_host)(void *base, size_t bytes);
    // Host to device, device to host; complete on return. Between host buffers and the reserved memory only.
    void (*upload)(void *dst, const void *src, size_t bytes);
    void (*download)(void *dst, const void *src, size_t bytes);

    // out[t] = table[ids[t]] as f32; ids[t] < 0: the row is left as it is.
    void (*embed)(float *out,                    // (T, C)
                  const void *table, Dtype type, // (V, C)
                  const int32_t *ids, int T, int C);

    // dst[i] = src[index[i]]; index[i] < 0: the row is left as it is. Window order, pictures' rows into text, logits'
    // rows.
    void (*gather_rows)(void *dst, const void *src, const int32_t *index, int n, size_t row_bytes);

    // out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight
    void (*rmsnorm)(void *out, Dtype type, // (T, C)
                    const float *x,        // (T, C)
                    const float *weight, float eps, int T, int C);

    // out = x w^T + bias, or out += when `accumulate` (then out is F32: the residual stream). The
    // patch embedding is one too: a convolution whose stride is its kernel. `type` is w's; x is F32 where w is, else
    // BF16. With Q8 and Q4 a device may round x, too, to 8 bits with a scale for each group of 64.
    void (*linear)(void *out, Dtype out_type,                // (T, N)
                   const void *x, const void *w, Dtype type, // (T, K), (N, K)
                   const float *bias,                        // (N) or NULL
                   int T, int N, int K, bool accumulate);

    // cos[t][i], sin[t][i] of positions[t][axis[i]] * freq[i]. Made once a step for all layers; 1D, 2D and
    // multi-section rope differ in `axis` only.
    void (*rope_table)(float *cos, float *sin,                 // (T, half)
                       const int32_t *positions, int axes,     // (T, axes)
                       const int32_t *axis, const float *freq, // (half)
                       int T, int half);

    // In place, each head of each row: (a, b) -> (a cos - b sin, b cos + a sin) with a = x[i], b = x[i + D/2].
    void (*rope)(void *x, Dtype type, int stride,    // T rows of `heads` heads of D, `stride` elements apart
                 const float *cos, const float *sin, // (T, D/2)
                 int T, int heads, int D);

    // Put the keys and values of T tokens into the cache: token t goes to place slot[t] % KV_BLOCK of block slot[t] /
    // KV_BLOCK. `kv` is the layer's part of block 0, blocks are `block_bytes` apart, and the layout of the 2 * KV_BLOCK
    // * H_kv * D elements inside is the device's own.
    void (*kv_store)(void *kv, size_t block_bytes, Dtype type, const void *k, const void *v,
                     int stride, // T rows of H_kv heads of D, `stride` elements apart
                     const int32_t *slot, int T, int H_kv, int D);

    // Causal attention of each token to the cache of its sequence. Sequence b has rows cu_seqlens[b] .. cu_seqlens[b+1]
    // of q, which are the last of its kv_len[b] tokens; the block that holds its tokens 16 i .. 16 i + 15 is
    // block_table[b * table_stride + i]. Query head h reads key head h / (H / H_kv). Scores are scaled by 1/sqrt(D).
    // window > 0: a token sees the last `window` tokens only, itself included.
    void (*attention_paged)(void *out, Dtype type,     // (T, H, D)
                            const void *q, int stride, // T rows of H heads of D, `stride` elements apart
                            const void *kv, size_t block_bytes, const int32_t *block_table, int table_stride,
                            const int32_t *cu_seqlens, const int32_t *kv_len, int B, int H, int H_kv, int D,
                            int window);

    // Bidirectional attention inside each segment cu_seqlens[i] .. cu_seqlens[i+1] of rows, scaled by 1/sqrt(D):
    // windows, or the whole picture. Only rows first .. first + n ask; the segments of all of them are in qkv.
    void (*attention_segments)(void *out, Dtype type, // (n, H, D)
                               const void *qkv,       // (P, 3, H, D)
                               const int32_t *cu_seqlens, int segments, int first, int n, int H, int D);

    // out = silu(gate) * up
    void (*glu)(void *out, const void *gate_up, Dtype type, // (T, F), (T, 2F): gate, then up
                int T, int F);

    // In place: x = x/2 (1 + erf(x / sqrt 2))
    void (*gelu)(void *x, Dtype type, size_t n);

    // Log-probabilities from the logits as they are; then penalties and biases, temperature, top-k, top-p, min-p in
    // this order; then a draw: with u(seed, step, id) in (0, 1), the id whose weight / -log(u) is largest. A row's
    // result depends on its own logits and SampleRow only.
    void (*sample)(Sampled *out, const float *logits, // (R), (R, V)
                   float *work,                       // (R, V): overwritten
                   const SampleRow *rows, const TokenCount *counts, int R, int V);
} Device;

extern Device device_cpu;        // vlm_cpu.c: the build for this processor, from before main() on
extern const Device device_cuda; // vlm.cu, in builds with CUDA
extern const Device device_null; // vlm_null.c

// The null device computes nothing: its operations count bytes and flops and advance its clock by a roofline, so that
// the engine runs true shapes at full scale without weights. All tokens that it samples are 0.
typedef struct Roofline {
    const char *name;
    double peak_bandwidth, peak_flops; // the machine's: bytes and bf16 operations a second
    double bandwidth, flops;           // what kernels reach of them
    double launch;                     // seconds that each operation takes at least
} Roofline;
// The preset "h100", "h200" or "rtx4090"; false for another name.
bool null_preset(const char *name, Roofline *roofline);
void null_use(const Roofline *roofline);
// What all its operations so far have counted: bytes that must move, twice the multiply-adds of products and attention.
void null_work(double *bytes, double *flops);
// While true, addresses are false and nothing behind them is read: for the memory plan.
void null_measure(bool measuring);

// The uniform number of (seed, step, id), in (0, 1): the same on every device.
HOST_DEVICE static inline float sample_uniform(uint64_t seed, uint64_t step, uint32_t id) {
    uint64_t x = seed + 0x9e3779b97f4a7c15u * (step + 1); // splitmix64's increment and finaliser, twice
    for (int round = 0; round < 2; round++) {
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        x ^= x >> 31;
        if (round == 0) x += 0x9e3779b97f4a7c15u * ((uint64_t)id + 1);
    }
    return ((float)(x >> 41) + 0.5f) * 0x1p-23f;
}

// ---------------------------------------------------------------------------------------------
// The engine (vlm.c): requests in, tokens out, one step at a time. One thread owns an Engine.

typedef struct EngineOptions { // 0 takes the default
    int ctx;                   // most tokens a sequence may have, prompt and answer
    int max_batch_tokens;      // tokens a step computes at most; over max_seqs
    int max_seqs;              // sequences that run together
    int step_patches;          // picture work of a step: as many patches through the tower, or a unit more
    int64_t max_pixels;        // of a resized picture; at most the model's
    size_t memory;             // bytes for everything; the KV pool gets what the rest leaves
    size_t image_cache;        // bytes of picture rows kept
    int kv_blocks;             // overrides what memory leaves
    bool explain;              // one line per step on stderr
    const char *dump;          // a folder for every named intermediate as .npy, or NULL
    const char *trace;         // a file for a Chrome trace, or NULL
} EngineOptions;

typedef enum Finish { FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_CANCELLED } Finish;

typedef struct Request {
    const int32_t *ids; // the prompt: copied
    int n;
    const Image *const *images; // in the order of their runs in ids; borrowed until engine_release()
    int n_images;
    Sampling sampling;
    int max_tokens;           // 0: up to the context's end
    const TokenCount *biases; // id and bias of tokens to favour or avoid, each id once: copied
    int n_biases;             // at most MAX_BIASES
    uint8_t salt[32];         // requests with different salts share no cache
} Request;

// A request in the engine. Read by the caller between steps; freed by engine_release().
typedef struct Sequence {
    int64_t id;             // 1, 2, ... in the order of submission
    int n_prompt, n_tokens; // ids[0 .. n_prompt) were given, the rest written
    int32_t *ids;
    Sampled *sampled; // one per token written
    Finish finish;
    int image_tokens;            // of the prompt
    int cached_tokens;           // of the prompt: found in the prefix cache when it was first admitted
    int vision_runs, image_hits; // pictures run through the tower; found in the image cache
    double t_submit, t_admit, t_first,
        t_last; // seconds, CLOCK_MONOTONIC: submission, admission, first and latest token
    double vision_seconds;
    struct SequenceState *state; // the scheduler's
} Sequence;

typedef struct Engine Engine;

// Plan the memory, take it, and be ready. Fails when `memory` is too small, with the smallest that works.
Engine *engine_open(const Model *model, const Device *device, const EngineOptions *options, Error *err);
void engine_close(Engine *engine);
// Check that the request can be served and queue it. Fails (400) with the figures when it never fits.
Sequence *engine_submit(Engine *engine, const Request *request, Error *err);
// One step: some picture work, some prefill, a token for each sequence that decodes. False: nothing to do.
bool engine_step(Engine *engine);
// Stop a sequence; it ends with FINISH_CANCELLED before the next step does any work.
void engine_cancel(Engine *engine, Sequence *seq);
// Forget a sequence, finished or not. Its cached prefix stays.
void engine_release(Engine *engine, Sequence *seq);
// Forget cached prefixes and pictures that no sequence is using.
void engine_flush(Engine *engine);

// What the latest step did.
typedef struct StepRecord {
    int64_t n;             // 1, 2, ...; 0: there was none
    double start, seconds; // by the device's clock
    int decode, prefill;   // tokens
    int patches;           // picture work: that of so many patches through the whole tower
    int running, waiting, blocks_held, blocks_cached, slots_used; // after it
} StepRecord;
const StepRecord *engine_last_step(const Engine *engine);
const EngineOptions *engine_options(const Engine *engine); // with the defaults filled in
// How pictures must be loaded for this engine: the model's settings under the engine's limits.
const ImageConfig *engine_image_config(const Engine *engine);
// The block pool's and caches' invariants, for tests: free + cached + held == total, every held block is in the
// tables of as many sequences as it counts holders. False and the first violation otherwise.
bool engine_check(const Engine *engine, Error *err);

// Who owns which bytes.
typedef struct Owner {
    const char *name;
    size_t bytes, used, peak;
} Owner;
enum { OWNER_WEIGHTS, OWNER_KV, OWNER_IMAGES, OWNER_ARENA, OWNER_IO, N_OWNERS };

typedef struct MemoryMap {
    const char *device;
    size_t total;        // == sum of owners' bytes
    DeviceMemory driver; // what the device's driver reports, where it has one: all owners but io are in its memory
    Owner owners[N_OWNERS];
    int blocks, blocks_free, blocks_cached, blocks_held; // free + cached + held == blocks
    int slots, slots_used, slots_pinned;                 // of picture rows
    size_t slot_bytes, tower_bytes;                      // images == slots * slot_bytes + tower_bytes, rounded up
    int64_t image_hits, image_misses, image_evictions;
    int64_t prefix_queries, prefix_hits; // tokens of prompts admitted; those of them that the prefix cache had
    int64_t preemptions;
    int running, waiting;
} MemoryMap;
void engine_map(const Engine *engine, MemoryMap *map);
// Bytes that a model takes on a device: of the whole file where it is read in place, else of its tensors.
size_t model_weight_bytes(const Model *model, const Device *device);
// The same plan without a model file: what engine_open() would take. weight_bytes: model_weight_bytes(), or of a shape
// config_weight_bytes().
bool engine_plan(const Config *config, size_t weight_bytes, const Device *device, const EngineOptions *options,
                 MemoryMap *map, Error *err);

// ---------------------------------------------------------------------------------------------
// Speed (bench.c)

// Measure stages against the machine's limits and print what came of it. `stages` is a list such as
// "vision=448,prefill=512,decode=8": a picture of so many pixels a side, a prompt of so many tokens, so many sequences
// writing together; NULL: the usual ones. Each is timed `repeat` times. The limits of the CPU are measured, another
// device's are `roofline`'s peaks, or not known (NULL). With `profile` each operation is timed as well.
typedef struct BenchOptions {
    const char *stages;
    int repeat;
    bool profile, json;
    const Roofline *roofline;
} BenchOptions;
bool bench_stages(const Model *model, const Device *device, const EngineOptions *options, const BenchOptions *bench,
                  Error *err);

// Serve a load and print what came of it. `load` is "images=WxH,concurrency=N,requests=N,prompt=N,output=N": requests
// one after another in each of N places, each with a new picture (or none without images=) and a prompt of new tokens.
bool bench_load(const Model *model, const Device *device, const EngineOptions *options, const char *load, bool json,
                Error *err);

#ifdef __cplusplus
}
#endif
