#include "cpu/bf12.h"

#include <cstring>

namespace headrace {

bool pack_bf12(const uint16_t *numbers, Bf12Header &header, uint8_t *unit) {
    bool seen[256] = {};
    for (int i = 0; i < bf12_numbers; ++i) {
        seen[numbers[i] >> 8] = true;
    }
    uint8_t codes[256]; // by high byte
    int num_codes = 0;
    for (int high = 0; high < 128; ++high) {
        if (seen[high] || seen[high + 128]) {
            if (num_codes == 8) {
                return false;
            }
            header.highs[num_codes] = uint8_t(high);
            codes[high] = uint8_t(num_codes);
            codes[high + 128] = uint8_t(num_codes++ | 8);
        }
    }
    uint8_t places[bf12_numbers]; // the code of the number whose low byte lies there
    for (int run = 0; run < bf12_numbers; run += 8) {
        const int place = bf12_place(run);
        for (int i = 0; i < 8; ++i) {
            unit[place + i] = uint8_t(numbers[run + i]);
            places[place + i] = codes[numbers[run + i] >> 8];
        }
    }
    for (int byte = 0; byte < bf12_numbers / 2; ++byte) {
        const int place = byte / 64 * 128 + byte % 64;
        unit[bf12_numbers + byte] = uint8_t(places[place] | places[place + 64] << 4);
    }
    return true;
}

uint16_t bf12_number(const Bf12Header &header, const uint8_t *unit, int i) {
    if (header.stored) {
        uint16_t number;
        std::memcpy(&number, header.stored + 2 * i, 2);
        return number;
    }
    const int place = bf12_place(i);
    const int both = unit[bf12_numbers + place / 128 * 64 + place % 64];
    const int code = both >> place / 64 % 2 * 4;
    return uint16_t(unit[place] | header.highs[code & 7] << 8 | (code & 8) << 12);
}

} // namespace headrace
