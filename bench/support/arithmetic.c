// How many products a thread adds up in a second: for arithmetic.py, compiled where it runs.
//
// Sums wait for nothing but themselves. All factors are in registers.
#include <stdint.h>

#if defined(__AVX512F__)
enum { vector_bytes = 64, num_sums = 24 };
#elif defined(__AVX__)
enum { vector_bytes = 32, num_sums = 12 };
#else
enum { vector_bytes = 16, num_sums = 24 };
#endif
typedef float Vector __attribute__((vector_size(vector_bytes)));

// Of fp32, in the widest vectors of this processor. Returns how many products there were; what they
// add up to is used, so that nothing is left out.
int64_t add_fp32(int64_t num_rounds) {
    Vector sums[num_sums], factor, term;
    for (unsigned i = 0; i < vector_bytes / sizeof(float); ++i) {
        factor[i] = 0.5f;
        term[i] = 1.0f;
    }
    for (int i = 0; i < num_sums; ++i) {
        sums[i] = term * (float)i;
    }
    for (int64_t round = 0; round < num_rounds; ++round) {
#pragma GCC unroll 24
        for (int i = 0; i < num_sums; ++i) {
            sums[i] = sums[i] * factor + term;
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < num_sums; ++i) {
        asm volatile("" : : "v"(sums[i]));
    }
    return num_rounds * num_sums * (int64_t)(vector_bytes / sizeof(float));
}

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>

// A loop over `count` sums of so many bytes, each of which adds `products` by `instructions` with
// operands 0 (the sum), 1 (free), 2 and 3 (factors). Factors are ones.
#define LOOP(name, isa, bytes, count, products, instructions)                                      \
    __attribute__((target(isa))) int64_t name(int64_t num_rounds) {                                \
        typedef int32_t Ints __attribute__((vector_size(bytes)));                                  \
        Ints sums[count] = {}, one, other, room;                                                   \
        for (unsigned i = 0; i < bytes / sizeof(int32_t); ++i) {                                   \
            one[i] = other[i] = 0x01010101;                                                        \
        }                                                                                          \
        asm("" : "+v"(one), "+v"(other));                                                          \
        for (int64_t round = 0; round < num_rounds; ++round) {                                     \
            _Pragma("GCC unroll 24") for (int i = 0; i < count; ++i) {                             \
                asm(instructions : "+v"(sums[i]), "=&v"(room) : "v"(one), "v"(other));             \
            }                                                                                      \
        }                                                                                          \
        _Pragma("GCC unroll 24") for (int i = 0; i < count; ++i) {                                 \
            asm volatile("" : : "v"(sums[i]));                                                     \
        }                                                                                          \
        return num_rounds * count * (products);                                                    \
    }

#define DOTS_BY_TWO "vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0"

// Vectors of 256 bits have 16 registers: twelve sums, factors, and room for one product.
LOOP(add_fp32_avx2, "avx2,fma", 32, 12, 8, "vfmadd231ps %2, %3, %0")
LOOP(add_int16_avx2, "avx2", 32, 12, 16, DOTS_BY_TWO)
LOOP(add_int16_avx_vnni, "avx2,avxvnni", 32, 12, 16, "%{vex%} vpdpwssd %2, %3, %0")
LOOP(add_int8_avx_vnni, "avx2,avxvnni", 32, 12, 32, "%{vex%} vpdpbusd %2, %3, %0")
LOOP(add_fp32_avx512, "avx512f", 64, 24, 16, "vfmadd231ps %2, %3, %0")
LOOP(add_int16_avx512, "avx512f,avx512vnni", 64, 24, 32, "vpdpwssd %2, %3, %0")
LOOP(add_int8_avx512, "avx512f,avx512vnni", 64, 24, 64, "vpdpbusd %2, %3, %0")
LOOP(add_bf16_avx512, "avx512f,avx512bf16", 64, 24, 32, "vdpbf16ps %2, %3, %0")

// Four sums of 16 rows and 16 columns each, over 64 bytes of a row.
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((packed)) TileConfig;

#define TILES(name, products, instruction)                                                         \
    int64_t name(int64_t num_rounds) {                                                             \
        enum { request_permission = 0x1023, tile_data = 18 };                                      \
        if (syscall(SYS_arch_prctl, request_permission, tile_data) != 0) {                         \
            return 0;                                                                              \
        }                                                                                          \
        TileConfig config = {.palette = 1};                                                        \
        for (int i = 0; i < 8; ++i) {                                                              \
            config.row_bytes[i] = 64;                                                              \
            config.rows[i] = 16;                                                                   \
        }                                                                                          \
        asm volatile("ldtilecfg %0" : : "m"(config));                                              \
        asm volatile("tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm2\n\ttilezero %tmm3\n\t"    \
                     "tilezero %tmm4\n\ttilezero %tmm5\n\ttilezero %tmm6\n\ttilezero %tmm7");      \
        for (int64_t round = 0; round < num_rounds; ++round) {                                     \
            asm volatile(instruction " %tmm4, %tmm6, %tmm0\n\t" instruction                        \
                                     " %tmm5, %tmm6, %tmm1\n\t" instruction                        \
                                     " %tmm4, %tmm7, %tmm2\n\t" instruction                        \
                                     " %tmm5, %tmm7, %tmm3");                                      \
        }                                                                                          \
        asm volatile("tilerelease");                                                               \
        return num_rounds * 4 * 16 * 16 * (products);                                              \
    }

TILES(add_bf16_tiles, 32, "tdpbf16ps")
TILES(add_int8_tiles, 64, "tdpbssd")
#endif
