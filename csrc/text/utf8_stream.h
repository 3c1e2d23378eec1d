// Utf8Stream: bytes to whole characters, a piece at a time.
//   Bytes that never become a character are U+FFFD, once per maximal part of one. Python's decoder
//   does the same with errors="replace" (Unicode, section 3.9, "Substitution of Maximal Subparts").

#pragma once

#include <cstdint>
#include <string>

namespace headrace {

class Utf8Stream {
public:
    // Append the characters that are complete with these bytes.
    void feed(const uint8_t *bytes, size_t size, std::string &out) {
        for (size_t i = 0; i < size; ++i) {
            take(bytes[i], out);
        }
    }

    // Append what is left at the end.
    void flush(std::string &out) {
        if (num_pending_ > 0) {
            replace(out);
        }
    }

private:
    void take(uint8_t byte, std::string &out) {
        if (num_pending_ > 0) {
            if (byte >= low_ && byte <= high_) {
                pending_[num_pending_++] = char(byte);
                low_ = 0x80, high_ = 0xBF;
                if (num_pending_ == length_) {
                    out.append(pending_, length_);
                    num_pending_ = 0;
                }
                return;
            }
            if (num_pending_ == 1 && pending_[0] == '\xED' && byte >= 0xA0 && byte <= 0xBF) {
                // A surrogate: never a character, but Python's decoder waits for one byte more.
                pending_[num_pending_++] = char(byte);
                low_ = 0xFF, high_ = 0x00;
                return;
            }
            replace(out);
        }
        begin(byte, out);
    }

    void begin(uint8_t byte, std::string &out) {
        if (byte < 0x80) {
            out.push_back(char(byte));
            return;
        }
        if (byte < 0xC2 || byte > 0xF4) { // a continuation, or what begins nothing
            out.append(REPLACEMENT);
            return;
        }
        length_ = byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
        // The second byte is what keeps overlong forms, surrogates and what is past U+10FFFF out.
        low_ = byte == 0xE0 ? 0xA0 : byte == 0xF0 ? 0x90 : 0x80;
        high_ = byte == 0xED ? 0x9F : byte == 0xF4 ? 0x8F : 0xBF;
        pending_[0] = char(byte);
        num_pending_ = 1;
    }

    void replace(std::string &out) {
        out.append(REPLACEMENT);
        if (low_ > high_) { // of a surrogate, each byte
            out.append(REPLACEMENT);
        }
        num_pending_ = 0;
    }

    static constexpr const char *REPLACEMENT = "\xEF\xBF\xBD";

    char pending_[4];
    int num_pending_ = 0, length_ = 0;
    uint8_t low_ = 0, high_ = 0; // what the next byte may be
};

} // namespace headrace
