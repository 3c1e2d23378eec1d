// streams: pieces of many answers to the sockets of their clients.
//   A step brings each stream a piece of some hundred bytes. Here that is a lookup and a system
//   call; by way of the event loop's transports a frontend takes 1.15 times as long in all.
//   All but the next piece for a client that keeps reading is left to the caller.

#include "sequence_id.h"

#include <cstdint>
#include <cstdio>
#include <new>
#include <string_view>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unordered_map>
#include <vector>

namespace headrace {

namespace {

constexpr uint32_t NOTHING_TOLD = UINT32_MAX;
constexpr uint8_t MORE = 2; // messages.py: in `last`, the rest of the piece comes later

// Some rows of a `ResponseFrames` (messages.py): an entry each, and the bytes of all.
struct Rows {
    const uint64_t *ids; // of sequences
    const uint32_t *lengths;
    const uint8_t *last;
    const uint32_t *told; // null where nothing is
    const char *data;
    uint64_t start;      // in `data`, of the first of the rows
    uint32_t begin, end; // in the columns
};

// A row that the caller is to write, but for so many bytes of its chunk.
struct Left {
    uint64_t start; // in `data`
    uint32_t row, num_written;
};

struct Written {
    uint64_t start;     // in `data`, of the next row
    uint64_t num_bytes; // of rows that are not left
    uint32_t num_left;
};

class Streams {
public:
    void open(uint64_t request, int fd) { streams_[request].fd = fd; }

    void close(uint64_t request) { streams_.erase(request); }

    Written write(const Rows &rows, Left *left) {
        Written written{rows.start, 0, 0};
        for (uint32_t row = rows.begin; row < rows.end; ++row) {
            const std::string_view data(rows.data + written.start, rows.lengths[row]);
            uint32_t num_written = 0;
            if (take(rows, row, data, num_written)) {
                written.num_bytes += data.size();
            } else {
                left[written.num_left++] = {written.start, row, num_written};
            }
            written.start += data.size();
        }
        return written;
    }

    // Delivered tokens of a request since it was opened: by sequence.
    const std::vector<uint32_t> *told(uint64_t request) const {
        const auto found = streams_.find(request);
        return found == streams_.end() ? nullptr : &found->second.told;
    }

    // How many bytes of a request's pieces have been sent here since it was opened.
    uint64_t num_bytes(uint64_t request) const {
        const auto found = streams_.find(request);
        return found == streams_.end() ? 0 : found->second.num_bytes;
    }

private:
    struct Stream {
        int fd = -1; // -1: the caller writes
        uint64_t num_bytes = 0;
        std::vector<uint32_t> told; // by sequence

        void tell(size_t index, uint32_t count) {
            if (told.size() <= index) {
                told.resize(index + 1, NOTHING_TOLD);
            }
            told[index] = count;
        }
    };

    // Write a row if its stream is here and it is not the last; false where there is more to do.
    bool take(const Rows &rows, uint32_t row, std::string_view data, uint32_t &num_written) {
        const auto found = streams_.find(rows.ids[row] & ~INDEX_MASK);
        if (found == streams_.end()) {
            return false;
        }
        Stream &stream = found->second;
        if (rows.told != nullptr && rows.last[row] != MORE) {
            stream.tell(rows.ids[row] & INDEX_MASK, rows.told[row]);
        }
        if (stream.fd < 0) {
            return false;
        }
        if (rows.last[row] || !send_chunk(stream.fd, data, num_written)) {
            stream.fd = -1;
            return false;
        }
        stream.num_bytes += data.size();
        return true;
    }

    // Send an HTTP chunk; false where the socket takes not all of it, or nothing any more.
    static bool send_chunk(int fd, std::string_view data, uint32_t &num_written) {
        if (data.empty()) {
            return true; // an empty chunk would end the answer
        }
        char head[16];
        const int head_size = snprintf(head, sizeof head, "%zx\r\n", data.size());
        char tail[] = "\r\n";
        iovec parts[] = {
            {head, size_t(head_size)}, {const_cast<char *>(data.data()), data.size()}, {tail, 2}};
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = 3;
        const ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        num_written = sent > 0 ? uint32_t(sent) : 0;
        return num_written == size_t(head_size) + data.size() + 2;
    }

    std::unordered_map<uint64_t, Stream> streams_; // by request
};

} // namespace

} // namespace headrace

using headrace::Streams;

extern "C" {

// Open a table of streams; null where there is no memory for it.
void *headrace_streams_new() {
    return new (std::nothrow) Streams();
}

void headrace_streams_free(void *streams) {
    delete static_cast<Streams *>(streams);
}

// Write a request's pieces to a socket, from now on; -1: leave them.
void headrace_streams_open(void *streams, uint64_t request, int fd) {
    static_cast<Streams *>(streams)->open(request, fd);
}

void headrace_streams_close(void *streams, uint64_t request) {
    static_cast<Streams *>(streams)->close(request);
}

// Write some rows; `left` has room for as many. Later rows of a stream that is left are left, too.
void headrace_streams_write(void *streams, const headrace::Rows *rows, headrace::Left *left,
                            headrace::Written *written) {
    *written = static_cast<Streams *>(streams)->write(*rows, left);
}

// How many bytes of a request's pieces have been sent since it was opened.
uint64_t headrace_streams_num_bytes(void *streams, uint64_t request) {
    return static_cast<Streams *>(streams)->num_bytes(request);
}

// Delivered tokens of a request's sequences; valid until the next call. Return how many.
uint32_t headrace_streams_told(void *streams, uint64_t request, const uint32_t **told) {
    const auto *found = static_cast<Streams *>(streams)->told(request);
    *told = found == nullptr ? nullptr : found->data();
    return found == nullptr ? 0 : uint32_t(found->size());
}
}
