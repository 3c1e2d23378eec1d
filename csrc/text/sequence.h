// Sequence: the text of one sequence, from its tokens.
//   The same as detokenizer_proc/sequence_text.py, without log probabilities.

#pragma once

#include "stop_matcher.h"
#include "utf8_stream.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace headrace {

enum Finish : uint8_t { STOP = 0, LENGTH = 1, ABORT = 2, REFUSED = 3, NOT_FINISHED = 255 };

// The bytes of every token.
struct Vocabulary {
    std::string bytes;
    std::vector<uint32_t> ends;
    std::vector<uint8_t> is_special;
    bool strips_first_space;

    std::string_view token(uint32_t id, bool skips_special) const {
        if (id >= ends.size() || (skips_special && is_special[id])) {
            return {};
        }
        const uint32_t start = id == 0 ? 0 : ends[id - 1];
        return std::string_view(bytes).substr(start, ends[id] - start);
    }
};

struct SequenceOptions {
    uint32_t min_tokens;
    bool include_stop, skips_special;
    std::vector<std::string> stops;
};

class Sequence {
public:
    Sequence(const Vocabulary &vocabulary, SequenceOptions options)
        : vocabulary_(vocabulary), stops_(std::move(options.stops), options.include_stop),
          min_tokens_(options.min_tokens), include_stop_(options.include_stop),
          skips_special_(options.skips_special), strips_space_(vocabulary.strips_first_space) {}

    // Take new tokens. A stop token ends the text without being part of it; a stop string, too, and
    // what comes after it is not looked at.
    void feed(const uint32_t *tokens, uint32_t count, Finish finish) {
        for (uint32_t i = 0; i < count; ++i) {
            ++num_tokens;
            if (finish == STOP && i == count - 1 && !include_stop_) {
                break;
            }
            decode(tokens[i]);
            if (stops_.stopped()) {
                finished = STOP;
                return;
            }
        }
        if (finish == NOT_FINISHED) {
            return;
        }
        decoded_.clear();
        characters_.flush(decoded_);
        match();
        if (!stops_.stopped()) {
            stops_.flush(text);
        }
        finished = stops_.stopped() ? STOP : finish;
    }

    std::string text; // what is certain and has not been taken
    uint32_t num_tokens = 0;
    Finish finished = NOT_FINISHED;

private:
    void decode(uint32_t token) {
        std::string_view bytes = vocabulary_.token(token, skips_special_);
        if (strips_space_ && !bytes.empty()) {
            strips_space_ = false;
            bytes.remove_prefix(bytes.front() == ' ' ? 1 : 0);
        }
        decoded_.clear();
        characters_.feed(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), decoded_);
        match();
    }

    // Pass on what cannot be part of a stop string; before min_tokens, nothing is.
    void match() {
        if (num_tokens <= min_tokens_) {
            text += decoded_;
        } else {
            stops_.feed(decoded_, text);
        }
    }

    const Vocabulary &vocabulary_;
    Utf8Stream characters_;
    StopMatcher stops_;
    std::string decoded_;
    uint32_t min_tokens_;
    bool include_stop_, skips_special_, strips_space_;
};

} // namespace headrace
