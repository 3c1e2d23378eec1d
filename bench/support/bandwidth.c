// How fast memory can be read: for bandwidth.py, compiled where it runs.
#include <stddef.h>
#include <stdint.h>

typedef uint64_t Line __attribute__((vector_size(64)));

enum { block_bytes = 18432, max_streams = 12 };

// Read `size` bytes, `streams` blocks side by side, and prefetch `ahead` bytes in each of them, at
// its end in the block that follows. Returns a checksum, so that nothing is left out.
uint64_t read_blocks(const char *memory, size_t size, int streams, ptrdiff_t ahead) {
    const size_t tile = (size_t)streams * block_bytes;
    Line sum = {0};
    for (size_t at = 0; at + tile <= size; at += tile) {
        for (ptrdiff_t offset = 0; offset < block_bytes; offset += 64) {
            const ptrdiff_t next =
                offset + ahead < block_bytes ? ahead : ahead + (ptrdiff_t)(tile - block_bytes);
            const char *line = memory + at + offset;
            for (int stream = 0; stream < streams; ++stream, line += block_bytes) {
                __builtin_prefetch(line + next);
                sum ^= *(const Line *)line;
            }
        }
    }
    uint64_t all = 0;
    for (int i = 0; i < 8; ++i) {
        all ^= sum[i];
    }
    return all;
}
