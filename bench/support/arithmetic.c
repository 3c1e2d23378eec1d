// How fast fp32 is multiplied and added: for arithmetic.py, compiled where it runs.
#include <stdint.h>

#if defined(__AVX512F__)
enum { vector_bytes = 64, num_sums = 24 };
#elif defined(__AVX__)
enum { vector_bytes = 32, num_sums = 12 };
#else
enum { vector_bytes = 16, num_sums = 24 };
#endif
typedef float Vector __attribute__((vector_size(vector_bytes)));

// Multiplications and additions of one round.
const int64_t flops_of_round = 2 * num_sums * (int64_t)(vector_bytes / sizeof(float));

// Sums that wait for nothing but themselves, in registers. Returns what they add up to, so that
// nothing is left out.
float add_products(int64_t num_rounds, float x, float y) {
    Vector sums[num_sums], factor, term;
    for (unsigned i = 0; i < vector_bytes / sizeof(float); ++i) {
        factor[i] = x;
        term[i] = y;
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
    float all = 0;
    for (int i = 0; i < num_sums; ++i) {
        all += sums[i][0];
    }
    return all;
}
