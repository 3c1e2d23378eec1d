#include "cpu/matrix.h"
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

namespace {

struct Group { // where the parts of one quantized group of 16 rows x 32 cols begin
    uint16_t *scales;
    uint16_t *minimums; // q4_1 only
    uint8_t *numbers;
};

Group group_at(uint8_t *block, Format format, int index) {
    uint8_t *group = block + index * block_bytes(format, quantized_group);
    const int header = format == Format::q4_1 ? lanes * 4 : lanes * 2;
    return {reinterpret_cast<uint16_t *>(group), reinterpret_cast<uint16_t *>(group) + lanes,
            group + header};
}

// Nibble j of lane n in word j / 8. GGUF keeps column j beside column j + 16 in one byte.
void pack_nibbles(uint8_t *numbers, int lane, const uint8_t *bytes) {
    auto *words = reinterpret_cast<uint32_t *>(numbers);
    for (int j = 0; j < quantized_group; ++j) {
        const uint32_t nibble = j < 16 ? bytes[j] & 15 : bytes[j - 16] >> 4;
        words[j / 8 * lanes + lane] |= nibble << (4 * (j % 8));
    }
}

void pack_quantized_row(Matrix &matrix, uint8_t *block, int lane, const uint8_t *source) {
    for (int g = 0; g < matrix.cols / quantized_group; ++g) {
        const Group group = group_at(block, matrix.format, g);
        std::memcpy(group.scales + lane, source, 2);
        source += 2;
        if (matrix.format == Format::q4_1) {
            std::memcpy(group.minimums + lane, source, 2);
            source += 2;
        }
        if (matrix.format == Format::q8_0) {
            for (int j = 0; j < quantized_group; ++j) {
                group.numbers[j * lanes + lane] = source[j];
            }
            source += quantized_group;
        } else {
            pack_nibbles(group.numbers, lane, source);
            source += quantized_group / 2;
        }
    }
}

size_t row_bytes(Format format, int cols) { // as stored, before packing
    return block_bytes(format, cols) / lanes;
}

float quantized_number(const Matrix &matrix, uint8_t *block, int lane, int col) {
    const Group group = group_at(block, matrix.format, col / quantized_group);
    const int j = col % quantized_group;
    const float scale = from_fp16(group.scales[lane]);
    if (matrix.format == Format::q8_0) {
        return scale * float(int8_t(group.numbers[j * lanes + lane]));
    }
    const auto *words = reinterpret_cast<const uint32_t *>(group.numbers);
    const int nibble = words[j / 8 * lanes + lane] >> (4 * (j % 8)) & 15;
    return matrix.format == Format::q4_0 ? scale * float(nibble - 8)
                                         : scale * float(nibble) + from_fp16(group.minimums[lane]);
}

} // namespace

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
            pack_quantized_row(matrix, block, lane, bytes);
            bytes += row_bytes(matrix.format, matrix.cols);
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
            out[k] = quantized_number(matrix, block, lane, k);
        }
    }
}

} // namespace headrace
