// streams_fuzz: pieces of many answers to sockets that take few bytes at a time, or none any more.
//   Run:  streams_fuzz SEED ROUNDS, built with csrc/http/streams.cpp and -fsanitize=address,undefined.
//   Each round is a message, and whatever clients do then: read a little, leave, or read to the
//   end. A client that stays receives exactly its pieces, in order.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <sys/socket.h>
#include <unistd.h>
#include <vector>

struct RowsView { // csrc/http/streams.cpp, as the next two
    const uint64_t *ids;
    const uint32_t *lengths;
    const uint8_t *last;
    const uint32_t *told;
    const char *data;
    uint64_t start;
    uint32_t begin, end;
};

struct LeftView {
    uint64_t start;
    uint32_t row, num_written;
};

struct WrittenView {
    uint64_t start, num_bytes;
    uint32_t num_left;
};

extern "C" {
void *headrace_streams_new();
void headrace_streams_free(void *);
void headrace_streams_open(void *, uint64_t, int);
void headrace_streams_close(void *, uint64_t);
void headrace_streams_write(void *, const RowsView *, LeftView *, WrittenView *);
uint32_t headrace_streams_told(void *, uint64_t, const uint32_t **);
}

namespace {

constexpr uint32_t CLIENTS = 8, ROWS = 16, SEQUENCES = 1 << 16, LARGE_BYTES = 100000;

void check(bool is_so, const char *what) {
    if (!is_so) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

// Both ends of a connection, and what is between them that the core does not know.
struct Client {
    explicit Client(uint64_t request) : id(request) {
        int ends[2], smallest = 1;
        check(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "no sockets");
        setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &smallest, sizeof smallest);
        ours = ends[0];
        theirs = ends[1];
    }

    ~Client() {
        leave();
        close(ours);
    }

    void leave() {
        if (theirs >= 0) {
            close(theirs);
        }
        theirs = -1;
    }

    void read(size_t size) {
        std::string bytes(size, 0);
        const ssize_t count = recv(theirs, bytes.data(), size, MSG_DONTWAIT);
        heard.append(bytes, 0, count > 0 ? size_t(count) : 0);
    }

    // Write what waits, as an event loop's transport does.
    void flush() {
        const ssize_t count =
            send(ours, waiting.data(), waiting.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        waiting.erase(0, count > 0 ? size_t(count) : 0);
    }

    uint64_t id;
    int ours, theirs;
    bool is_open = false, has_ended = false;
    std::string said, waiting, heard;
};

class Fuzz {
public:
    explicit Fuzz(uint64_t seed) : random_(seed), streams_(headrace_streams_new()) {}

    ~Fuzz() { headrace_streams_free(streams_); }

    void round() {
        while (clients_.size() < CLIENTS) {
            clients_.emplace_back(++num_clients_ * SEQUENCES);
        }
        write();
        for (auto client = clients_.begin(); client != clients_.end();) {
            live(*client);
            const uint32_t *told;
            for (uint32_t i = headrace_streams_told(streams_, client->id, &told); i > 0; --i) {
                checksum += told[i - 1];
            }
            const bool has_left = client->theirs < 0;
            if (!has_left && !client->has_ended && below(64) > 0) {
                ++client;
                continue;
            }
            while (!has_left && client->heard.size() < client->said.size()) {
                client->flush();
                client->read(LARGE_BYTES);
            }
            check(has_left || client->heard == client->said, "heard is not what was said");
            headrace_streams_close(streams_, client->id);
            client = clients_.erase(client);
        }
    }

    uint64_t checksum = 0; // of all that is read, so that reading is not left out

private:
    uint32_t below(uint32_t limit) { return uint32_t(random_() % limit); }

    // What a client does, and its transport.
    void live(Client &client) {
        if (below(100) == 0) {
            client.leave();
            return;
        }
        if (below(2)) {
            client.read(1 + below(5000));
        }
        client.flush();
        const bool can_open = client.waiting.empty() && !client.has_ended;
        if (can_open ? below(2) : below(4) == 0) { // -1 is to be borne at any time
            client.is_open = can_open;
            headrace_streams_open(streams_, client.id, can_open ? client.ours : -1);
        }
    }

    Client *client_of(uint64_t id) {
        for (Client &client : clients_) {
            if (client.id == id / SEQUENCES * SEQUENCES) {
                return &client;
            }
        }
        return nullptr;
    }

    // Make a message, of which the first rows have been written, and write the others.
    void write() {
        const uint32_t begin = below(3), end = begin + below(ROWS + 1);
        std::vector<uint64_t> ids;
        std::vector<uint32_t> lengths, told;
        std::vector<uint8_t> last;
        std::string data;
        uint64_t start = 0;
        for (uint32_t row = 0; row < end; ++row) {
            const uint64_t request = num_clients_ - below(CLIENTS + 2); // some are unknown
            ids.push_back(request * SEQUENCES + (below(50) ? below(3) : SEQUENCES - 1));
            lengths.push_back(below(8) ? below(300) : below(4) ? 0 : below(LARGE_BYTES));
            told.push_back(below(1000));
            last.push_back(below(200) == 0);
            data.append(lengths.back(), char('a' + below(26)));
            start += row < begin ? lengths.back() : 0;
        }
        // Of its own size, so that a byte too far is seen.
        const std::unique_ptr<char[]> exact(new char[data.size()]);
        std::copy(data.begin(), data.end(), exact.get());
        const uint32_t *some = below(4) ? told.data() : nullptr;
        const RowsView rows{ids.data(),  lengths.data(), last.data(), some,
                            exact.get(), start,          begin,       end};
        std::vector<LeftView> left(end - begin);
        WrittenView written;
        headrace_streams_write(streams_, &rows, left.data(), &written);
        check(written.start == data.size(), "not all rows were looked at");
        left.resize(written.num_left);
        auto next = left.begin();
        for (uint32_t row = begin; row < end; ++row) {
            const bool is_left = next != left.end() && next->row == row;
            check(!is_left || next->start == start, "a row's data are elsewhere");
            take(ids[row], data.substr(start, lengths[row]), last[row], is_left,
                 is_left ? next->num_written : 0);
            written.num_bytes -= is_left ? 0 : lengths[row];
            next += is_left;
            start += lengths[row];
        }
        check(next == left.end() && written.num_bytes == 0, "more is told than was written");
    }

    // Do with a row what the caller of the core does.
    void take(uint64_t id, const std::string &piece, bool is_last, bool is_left,
              uint32_t num_written) {
        Client *client = client_of(id);
        if (client == nullptr || client->has_ended) {
            check(is_left, "the row of an unknown request was written");
            return;
        }
        check(is_left || (client->is_open && !is_last), "a row was written that is the caller's");
        char head[16];
        snprintf(head, sizeof head, "%zx\r\n", piece.size());
        const std::string chunk = piece.empty() ? "" : head + piece + "\r\n";
        client->said += chunk;
        client->has_ended |= is_last;
        if (is_left) {
            check(num_written == 0 || (client->is_open && !is_last), "a row was begun too soon");
            client->waiting += chunk.substr(num_written);
            client->is_open = false;
        }
    }

    std::mt19937_64 random_;
    void *streams_;
    uint64_t num_clients_ = 0;
    std::list<Client> clients_;
};

} // namespace

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "say: streams_fuzz SEED ROUNDS\n");
        return 2;
    }
    const uint32_t rounds = uint32_t(strtoul(argv[2], nullptr, 10));
    Fuzz fuzz(strtoull(argv[1], nullptr, 10));
    for (uint32_t round = 0; round < rounds; ++round) {
        fuzz.round();
    }
    printf("%u rounds, checksum %llu\n", rounds, static_cast<unsigned long long>(fuzz.checksum));
}
