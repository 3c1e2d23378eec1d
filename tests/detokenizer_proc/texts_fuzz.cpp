// texts_fuzz: any calls of the detokenizer's core, in any order, with any columns.
//   Run:  texts_fuzz SEED ROUNDS, built with csrc/text/detokenizer.cpp and
//   -fsanitize=address,undefined, which end it where memory is touched that is not its own. Each
//   round is a vocabulary and 400 calls. What it renders is read to the last byte.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

struct FramesView { // csrc/text/detokenizer.cpp, as the next two
    const char *data;
    uint64_t num_bytes;
    const uint64_t *ids;
    const uint32_t *lengths, *told;
    const uint8_t *last;
    uint64_t num_entries;
    const uint64_t *completed;
    uint64_t num_completed;
};

struct TextView {
    const char *data;
    uint64_t num_bytes;
    uint32_t num_tokens, finished;
};

struct SaidView {
    const uint64_t *ids;
    const uint32_t *counts, *tokens;
    uint64_t num_sequences, num_tokens;
};

extern "C" {
void *headrace_texts_new(const char *, const uint32_t *, const uint8_t *, uint32_t, int, uint32_t);
void headrace_texts_free(void *);
int headrace_texts_open(void *, const uint8_t *, uint64_t);
uint32_t headrace_texts_feed(void *, const uint64_t *, const uint32_t *, const uint8_t *, uint32_t,
                             const uint32_t *, uint32_t *);
void headrace_texts_render(void *, uint32_t, FramesView *);
uint32_t headrace_texts_stopped(void *, uint64_t *, uint32_t);
void headrace_texts_text(void *, uint64_t, TextView *);
void headrace_texts_said(void *, SaidView *);
void headrace_texts_close(void *, uint64_t);
uint64_t headrace_texts_count(void *);
}

namespace {

constexpr uint32_t FRONTENDS = 2, CALLS = 400;

uint64_t checksum = 0; // of all that is read, so that reading is not left out

class Fuzz {
public:
    explicit Fuzz(uint64_t seed) : random_(seed) {
        std::string bytes;
        std::vector<uint32_t> ends;
        std::vector<uint8_t> special;
        for (uint32_t id = below(40); id > 0; --id) {
            bytes += text(5);
            ends.push_back(uint32_t(bytes.size()));
            special.push_back(below(8) == 0);
        }
        num_tokens_ = uint32_t(ends.size());
        texts_ = headrace_texts_new(bytes.data(), ends.data(), special.data(), num_tokens_,
                                    int(below(2)), FRONTENDS);
    }

    ~Fuzz() { headrace_texts_free(texts_); }

    void call() {
        switch (below(8)) {
        case 0:
        case 1:
            open();
            break;
        case 2:
        case 3:
        case 4:
            feed();
            break;
        case 5:
            render();
            break;
        case 6:
            look();
            break;
        case 7:
            headrace_texts_close(texts_, id() & ~uint64_t(0xFFFF));
        }
    }

private:
    uint32_t below(uint32_t limit) { return uint32_t(random_() % limit); }

    // A frontend too many, requests and sequences of which several are the same.
    uint64_t id() {
        return uint64_t(below(FRONTENDS + 1)) << 56 | uint64_t(below(3)) << 16 | below(3);
    }

    std::string text(uint32_t limit) {
        static const std::string ALPHABET = "ab\" \\\n\xC3\xA9\xF0\x9F\xED\xA0\xFF";
        std::string made;
        for (uint32_t size = below(limit + 1); size > 0; --size) {
            made.push_back(below(4) ? ALPHABET[below(uint32_t(ALPHABET.size()))]
                                    : char(below(256)));
        }
        return made;
    }

    template <typename T> static void append(std::string &data, T value) {
        data.append(reinterpret_cast<const char *>(&value), sizeof(value));
    }

    void append_sized(std::string &data, const std::string &piece) {
        append(data, uint32_t(piece.size()) + (below(64) == 0 ? below(9) : 0));
        data += piece;
    }

    void open() {
        std::string data;
        append(data, id());
        append(data, below(4));                // sequences of the request
        append(data, below(3));                // min_tokens
        append(data, below(4));                // interval
        for (int flag = 0; flag < 8; ++flag) { // six, and padding
            data.push_back(char(below(16) ? below(2) : below(256)));
        }
        append(data, below(4) ? below(6) : uint32_t(random_())); // told
        std::string events = text(6);
        for (uint32_t part = below(16) ? 5 : below(9); part > 0; --part) {
            events += '\0' + text(6);
        }
        append_sized(data, events);
        for (uint32_t stop = below(3); stop > 0; --stop) {
            append_sized(data, text(6));
        }
        data.resize(data.size() - (below(32) == 0 ? below(uint32_t(data.size())) : 0));
        // Of its own size, so that a byte too far is seen.
        const std::unique_ptr<uint8_t[]> exact(new uint8_t[data.size()]);
        std::copy(data.begin(), data.end(), exact.get());
        checksum += uint64_t(headrace_texts_open(texts_, exact.get(), data.size()));
    }

    void feed() {
        std::vector<uint64_t> ids;
        std::vector<uint32_t> counts, tokens;
        std::vector<uint8_t> finished;
        for (uint32_t row = below(5); row > 0; --row) {
            ids.push_back(id());
            counts.push_back(below(4));
            finished.push_back(below(3) ? 255 : uint8_t(below(below(8) ? 4 : 256)));
            for (uint32_t i = 0; i < counts.back(); ++i) {
                tokens.push_back(below(16) ? below(num_tokens_ + 2) : uint32_t(random_()));
            }
        }
        std::vector<uint32_t> unknown(ids.size());
        const uint32_t num_unknown =
            headrace_texts_feed(texts_, ids.data(), counts.data(), finished.data(),
                                uint32_t(ids.size()), tokens.data(), unknown.data());
        for (uint32_t i = 0; i < num_unknown; ++i) {
            checksum += ids[unknown[i]];
        }
    }

    void render() {
        FramesView view{};
        headrace_texts_render(texts_, below(FRONTENDS), &view);
        uint64_t num_bytes = 0;
        for (uint64_t i = 0; i < view.num_entries; ++i) {
            num_bytes += view.lengths[i];
            checksum += view.ids[i] + view.told[i] + view.last[i];
        }
        if (num_bytes != view.num_bytes) {
            std::printf("%llu bytes, but pieces of %llu\n", (unsigned long long)view.num_bytes,
                        (unsigned long long)num_bytes);
            std::exit(1);
        }
        read(view.data, view.num_bytes);
        for (uint64_t i = 0; i < view.num_completed; ++i) {
            if (below(2)) {
                headrace_texts_close(texts_, view.completed[i]);
            }
        }
    }

    void look() {
        TextView view{};
        headrace_texts_text(texts_, id(), &view);
        read(view.data, view.num_bytes);
        SaidView said{};
        headrace_texts_said(texts_, &said);
        uint64_t num_tokens = 0;
        for (uint64_t i = 0; i < said.num_sequences; ++i) {
            checksum += said.ids[i];
            num_tokens += said.counts[i];
        }
        for (uint64_t i = 0; i < num_tokens; ++i) {
            checksum += said.tokens[i];
        }
        uint64_t stopped[3];
        for (uint32_t i = headrace_texts_stopped(texts_, stopped, 3); i > 0; --i) {
            checksum += stopped[i - 1];
        }
        checksum += headrace_texts_count(texts_);
    }

    static void read(const char *data, uint64_t size) {
        for (uint64_t i = 0; i < size; ++i) {
            checksum += uint8_t(data[i]);
        }
    }

    std::mt19937_64 random_;
    uint32_t num_tokens_;
    void *texts_;
};

} // namespace

int main(int argc, char **argv) {
    if (argc != 3) {
        return 2;
    }
    const uint64_t seed = std::strtoull(argv[1], nullptr, 10);
    const uint64_t num_rounds = std::strtoull(argv[2], nullptr, 10);
    for (uint64_t round = 0; round < num_rounds; ++round) {
        Fuzz fuzz(seed + round);
        for (uint32_t i = 0; i < CALLS; ++i) {
            fuzz.call();
        }
    }
    std::printf("%llu rounds, %016llx\n", (unsigned long long)num_rounds,
                (unsigned long long)checksum);
}
