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

void bf12_lane(const Bf12Header &header, const uint8_t *unit, int lane, uint16_t *out) {
    if (header.stored) {
        for (int pair = 0; pair < bf12_cols / 2; ++pair) {
            std::memcpy(out + 2 * pair, header.stored + pair * 64 + lane * 4, 4);
        }
        return;
    }
    uint8_t highs[16]; // by code, with their signs
    for (int code = 0; code < 16; ++code) {
        highs[code] = uint8_t(header.highs[code % 8] | code / 8 << 7);
    }
    const int first = bf12_place(2 * lane); // in each vector, for a first pair; 8 on for a second
    const uint8_t *lows = unit + first, *codes = unit + bf12_numbers + first;
    for (int k = 0; k < bf12_cols; k += 8, lows += 128, codes += 64, out += 8) {
        for (int i = 0; i < 4; ++i) {
            const int place = i / 2 * 8 + i % 2, both = codes[place];
            out[i] = uint16_t(lows[place] | highs[both & 15] << 8);
            out[i + 4] = uint16_t(lows[place + 64] | highs[both >> 4] << 8);
        }
    }
}

} // namespace headrace
