#include "cpu/matrix.h"
#include "cpu/gguf_blocks.h"
#include "cpu/numbers.h"

#include <algorithm>
#include <new>
#include <sys/mman.h>

namespace headrace {

Buffer::~Buffer() {
    if (data_) {
        munmap(data_, size_);
    }
}

void Buffer::allocate(size_t num_bytes) {
    if (data_) {
        munmap(data_, size_);
    }
    data_ = nullptr;
    size_ = 0;
    // The slack lets a tile prefetch, and a last vector load, run past the end.
    const size_t size = num_bytes + 4096;
    void *data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        throw std::bad_alloc();
    }
#ifdef MADV_HUGEPAGE
    madvise(data, size, MADV_HUGEPAGE);
#endif
    data_ = data;
    size_ = size;
}

float *Buffer::floats(size_t n) {
    if (size_ < n * sizeof(float)) {
        allocate(n * sizeof(float));
    }
    return as<float>();
}

void Matrix::allocate(Format new_format, int new_rows, int new_cols) {
    format = new_format;
    rows = new_rows;
    cols = new_cols;
    packed.allocate(size_t(blocks_of(rows)) * block_bytes(format, cols));
}

void pack_float(Matrix &matrix, int first_row, int num_rows, const float *source) {
    for (int row = first_row; row < first_row + num_rows; ++row, source += matrix.cols) {
        uint8_t *block = const_cast<uint8_t *>(matrix.block(row / lanes));
        const int lane = row % lanes;
        for (int k = 0; k < matrix.cols; ++k) {
            if (matrix.format == Format::f32) {
                reinterpret_cast<float *>(block)[k * lanes + lane] = source[k];
            } else {
                reinterpret_cast<uint16_t *>(block)[(k / 2 * lanes + lane) * 2 + k % 2] =
                    to_bf16(source[k]);
            }
        }
    }
}

void pack_stored(Matrix &matrix, int first_row, int num_rows, const void *source) {
    const auto *bytes = static_cast<const uint8_t *>(source);
    for (int row = first_row; row < first_row + num_rows; ++row) {
        uint8_t *block = const_cast<uint8_t *>(matrix.block(row / lanes));
        const int lane = row % lanes;
        if (matrix.format == Format::bf16) {
            auto *numbers = reinterpret_cast<uint16_t *>(block);
            for (int k = 0; k < matrix.cols; ++k) {
                std::memcpy(numbers + (k / 2 * lanes + lane) * 2 + k % 2, bytes + 2 * k, 2);
            }
            bytes += 2 * size_t(matrix.cols);
        } else {
            bytes = pack_gguf_row(matrix.format, matrix.cols, bytes, block, lane);
        }
    }
}

void unpack_row(const Matrix &matrix, int row, float *out) {
    uint8_t *block = const_cast<uint8_t *>(matrix.block(row / lanes));
    const int lane = row % lanes;
    for (int k = 0; k < matrix.cols; ++k) {
        switch (matrix.format) {
        case Format::f32:
            out[k] = reinterpret_cast<float *>(block)[k * lanes + lane];
            break;
        case Format::bf16:
            out[k] =
                from_bf16(reinterpret_cast<uint16_t *>(block)[(k / 2 * lanes + lane) * 2 + k % 2]);
            break;
        default:
            out[k] = gguf_number(matrix.format, block, lane, k);
        }
    }
}

} // namespace headrace
