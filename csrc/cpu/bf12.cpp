#include "cpu/bf12.h"

#include <cstring>

namespace headrace {

namespace {

struct Code { // of a number: a byte, and which half of it
    int byte, shift;
};

Code code_of(int i) {
    const int place = bf12_place(i);
    return {bf12_numbers + place / 128 * 64 + place % 64, place / 64 % 2 * 4};
}

} // namespace

bool pack_bf12(const uint16_t *numbers, Bf12Header &header, uint8_t *unit) {
    bool seen[128] = {};
    for (int i = 0; i < bf12_numbers; ++i) {
        seen[numbers[i] >> 8 & 0x7f] = true;
    }
    uint8_t codes[128];
    int num_codes = 0;
    for (int high = 0; high < 128; ++high) {
        if (seen[high]) {
            if (num_codes == 8) {
                return false;
            }
            header.highs[num_codes] = uint8_t(high);
            codes[high] = uint8_t(num_codes++);
        }
    }
    std::memset(unit + bf12_numbers, 0, bf12_numbers / 2);
    for (int i = 0; i < bf12_numbers; ++i) {
        const int high = numbers[i] >> 8;
        const Code code = code_of(i);
        unit[bf12_place(i)] = uint8_t(numbers[i]);
        unit[code.byte] |= uint8_t((codes[high & 0x7f] | (high >> 7) << 3) << code.shift);
    }
    return true;
}

uint16_t bf12_number(const Bf12Header &header, const uint8_t *unit, int i) {
    if (header.stored) {
        uint16_t number;
        std::memcpy(&number, header.stored + 2 * i, 2);
        return number;
    }
    const Code code = code_of(i);
    const int bits = unit[code.byte] >> code.shift;
    return uint16_t(unit[bf12_place(i)] | header.highs[bits & 7] << 8 | (bits & 8) << 12);
}

} // namespace headrace
