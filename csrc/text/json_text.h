// JSON strings, written as msgspec.json writes them.

#pragma once

#include <cstdint>
#include <string>

namespace headrace {

// Append a text within quotes.
inline void append_json(const std::string &text, std::string &out) {
    static constexpr char HEX[] = "0123456789abcdef";
    out.push_back('"');
    size_t start = 0; // of what is written as it is
    for (size_t i = 0; i < text.size(); ++i) {
        const uint8_t byte = uint8_t(text[i]);
        if (byte >= 0x20 && byte != '"' && byte != '\\') {
            continue;
        }
        out.append(text, start, i - start);
        start = i + 1;
        out.push_back('\\');
        switch (byte) {
        case '"':
        case '\\':
            out.push_back(char(byte));
            break;
        case '\b':
            out.push_back('b');
            break;
        case '\f':
            out.push_back('f');
            break;
        case '\n':
            out.push_back('n');
            break;
        case '\r':
            out.push_back('r');
            break;
        case '\t':
            out.push_back('t');
            break;
        default:
            out.append("u00");
            out.push_back(HEX[byte >> 4]);
            out.push_back(HEX[byte & 15]);
        }
    }
    out.append(text, start, std::string::npos);
    out.push_back('"');
}

} // namespace headrace
