#include "cpu/matrix.h"
#include "cpu/gguf_blocks.h"
#include "cpu/numbers.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <sys/mman.h>
#include <utility>

namespace headrace {

Buffer::~Buffer() {
    release();
}

Buffer::Buffer(Buffer &&other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Buffer &Buffer::operator=(Buffer &&other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

void Buffer::release() {
    if (size_) {
        munmap(data_, size_);
    }
    data_ = nullptr;
    size_ = 0;
}

void Buffer::borrow(void *memory) {
    release();
    data_ = memory;
}

void Buffer::allocate(size_t num_bytes) {
    release();
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

void Matrix::shape(Format new_format, int new_rows, int new_cols) {
    format = new_format;
    rows = new_rows;
    cols = new_cols;
}

void Matrix::allocate(Format new_format, int new_rows, int new_cols) {
    shape(new_format, new_rows, new_cols);
    packed.allocate(num_bytes());
}

namespace {

constexpr size_t int8_group_bytes = block_bytes(Format::int8, quantized_group);

// Numbers of a group are rounded to multiples of its scale; the largest is 127 of them.
void pack_int8_row(int cols, const float *source, uint8_t *group, int lane) {
    for (int k = 0; k < cols; k += quantized_group, group += int8_group_bytes) {
        float numbers[quantized_group] = {}, largest = 0.0f;
        std::memcpy(numbers, source + k, std::min(quantized_group, cols - k) * sizeof(float));
        for (float number : numbers) {
            largest = std::max(largest, std::fabs(number));
        }
        const uint16_t scale = to_fp16(largest / 127.0f);
        const float inverse = scale == 0 ? 0.0f : 1.0f / from_fp16(scale);
        std::memcpy(group + 2 * lane, &scale, 2);
        for (int j = 0; j < quantized_group; ++j) {
            const float steps = std::min(std::max(numbers[j] * inverse, -127.0f), 127.0f);
            // Adding 1.5 * 2^23 rounds to nearest, ties to even.
            const float rounded = (steps + 0x1.8p23f) - 0x1.8p23f;
            group[lanes * 2 + (j / 4 * lanes + lane) * 4 + j % 4] = uint8_t(int(rounded) + 128);
        }
    }
}

// Where a block of fixed16 has the scale of a lane, and its number of a column.
uint8_t *fixed16_scale(uint8_t *block, int lane, int col) {
    return block + col / fixed16_unit * fixed16_unit_bytes + 4 * lane;
}

uint8_t *fixed16_number(uint8_t *block, int lane, int col) {
    const int k = col % fixed16_unit;
    return fixed16_scale(block, lane, col) + fixed16_header_bytes + k / 2 * fixed16_pair_bytes +
           k % 2 * 2;
}

void pack_fixed16_row(int cols, const float *source, uint8_t *block, int lane) {
    for (int k = 0; k < cols; k += fixed16_unit) {
        const int end = std::min(cols, k + fixed16_unit);
        float largest = 0.0f;
        for (int i = k; i < end; ++i) {
            largest = std::max(largest, std::fabs(source[i]));
        }
        const float scale = largest / fixed16_steps;
        const float inverse = largest > 0.0f ? fixed16_steps / largest : 0.0f;
        std::memcpy(fixed16_scale(block, lane, k), &scale, 4);
        for (int i = k; i < end; ++i) {
            // Ties to even. A sum here would be fused with the product on arm64: other bits.
            const auto steps = int16_t(std::lrint(source[i] * inverse));
            std::memcpy(fixed16_number(block, lane, i), &steps, 2);
        }
    }
}

constexpr int tile_cols = 64; // that are packed at a time

template <class Stored, class Number, Number (*convert)(Stored)>
void convert_all(const uint8_t *source, int n, Number *out) {
    for (int i = 0; i < n; ++i) {
        Stored stored;
        std::memcpy(&stored, source + i * sizeof(Stored), sizeof(Stored));
        out[i] = convert(stored);
    }
}

template <class Number> Number same(Number number) {
    return number;
}

// The compiler's code for processors with wider vectors, chosen when the library is loaded.
#if defined(__x86_64__)
__attribute__((target_clones("avx2", "default")))
#endif
void halves_to_bf16(const uint8_t *source, int n, uint16_t *out) {
    for (int i = 0; i < n; ++i) {
        uint16_t half;
        std::memcpy(&half, source + i * sizeof half, sizeof half);
        out[i] = to_bf16(from_fp16(half));
    }
}

// Convert numbers of a type to those of a block, by the type: f32, bf16, fp16.
template <class Number> using Convert = void (*)(const uint8_t *source, int n, Number *out);
constexpr Convert<float> to_f32[] = {convert_all<float, float, same>,
                                     convert_all<uint16_t, float, from_bf16>,
                                     convert_all<uint16_t, float, from_fp16>};
constexpr Convert<uint16_t> to_halves[] = {convert_all<float, uint16_t, to_bf16>,
                                           convert_all<uint16_t, uint16_t, same>, halves_to_bf16};

// Pack up to 16 rows as a block, whose words have a number or two of each lane.
template <class Number>
void pack_block(const NumberRows &source, Convert<Number> convert, int first_row, int num_rows,
                int cols, uint8_t *block) {
    constexpr int per_word = sizeof(uint32_t) / sizeof(Number);
    const int number_bytes = source.type == NumberType::f32 ? 4 : 2;
    const auto *rows = static_cast<const uint8_t *>(source.first) + first_row * source.stride;
    auto *words = reinterpret_cast<uint32_t *>(block);
    Number tile[lanes][tile_cols];
    for (int k = 0; k < cols; k += tile_cols) {
        const int n = std::min(tile_cols, cols - k);
        for (int lane = 0; lane < num_rows; ++lane) {
            convert(rows + lane * source.stride + k * number_bytes, n, tile[lane]);
            std::fill(tile[lane] + n, tile[lane] + n + n % per_word, Number(0));
        }
        for (int i = 0; i < n; i += per_word, words += lanes) {
            for (int lane = 0; lane < num_rows; ++lane) {
                std::memcpy(words + lane, tile[lane] + i, sizeof(uint32_t));
            }
        }
    }
}

float int8_number(const uint8_t *block, int lane, int col) {
    const uint8_t *group = block + col / quantized_group * int8_group_bytes;
    const int j = col % quantized_group;
    uint16_t scale;
    std::memcpy(&scale, group + 2 * lane, 2);
    return from_fp16(scale) * float(group[lanes * 2 + (j / 4 * lanes + lane) * 4 + j % 4] - 128);
}

// Up to 16 rows of bf16, `cols` apart, as a unit of a block: lanes without a row are zeros.
void gather_unit(const uint8_t *source, int num_rows, int cols, uint16_t *unit) {
    std::memset(unit, 0, bf12_numbers * 2);
    for (int lane = 0; lane < num_rows; ++lane, source += 2 * size_t(cols)) {
        for (int k = 0; k < bf12_cols; k += 2) {
            std::memcpy(unit + (k / 2 * lanes + lane) * 2, source + 2 * k, 4);
        }
    }
}

void pack_bf12_block(Matrix &matrix, int num_rows, const uint8_t *source, uint8_t *block) {
    auto *headers = reinterpret_cast<Bf12Header *>(block);
    uint8_t *units = block + bf12_header_bytes(matrix.cols);
    uint16_t numbers[bf12_numbers];
    for (int u = 0; u < matrix.cols / bf12_cols; ++u) {
        gather_unit(source + 2 * size_t(u) * bf12_cols, num_rows, matrix.cols, numbers);
        headers[u].stored = nullptr;
        if (!pack_bf12(numbers, headers[u], units + size_t(u) * bf12_unit_bytes)) {
            auto copy = std::make_unique<uint8_t[]>(sizeof numbers);
            std::memcpy(copy.get(), numbers, sizeof numbers);
            headers[u].stored = copy.get();
            const std::lock_guard<std::mutex> lock(matrix.storing);
            matrix.stored.push_back(std::move(copy));
        }
    }
}

void unpack_bf12_row(const uint8_t *block, int cols, int lane, float *out) {
    const auto *headers = reinterpret_cast<const Bf12Header *>(block);
    const uint8_t *units = block + bf12_header_bytes(cols);
    uint16_t numbers[bf12_cols];
    for (int u = 0; u < cols / bf12_cols; ++u) {
        bf12_lane(headers[u], units + size_t(u) * bf12_unit_bytes, lane, numbers);
        std::transform(numbers, numbers + bf12_cols, out + u * bf12_cols, from_bf16);
    }
}

} // namespace

bool suits_bf12(const uint16_t *source, int num_rows, int cols) {
    constexpr int max_share = 16; // one unit of so many may lie elsewhere
    if (cols % bf12_cols != 0) {
        return false;
    }
    int num_units = 0, num_stored = 0;
    uint16_t numbers[bf12_numbers];
    uint8_t unit[bf12_unit_bytes];
    Bf12Header header;
    for (int row = 0; row < num_rows; row += lanes) {
        for (int k = 0; k < cols; k += bf12_cols, ++num_units) {
            gather_unit(reinterpret_cast<const uint8_t *>(source + size_t(row) * cols + k),
                        std::min(lanes, num_rows - row), cols, numbers);
            num_stored += !pack_bf12(numbers, header, unit);
        }
    }
    return num_stored * max_share <= num_units;
}

void pack_numbers(Matrix &matrix, int first_row, int num_rows, const NumberRows &source) {
    const int type = int(source.type);
    for (int row = 0, count = 0; row < num_rows; row += count) {
        const int lane = (first_row + row) % lanes; // a part may begin within a block
        count = std::min(lanes - lane, num_rows - row);
        auto *block = const_cast<uint8_t *>(matrix.block((first_row + row) / lanes));
        block += lane * sizeof(uint32_t);
        if (matrix.format == Format::bf16) {
            pack_block(source, to_halves[type], row, count, matrix.cols, block);
        } else {
            pack_block(source, to_f32[type], row, count, matrix.cols, block);
        }
    }
}

void pack_float(Matrix &matrix, int first_row, int num_rows, const float *source) {
    if (matrix.format != Format::int8 && matrix.format != Format::fixed16) {
        const int64_t stride = int64_t(matrix.cols) * int64_t(sizeof(float));
        pack_numbers(matrix, first_row, num_rows, {NumberType::f32, stride, source});
        return;
    }
    for (int row = first_row; row < first_row + num_rows; ++row, source += matrix.cols) {
        uint8_t *block = const_cast<uint8_t *>(matrix.block(row / lanes));
        const auto pack = matrix.format == Format::int8 ? pack_int8_row : pack_fixed16_row;
        pack(matrix.cols, source, block, row % lanes);
    }
}

void pack_stored(Matrix &matrix, int first_row, int num_rows, const void *source) {
    const auto *bytes = static_cast<const uint8_t *>(source);
    if (matrix.format == Format::bf16) {
        const int64_t stride = 2 * int64_t(matrix.cols);
        pack_numbers(matrix, first_row, num_rows, {NumberType::bf16, stride, source});
        return;
    }
    if (matrix.format == Format::bf12) {
        for (int row = 0; row < num_rows; row += lanes) {
            pack_bf12_block(matrix, std::min(lanes, num_rows - row),
                            bytes + 2 * size_t(row) * matrix.cols,
                            const_cast<uint8_t *>(matrix.block((first_row + row) / lanes)));
        }
        return;
    }
    for (int row = first_row; row < first_row + num_rows; ++row) {
        uint8_t *block = const_cast<uint8_t *>(matrix.block(row / lanes));
        bytes = pack_gguf_row(matrix.format, matrix.cols, bytes, block, row % lanes);
    }
}

void unpack_row(const Matrix &matrix, int row, float *out) {
    uint8_t *block = const_cast<uint8_t *>(matrix.block(row / lanes));
    const int lane = row % lanes;
    if (matrix.format == Format::bf12) {
        unpack_bf12_row(block, matrix.cols, lane, out);
        return;
    }
    for (int k = 0; k < matrix.cols; ++k) {
        switch (matrix.format) {
        case Format::f32:
            out[k] = reinterpret_cast<float *>(block)[k * lanes + lane];
            break;
        case Format::bf16:
            out[k] =
                from_bf16(reinterpret_cast<uint16_t *>(block)[(k / 2 * lanes + lane) * 2 + k % 2]);
            break;
        case Format::int8:
            out[k] = int8_number(block, lane, k);
            break;
        case Format::fixed16: {
            float scale;
            int16_t steps;
            std::memcpy(&scale, fixed16_scale(block, lane, k), 4);
            std::memcpy(&steps, fixed16_number(block, lane, k), 2);
            out[k] = scale * float(steps);
            break;
        }
        default:
            out[k] = gguf_number(matrix.format, block, lane, k);
        }
    }
}

} // namespace headrace
