// detokenizer: the tokens of a step as text, within the frames that clients read.
//   All sequences of a step in one call: no Python object per sequence. A request's frames are
//   rendered elsewhere (detokenizer_proc/renderers/event_template.py) but for the text in them.
//   About 0.1 us per sequence and step.

#include "sequence_id.h"
#include "text/json_text.h"
#include "text/sequence.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <unordered_map>

namespace headrace {

namespace {

constexpr int FRONTEND_SHIFT = 56; // messages.py
constexpr uint32_t ENDED = uint32_t(1) << 31;

// The header of a sequence. Its event template follows, then its stop strings: each a length (u32)
// and so many bytes. NUL separates the parts of the template: the opening, a text event's prefix
// and tail, the ends for stop and length, the closing.
struct Opening {
    uint64_t id;
    uint32_t num_sequences; // of the request
    uint32_t min_tokens, interval;
    uint8_t streams, include_stop, skips_special;
    uint8_t end_is_event; // an event of its own, after that of the text (chats)
    uint8_t closes;       // `closing` is all that the request's end takes
    uint8_t has_told;     // the client has its opening, and what is in ...
    uint8_t padding[2];
    uint32_t told; // ... this: tokens, and whether its end (ENDED)
};

struct Parts {
    std::string opening, prefix, tail, ends[2], closing;
};

// Split an event template; return whether it has as many parts.
bool split(const std::string &text, Parts &parts) {
    std::string *all[] = {&parts.opening, &parts.prefix,  &parts.tail,
                          &parts.ends[0], &parts.ends[1], &parts.closing};
    size_t start = 0;
    for (std::string *part : all) {
        const size_t end = std::min(text.find('\0', start), text.size());
        if (start > text.size()) {
            return false;
        }
        part->assign(text, start, end - start);
        start = end + 1;
    }
    return start == text.size() + 1;
}

struct Stream {
    Stream(const Vocabulary &vocabulary, const Opening &o, Parts p, SequenceOptions options)
        : id(o.id), sequence(vocabulary, std::move(options)), parts(std::move(p)),
          interval(o.interval), num_told(o.told & ~ENDED), streams(o.streams),
          end_is_event(o.end_is_event), is_end_told(o.told & ENDED), has_opened(o.has_told) {}

    // Take new tokens. The text of delivered ones is not sent again.
    void feed(const uint32_t *tokens, uint32_t count, Finish finish) {
        said.insert(said.end(), tokens, tokens + count);
        const uint32_t num_known = num_told - std::min(num_told, sequence.num_tokens);
        const uint32_t num_old = std::min(num_known, count);
        if (num_old > 0) {
            const bool is_all = num_old == count;
            sequence.feed(tokens, num_old, is_all && is_end_told ? finish : NOT_FINISHED);
            sequence.text.clear();
            tokens += num_old;
            count -= num_old;
        }
        if (sequence.finished == NOT_FINISHED && (count > 0 || finish != NOT_FINISHED)) {
            sequence.feed(tokens, count, finish);
        }
        if (is_end_told && sequence.finished != NOT_FINISHED) {
            sequence.text.clear();
            has_ended = true;
        }
    }

    uint64_t id;
    Sequence sequence;
    std::vector<uint32_t> said; // all tokens, for an engine that has lost them
    Parts parts;
    uint32_t interval, num_told; // tokens when an event was last written
    bool streams, end_is_event;
    bool is_end_told;       // before it came here
    bool announces = false; // its request's head goes with its first text
    bool has_opened, has_ended = false;
    bool is_dirty = false;
};

struct Request {
    std::vector<std::unique_ptr<Stream>> streams; // in the order of their coming
    uint32_t num_sequences;
    std::string closing;
    bool closes, has_completed = false;

    bool is_complete() const {
        return streams.size() == num_sequences &&
               std::all_of(streams.begin(), streams.end(), [](const auto &stream) {
                   return stream->streams ? stream->has_ended
                                          : stream->sequence.finished != NOT_FINISHED;
               });
    }
};

// What one render brings for one frontend: columns with an entry per piece, and all bytes.
struct Frames {
    std::string data;
    std::vector<uint64_t> ids;
    std::vector<uint32_t> lengths, told;
    std::vector<uint8_t> last;

    void add(const Stream &stream, size_t start, bool is_last) {
        ids.push_back(stream.id);
        lengths.push_back(uint32_t(data.size() - start));
        told.push_back(stream.num_told | (stream.has_ended ? ENDED : 0));
        last.push_back(is_last);
    }

    void clear() {
        data.clear();
        ids.clear();
        lengths.clear();
        told.clear();
        last.clear();
    }
};

struct FramesView { // core_texts.py
    const char *data;
    uint64_t num_bytes;
    const uint64_t *ids;
    const uint32_t *lengths, *told;
    const uint8_t *last;
    uint64_t num_entries;
    const uint64_t *completed; // requests whose end is to be written
    uint64_t num_completed;
};

struct TextView { // core_texts.py
    const char *data;
    uint64_t num_bytes;
    uint32_t num_tokens;
    uint32_t finished;
};

struct SaidView { // core_texts.py
    const uint64_t *ids;
    const uint32_t *counts, *tokens;
    uint64_t num_sequences, num_tokens;
};

class Texts {
public:
    Texts(Vocabulary vocabulary, uint32_t num_frontends)
        : vocabulary_(std::move(vocabulary)), dirty_(num_frontends), frames_(num_frontends) {}

    // Return 0 where `data` is not an opening, 1, or 2 for the first sequence of its request.
    int open(const uint8_t *data, size_t size) {
        Opening opening;
        if (size < sizeof(opening)) {
            return 0;
        }
        std::memcpy(&opening, data, sizeof(opening));
        std::vector<std::string> texts;
        size_t at = sizeof(opening);
        while (at + 4 <= size) {
            uint32_t length;
            std::memcpy(&length, data + at, 4);
            at += 4;
            if (length > size - at) {
                return 0;
            }
            texts.emplace_back(reinterpret_cast<const char *>(data + at), length);
            at += length;
        }
        Parts parts;
        if (at != size || texts.empty() || !split(texts[0], parts) ||
            opening.id >> FRONTEND_SHIFT >= frames_.size()) {
            return 0;
        }
        SequenceOptions options{opening.min_tokens,
                                bool(opening.include_stop),
                                bool(opening.skips_special),
                                {texts.begin() + 1, texts.end()}};
        Request &request = requests_[opening.id & ~INDEX_MASK];
        request.num_sequences = opening.num_sequences;
        request.closing = std::move(parts.closing);
        request.closes = opening.closes;
        request.streams.push_back(
            std::make_unique<Stream>(vocabulary_, opening, std::move(parts), std::move(options)));
        Stream *stream = request.streams.back().get();
        streams_[opening.id] = stream;
        stream->announces = request.streams.size() == 1;
        return stream->announces ? 2 : 1;
    }

    // Take the news of a step; `unknown` gets the rows of sequences that are not here.
    uint32_t feed(const uint64_t *ids, const uint32_t *counts, const uint8_t *finished,
                  uint32_t num_rows, const uint32_t *tokens, uint32_t *unknown) {
        uint32_t num_unknown = 0;
        for (uint32_t row = 0; row < num_rows; tokens += counts[row++]) {
            const auto found = streams_.find(ids[row]);
            if (found == streams_.end()) {
                unknown[num_unknown++] = row;
                continue;
            }
            const Finish finish = Finish(finished[row]);
            Sequence &sequence = found->second->sequence;
            const bool has_text = finish == STOP || finish == LENGTH || finish == NOT_FINISHED;
            if (has_text && sequence.finished == NOT_FINISHED) {
                found->second->feed(tokens, counts[row], finish);
                if (sequence.finished != NOT_FINISHED && finish == NOT_FINISHED) {
                    stopped_.push_back(ids[row]);
                }
                touch(found->second);
            } // else it is to be closed, or the engine had not heard of the stop string
        }
        return num_unknown;
    }

    // Write what there is to say to a frontend since the last time.
    void render(uint32_t frontend) {
        std::vector<Stream *> &dirty = dirty_[frontend];
        Frames &frames = frames_[frontend];
        frames.clear();
        completed_.clear();
        for (size_t i = 0; i < dirty.size(); ++i) {
            Stream *stream = dirty[i];
            stream->is_dirty = false;
            const uint64_t id = stream->id & ~INDEX_MASK;
            const size_t start = frames.data.size();
            if (stream->streams) {
                write(*stream, frames.data);
            }
            const auto found = requests_.find(id);
            const bool is_complete = found->second.is_complete();
            const bool is_last = is_complete && found->second.closes;
            if (is_last) {
                frames.data += found->second.closing;
            }
            if (frames.data.size() > start || (stream->streams && stream->announces)) {
                frames.add(*stream, start, is_last);
                stream->announces = false;
            }
            if (is_last) {
                close(id);
            } else if (is_complete && !found->second.has_completed) {
                found->second.has_completed = true;
                completed_.push_back(id);
            }
        }
        dirty.clear();
    }

    void close(uint64_t request) {
        const auto found = requests_.find(request);
        if (found == requests_.end()) {
            return;
        }
        std::vector<Stream *> &dirty = dirty_[request >> FRONTEND_SHIFT];
        for (const auto &stream : found->second.streams) {
            if (stream->is_dirty) {
                dirty.erase(std::remove(dirty.begin(), dirty.end(), stream.get()), dirty.end());
            }
            streams_.erase(stream->id);
        }
        requests_.erase(found);
    }

    TextView text(uint64_t id) const {
        const auto found = streams_.find(id);
        if (found == streams_.end()) {
            return {nullptr, 0, 0, NOT_FINISHED};
        }
        const Sequence &sequence = found->second->sequence;
        return {sequence.text.data(), sequence.text.size(), sequence.num_tokens, sequence.finished};
    }

    FramesView frames(uint32_t frontend) const {
        const Frames &f = frames_[frontend];
        return {f.data.data(), f.data.size(), f.ids.data(),      f.lengths.data(), f.told.data(),
                f.last.data(), f.ids.size(),  completed_.data(), completed_.size()};
    }

    // Gather what all sequences have said: their ids, how many tokens each, and these.
    void collect_said() {
        said_ids_.clear();
        said_counts_.clear();
        said_tokens_.clear();
        for (const auto &[id, stream] : streams_) {
            said_ids_.push_back(id);
            said_counts_.push_back(uint32_t(stream->said.size()));
            said_tokens_.insert(said_tokens_.end(), stream->said.begin(), stream->said.end());
        }
    }

    SaidView said() const {
        return {said_ids_.data(), said_counts_.data(), said_tokens_.data(), said_ids_.size(),
                said_tokens_.size()};
    }

    uint32_t take_stopped(uint64_t *stopped, uint32_t room) {
        const uint32_t count = std::min(room, uint32_t(stopped_.size()));
        std::copy_n(stopped_.begin(), count, stopped);
        stopped_.erase(stopped_.begin(), stopped_.begin() + count);
        return count;
    }

    uint64_t num_requests() const { return requests_.size(); }

private:
    void touch(Stream *stream) {
        if (!stream->is_dirty) {
            stream->is_dirty = true;
            dirty_[stream->id >> FRONTEND_SHIFT].push_back(stream);
        }
    }

    static void write(Stream &stream, std::string &out) {
        Sequence &sequence = stream.sequence;
        const Parts &parts = stream.parts;
        if (!stream.has_opened) {
            out += parts.opening;
            stream.has_opened = true;
        }
        const bool is_finished = sequence.finished != NOT_FINISHED && !stream.has_ended;
        const bool is_due =
            stream.num_told == 0 || sequence.num_tokens - stream.num_told >= stream.interval;
        const bool has_text = !sequence.text.empty();
        if (!is_finished && !(has_text && is_due)) {
            return;
        }
        if (has_text || !stream.end_is_event) {
            out += parts.prefix;
            append_json(sequence.text, out);
            out += is_finished && !stream.end_is_event ? parts.ends[sequence.finished] : parts.tail;
        }
        if (is_finished && stream.end_is_event) {
            out += parts.ends[sequence.finished];
        }
        sequence.text.clear();
        stream.num_told = sequence.num_tokens;
        stream.has_ended |= is_finished;
    }

    Vocabulary vocabulary_;
    std::unordered_map<uint64_t, Request> requests_;
    std::unordered_map<uint64_t, Stream *> streams_;
    std::vector<std::vector<Stream *>> dirty_; // by frontend, as the next
    std::vector<Frames> frames_;
    std::vector<uint64_t> stopped_, completed_, said_ids_;
    std::vector<uint32_t> said_counts_, said_tokens_;
};

} // namespace

} // namespace headrace

using headrace::Texts;

extern "C" {

// Open the texts of a vocabulary: every token's bytes, `ends` where each one's end; null where
// there is no memory for it.
void *headrace_texts_new(const char *bytes, const uint32_t *ends, const uint8_t *is_special,
                         uint32_t num_tokens, int strips_first_space, uint32_t num_frontends) {
    headrace::Vocabulary vocabulary{
        std::string(bytes, num_tokens > 0 ? ends[num_tokens - 1] : 0),
        {ends, ends + num_tokens},
        {is_special, is_special + num_tokens},
        strips_first_space != 0,
    };
    return new (std::nothrow) Texts(std::move(vocabulary), num_frontends);
}

void headrace_texts_free(void *texts) {
    delete static_cast<Texts *>(texts);
}

// Begin a sequence; see `Texts::open`.
int headrace_texts_open(void *texts, const uint8_t *data, uint64_t size) {
    return static_cast<Texts *>(texts)->open(data, size);
}

uint32_t headrace_texts_feed(void *texts, const uint64_t *ids, const uint32_t *counts,
                             const uint8_t *finished, uint32_t num_rows, const uint32_t *tokens,
                             uint32_t *unknown) {
    return static_cast<Texts *>(texts)->feed(ids, counts, finished, num_rows, tokens, unknown);
}

// Write what there is to say to a frontend; the view is valid until the next call for it.
void headrace_texts_render(void *texts, uint32_t frontend, headrace::FramesView *frames) {
    static_cast<Texts *>(texts)->render(frontend);
    *frames = static_cast<Texts *>(texts)->frames(frontend);
}

// Take the sequences that the engine is to end, at most `room`; return how many.
uint32_t headrace_texts_stopped(void *texts, uint64_t *stopped, uint32_t room) {
    return static_cast<Texts *>(texts)->take_stopped(stopped, room);
}

// The text of a sequence that has not been delivered; valid until the next call.
void headrace_texts_text(void *texts, uint64_t id, headrace::TextView *text) {
    *text = static_cast<Texts *>(texts)->text(id);
}

// What all sequences have said; valid until the next call.
void headrace_texts_said(void *texts, headrace::SaidView *said) {
    static_cast<Texts *>(texts)->collect_said();
    *said = static_cast<Texts *>(texts)->said();
}

void headrace_texts_close(void *texts, uint64_t request) {
    static_cast<Texts *>(texts)->close(request);
}

uint64_t headrace_texts_count(void *texts) {
    return static_cast<Texts *>(texts)->num_requests();
}
}
