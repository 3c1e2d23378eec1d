// What a unit of 16 rows, 16 outputs and 256 columns takes on Intel's tiles, part by part: for
// tile_limits.py, compiled where it runs. No result is of use.
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ROWS = 16, LANES = 16, TILE = 1024, BANDS = 16, BLOCKS = 24, SLABS = 6 };
enum { GROUPS = 8, SUMS = GROUPS * ROWS * 3 * 4, BAND = 8 * TILE + SUMS };
enum { OUT_STRIDE = BLOCKS * LANES + LANES };
enum { WEIGHTS = 0, SCALES = 32 * TILE, DOTS = 48 * TILE, TILES = 1 << 20, OUT = 4 << 20 };
enum { ROOM = 8 << 20, HUGE = 2 << 20 };

// Parts of a unit, each beside those before it.
enum { LOADS = 1, STORES = 2, TOTALS = 4, MINIMA = 8, FAR_ROWS = 16, FAR_SUMS = 32 };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((packed)) TileConfig;

#define ISA "avx512f,avx512bw,amx-tile,amx-int8,amx-bf16"
#define INLINE static inline __attribute__((always_inline, target(ISA)))
#define LOAD(tile, from) asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(64L))
#define STREAM(tile, from) asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(64L))
#define STORE(tile, to)                                                                            \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(64L) : "memory")
#define CLEAR(tile) asm volatile("tilezero %tmm" #tile)
#define BYTES(sum, x, w) asm volatile("tdpbsud %tmm" #w ", %tmm" #x ", %tmm" #sum)
#define FLOATS(sum, x, w) asm volatile("tdpbf16ps %tmm" #w ", %tmm" #x ", %tmm" #sum)

// Huge pages, kept until the process ends.
static uint8_t *huge_pages(size_t bytes) {
    uint8_t *all = mmap(NULL, bytes + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                        -1, 0);
    if (all == MAP_FAILED) {
        abort();
    }
    madvise(all, bytes + HUGE, MADV_HUGEPAGE);
    return (uint8_t *)(((uintptr_t)all + HUGE - 1) / HUGE * HUGE);
}

// Random numbers: tiles take longer for them than for zeros.
static uint8_t *room(void) {
    static uint8_t *first;
    if (!first) {
        uint8_t *start = huge_pages(ROOM);
        uint32_t state = 1;
        for (size_t i = 0; i < ROOM; ++i) {
            state = state * 1664525 + 1013904223;
            start[i] = state >> 24;
        }
        // As bf16 or fp32 all of them are between 2^-3 and 2^2.
        for (size_t i = 1; i < ROOM; i += 2) {
            start[i] = 0x3e | (start[i] & 0x81);
        }
        memset(start + OUT, 0, ROOM - OUT);
        first = start;
    }
    return first;
}

static int may_use_tiles(void) {
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

__attribute__((target(ISA))) static void configure(void) {
    TileConfig config = {.palette = 1};
    for (int i = 0; i < 8; ++i) {
        config.row_bytes[i] = 64;
        config.rows[i] = 16;
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
}

// Four rows of a unit whose groups have integer scales and minima.
INLINE void add_rows(int parts, const uint8_t *dots, const float *x, const float *scales,
                     float *out, int first) {
    __m512 totals[4], minima[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const uint8_t *own = dots + (first + i) * 64;
        const __m512i low = _mm512_add_epi32(
            _mm512_slli_epi32(_mm512_load_si512(own + TILE), 8), _mm512_load_si512(own));
        const __m512i high =
            _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(own + 3 * TILE), 8),
                             _mm512_load_si512(own + 2 * TILE));
        totals[i] = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 3), low));
        minima[i] = _mm512_setzero_ps();
    }
    if (parts & MINIMA) {
#pragma GCC unroll 8
        for (int g = 0; g < GROUPS; ++g) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const __m512 sum = _mm512_set1_ps(x[(g * ROWS + first + i) * 3 + 1]);
                minima[i] = _mm512_fmadd_ps(_mm512_load_ps(scales + g * LANES), sum, minima[i]);
            }
        }
    }
    const __m512 scale = _mm512_load_ps(scales + GROUPS * LANES);
    const __m512 minimum = _mm512_load_ps(scales + (GROUPS + 1) * LANES);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        float *to = out + (first + i) * OUT_STRIDE;
        const __m512 own = _mm512_mul_ps(scale, _mm512_set1_ps(x[(first + i) * 3]));
        __m512 total = _mm512_fmadd_ps(totals[i], own, _mm512_loadu_ps(to));
        if (parts & MINIMA) {
            total = _mm512_fmadd_ps(minima[i], minimum, total);
        }
        _mm512_storeu_ps(to, total);
    }
}

// Q4_K: two bytes of activations by two of weights, whose sums stay in four tiles for 256 columns.
INLINE void q4_k(int parts) {
    uint8_t *const all = room();
    const uint8_t *const weights = all + WEIGHTS;
    for (int unit = 0; unit < SLABS * BLOCKS * BANDS; ++unit) {
        const int band = unit % BANDS, block = unit / BANDS % BLOCKS;
        const int slab = unit / BANDS / BLOCKS;
        const int place = parts & FAR_ROWS ? slab * BANDS + band : 0;
        const uint8_t *const x = all + TILES + place * BAND;
        float *const out = (float *)(all + OUT) +
                           (parts & FAR_SUMS ? band * ROWS * OUT_STRIDE + block * LANES : 0);
        // Of the unit before, whose sums leave the tiles now; of that before it.
        uint8_t *const now = all + DOTS + (unit % 2) * 6 * TILE;
        const uint8_t *const before = all + DOTS + (1 - unit % 2) * 6 * TILE;
#pragma GCC unroll 4
        for (int quarter = 0; quarter < 4; ++quarter) {
            if (parts & LOADS) {
                LOAD(6, weights + quarter * 2 * TILE);
                if (parts & FAR_ROWS) {
                    STREAM(4, x + quarter * 2 * TILE);
                    STREAM(5, x + quarter * 2 * TILE + TILE);
                } else {
                    LOAD(4, x + quarter * 2 * TILE);
                    LOAD(5, x + quarter * 2 * TILE + TILE);
                }
                LOAD(7, weights + quarter * 2 * TILE + TILE);
            }
            if ((parts & STORES) && quarter == 0) {
                STORE(0, now);
                CLEAR(0);
                BYTES(0, 5, 6);
                STORE(1, now + TILE);
                CLEAR(1);
                BYTES(1, 4, 6);
                STORE(3, now + 3 * TILE);
                CLEAR(3);
                BYTES(3, 4, 7);
                STORE(2, now + 2 * TILE);
                CLEAR(2);
                BYTES(2, 5, 7);
            } else {
                BYTES(0, 5, 6);
                BYTES(1, 4, 6);
                BYTES(3, 4, 7);
                BYTES(2, 5, 7);
            }
            if (parts & TOTALS) {
                add_rows(parts, before, (const float *)(x + 8 * TILE),
                         (const float *)(all + SCALES), out, quarter * 4);
            }
        }
    }
}

// int8 by int8, where each group of 32 columns has a scale: its sums leave the tile.
INLINE void int8_group(int parts, const uint8_t *x, const uint8_t *weights, uint8_t *now,
                       const uint8_t *before, const float *scales, __m512 *totals, int own) {
    if (parts & LOADS) {
        if (own) {
            LOAD(5, x);
            LOAD(7, weights);
        } else {
            LOAD(4, x);
            LOAD(6, weights);
        }
    }
    // The other tile has the sums of the group before.
    if (own) {
        CLEAR(1);
        BYTES(1, 5, 7);
    } else {
        CLEAR(0);
        BYTES(0, 4, 6);
    }
    if (parts & STORES) {
        if (own) {
            STORE(0, now);
        } else {
            STORE(1, now);
        }
    }
    if (parts & TOTALS) {
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; ++m) {
            const __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(before + m * 64));
            const __m512 scale = _mm512_mul_ps(_mm512_load_ps(scales), _mm512_set1_ps(scales[m]));
            totals[m] = _mm512_fmadd_ps(dot, scale, totals[m]);
        }
    }
}

INLINE void int8(int parts) {
    uint8_t *const all = room();
    for (int unit = 0; unit < SLABS * BLOCKS * BANDS; ++unit) {
        const int band = unit % BANDS, slab = unit / BANDS / BLOCKS;
        const int place = parts & FAR_ROWS ? slab * BANDS + band : 0;
        const uint8_t *const x = all + TILES + place * BAND;
        float *const out =
            (float *)(all + OUT) + (parts & FAR_SUMS ? band * ROWS * OUT_STRIDE : 0);
        const float *scales = (const float *)(all + SCALES);
        uint8_t *const dots = all + DOTS;
        __m512 totals[ROWS];
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; ++m) {
            totals[m] = parts & TOTALS ? _mm512_loadu_ps(out + m * OUT_STRIDE) : _mm512_setzero_ps();
        }
#pragma GCC unroll 8
        for (int g = 0; g < GROUPS; ++g) {
            int8_group(parts, x + g * TILE / 2, all + WEIGHTS + g * TILE / 2, dots + g % 2 * TILE,
                       dots + (g + 1) % 2 * TILE, scales + g * LANES, totals, g % 2);
        }
        if (parts & TOTALS) {
#pragma GCC unroll 16
            for (int m = 0; m < ROWS; ++m) {
                _mm512_storeu_ps(out + m * OUT_STRIDE, totals[m]);
            }
        }
    }
}

// 8 rows by weights of 4 bits, read from memory in order: a step of few sequences. High and low
// bytes of rows are one tile. What leaves it is not added up.
enum { FOUR_BIT_BYTES = 256 * LANES / 2, FAR_UNITS = 1 << 18 };
static const size_t far_bytes = (size_t)FAR_UNITS * FOUR_BIT_BYTES;

static uint8_t *far_weights(void) {
    static uint8_t *first;
    if (!first) {
        uint8_t *start = huge_pages(far_bytes);
        for (size_t i = 0; i < far_bytes; i += ROOM / 2) {
            memcpy(start + i, room(), ROOM / 2);
        }
        first = start;
    }
    return first;
}

enum { DECODED = 1, MULTIPLIED = 2, STORED = 4 };

INLINE void four_bits(int parts, const uint8_t *codes) {
    uint8_t *const all = room();
    const __m512i mask = _mm512_set1_epi8(15), zero = _mm512_set1_epi8(8);
    __m512i seen = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; ++g) {
        uint8_t *const panel = all + WEIGHTS + g * TILE / 2;
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const uint8_t *from = codes + (g * 4 + i) * 64;
            const __m512i both = _mm512_load_si512(from);
            __builtin_prefetch(from + 3072);
            if (parts & DECODED) {
                const __m512i low = _mm512_and_si512(both, mask);
                const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
                _mm512_store_si512(panel + i * 128, _mm512_sub_epi8(low, zero));
                _mm512_store_si512(panel + i * 128 + 64, _mm512_sub_epi8(high, zero));
            } else {
                seen = _mm512_or_si512(seen, both);
            }
        }
        if (parts & MULTIPLIED) {
            asm volatile("" ::: "memory");
            LOAD(4, all + TILES + g * TILE);
            LOAD(6, panel);
            if (parts & STORED) { // of the group before
                STORE(0, all + DOTS + g % 2 * TILE);
            }
            CLEAR(0);
            BYTES(0, 4, 6);
        }
    }
    asm volatile("" ::"v"(seen));
}

INLINE void few(int parts) {
    const uint8_t *const weights = far_weights();
    for (size_t unit = 0; unit < FAR_UNITS; ++unit) {
        four_bits(parts, weights + unit * FOUR_BIT_BYTES);
    }
}

// bf16: 32 rows by 32 outputs at a time. Sums leave the tiles after 512 columns.
INLINE void bf16(void) {
    uint8_t *const all = room();
    for (int slab = 0; slab < SLABS / 2; ++slab) {
        for (int block = 0; block < BLOCKS; block += 2) {
            for (int band = 0; band < BANDS; band += 2) {
                const uint8_t *const x = all + TILES + (slab * BANDS + band) * 16 * TILE;
                uint8_t *const sums = all + OUT + band * 2 * TILE;
                LOAD(0, sums);
                LOAD(1, sums + TILE);
                LOAD(2, sums + 2 * TILE);
                LOAD(3, sums + 3 * TILE);
                for (int k = 0; k < 16; ++k) {
                    STREAM(4, x + k * TILE);
                    LOAD(6, all + WEIGHTS + k * TILE);
                    FLOATS(0, 4, 6);
                    LOAD(7, all + WEIGHTS + (16 + k) * TILE);
                    FLOATS(1, 4, 7);
                    STREAM(5, x + (16 + k) * TILE);
                    FLOATS(2, 5, 6);
                    FLOATS(3, 5, 7);
                }
                STORE(0, sums);
                STORE(1, sums + TILE);
                STORE(2, sums + 2 * TILE);
                STORE(3, sums + 3 * TILE);
            }
        }
    }
}

// Returns how many units `rounds` of a call are.
#define EXPORT(name, units, call)                                                                  \
    __attribute__((target(ISA))) int64_t name(int64_t rounds) {                                    \
        if (!may_use_tiles()) {                                                                    \
            return 0;                                                                              \
        }                                                                                          \
        configure();                                                                               \
        for (int64_t round = 0; round < rounds; ++round) {                                         \
            call;                                                                                  \
        }                                                                                          \
        asm volatile("tilerelease");                                                               \
        return rounds * (units);                                                                   \
    }
#define EXPORT_FEW(name, parts) EXPORT(name, FAR_UNITS, few(parts))
#define EXPORT_MANY(name, call) EXPORT(name, SLABS *BLOCKS *BANDS, call)

EXPORT_FEW(few_read, 0)
EXPORT_FEW(few_decoded, DECODED)
EXPORT_FEW(few_multiplied, DECODED | MULTIPLIED)
EXPORT_FEW(few_stored, DECODED | MULTIPLIED | STORED)
EXPORT_MANY(bf16_all, bf16())
EXPORT_MANY(q4_k_products, q4_k(0))
EXPORT_MANY(q4_k_loads, q4_k(LOADS))
EXPORT_MANY(q4_k_stores, q4_k(LOADS | STORES))
EXPORT_MANY(q4_k_totals, q4_k(LOADS | STORES | TOTALS))
EXPORT_MANY(q4_k_minima, q4_k(LOADS | STORES | TOTALS | MINIMA))
EXPORT_MANY(q4_k_far, q4_k(LOADS | STORES | TOTALS | MINIMA | FAR_ROWS | FAR_SUMS))
EXPORT_MANY(int8_loads, int8(LOADS))
EXPORT_MANY(int8_stores, int8(LOADS | STORES))
EXPORT_MANY(int8_totals, int8(LOADS | STORES | TOTALS))
EXPORT_MANY(int8_far, int8(LOADS | STORES | TOTALS | FAR_ROWS | FAR_SUMS))
#endif
