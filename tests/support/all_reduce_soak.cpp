// all_reduce_soak: csrc/collectives/all_reduce.cuh on CPU threads.
//   As a library, `run_kernel` is how tests launch a kernel. As a program, it makes a number of
//   calls of all kinds, sizes and grids, overwriting inputs as soon as a call is done. It ends with
//   1 if any bit of any rank's result is not that of a plain sum. With -fsanitize=thread, it also
//   does if anything is read that was not published. Usage: soak CALLS SEED STALL_US FIRST_EPOCH
//   DROPPED

#include "gpu_threads.h"

#include "../../csrc/collectives/all_reduce.cuh"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

constexpr u32 MAX_VECTORS = 256;
constexpr u32 MAX_GRID = 3, THREADS = 8;

// What all ranks agree on.
struct Call {
    u32 kind; // 0 one-shot, 1 two-shot, 2 fused, 3 gather
    u32 type; // 0 fp32, 1 fp16, 2 bf16
    bool in_place, one_plus;
    u32 num_vectors, num_rows, grid, seed;

    u32 meta() const { return kind * 7919 + type * 104729 + num_vectors * 31 + in_place; }
    u32 lanes() const { return type == 0 ? 4 : 8; }
};

Call draw(u32 seed) {
    auto random = [state = u64(seed) + 1]() mutable {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return u32(state >> 33);
    };
    random();
    Call call;
    call.kind = random() % 4;
    call.type = random() % 3;
    call.in_place = random() % 2;
    call.one_plus = random() % 2;
    call.num_rows = 1 + random() % 4;
    call.num_vectors = 1 + random() % (MAX_VECTORS / call.num_rows);
    call.num_vectors *= call.num_rows;
    call.grid = 1 + random() % MAX_GRID;
    call.seed = random();
    return call;
}

// A bf16, so that every type holds it: mostly small numbers, now and then what is none.
float value_of(u32 seed, u32 stream, u32 index) {
    u64 x = (u64(seed) << 32 | stream << 20) + index;
    x = (x ^ x >> 31) * 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9ull;
    const float odd[] = {INFINITY, -INFINITY, NAN, -0.0f, 0.0f, 1e-38f, 6e-8f, 65504.0f};
    return x >> 40 & 0x3F ? float(int(x >> 50 & 0xFF) - 128) / 32 : odd[x >> 47 & 7];
}

void put(u32 type, Vector &v, u32 lane, float x) {
    type == 0 ? F32::put(v, lane, x) : type == 1 ? F16::put(v, lane, x) : BF16::put(v, lane, x);
}

float get(u32 type, const Vector &v, u32 lane) {
    return type == 0 ? F32::get(v, lane) : type == 1 ? F16::get(v, lane) : BF16::get(v, lane);
}

float rounded(u32 type, float x) {
    Vector v{};
    put(type, v, 0, x);
    return get(type, v, 0);
}

void fill(const Call &call, u32 stream, u32 num_vectors, Vector *out) {
    for (u32 i = 0; i < num_vectors * call.lanes(); ++i) {
        put(call.type, out[i / call.lanes()], i % call.lanes(), value_of(call.seed, stream, i));
    }
}

constexpr u32 RESIDUAL = 100, WEIGHT = 101; // streams of values that all ranks share

// A sum as it should be, computed alone.
float expected_sum(const Call &call, u32 i) {
    float total = rounded(call.type, value_of(call.seed, 0, i));
    for (u32 rank = 1; rank < WORLD; ++rank) {
        total += rounded(call.type, value_of(call.seed, rank, i));
    }
    return rounded(call.type, total);
}

bool same(float a, float b) {
    return std::isnan(a) ? std::isnan(b) : bits_of(a) == bits_of(b);
}

struct Rank {
    explicit Rank(u32 own)
        : rank(own), flags(2 * MAX_BLOCKS * ROW_WORDS), staging(2 * MAX_VECTORS), sums(MAX_VECTORS),
          in(MAX_VECTORS), out(WORLD * MAX_VECTORS), residual(MAX_VECTORS), weight(MAX_VECTORS) {}

    const u32 rank;
    std::vector<u64> flags;
    std::vector<Vector> staging, sums, in, out, residual, weight;
    Counters counters{};
    Status status{};
    Group group{};
    u64 row[MAX_RANKS] = {};
    u32 num_wrong = 0;

    template <typename T> void launch(const Call &call) {
        const u64 *at = call.in_place ? row : nullptr;
        const u32 row_vectors = call.num_vectors / call.num_rows;
        run_grid(call.grid, THREADS, [&] {
            if (call.kind == 0) {
                one_shot<T>(group, at, &in[0], &out[0], call.num_vectors, call.meta());
            } else if (call.kind == 1) {
                two_shot<T>(group, at, &in[0], &out[0], call.num_vectors, call.meta());
            } else if (call.kind == 3) {
                gather(group, at, &in[0], &out[0], call.num_vectors, MAX_VECTORS, call.meta());
            } else {
                const Norm norm{&weight[0], 1e-6f, call.one_plus};
                fused<T>(group, at, &in[0], &residual[0], norm, &out[0], &residual[0],
                         call.num_rows, row_vectors, call.meta());
            }
        });
    }

    void run(const Call &call) {
        fill(call, rank, call.num_vectors, &in[0]);
        fill(call, RESIDUAL, call.num_vectors, &residual[0]);
        fill(call, WEIGHT, call.num_vectors, &weight[0]);
        call.type == 0   ? launch<F32>(call)
        : call.type == 1 ? launch<F16>(call)
                         : launch<BF16>(call);
        check(call);
    }

    void check(const Call &call) {
        if (call.kind == 3) {
            check_gathered(call);
            return;
        }
        const u32 lanes = call.lanes(), row_lanes = call.num_vectors / call.num_rows * lanes;
        for (u32 i = 0; i < call.num_vectors * lanes; ++i) {
            float total = expected_sum(call, i);
            const std::vector<Vector> &result = call.kind == 2 ? residual : out;
            if (call.kind == 2) {
                const float before = rounded(call.type, value_of(call.seed, RESIDUAL, i));
                total = rounded(call.type, before + total);
            }
            num_wrong += !same(get(call.type, result[i / lanes], i % lanes), total);
        }
        for (u32 start = 0; call.kind == 2 && start < call.num_rows; ++start) {
            num_wrong += !norm_is_right(call, start * row_lanes, row_lanes);
        }
    }

    void check_gathered(const Call &call) {
        const u32 lanes = call.lanes();
        for (u32 from = 0; from < WORLD; ++from) {
            for (u32 i = 0; i < call.num_vectors * lanes; ++i) {
                const float given = rounded(call.type, value_of(call.seed, from, i));
                const Vector &found = out[from * MAX_VECTORS + i / lanes];
                num_wrong += !same(get(call.type, found, i % lanes), given);
            }
        }
    }

    // The norm's sum has another order here, so it is near and not the same.
    bool norm_is_right(const Call &call, u32 start, u32 count) {
        const u32 lanes = call.lanes();
        double squares = 0;
        for (u32 i = start; i < start + count; ++i) {
            const double x = get(call.type, residual[i / lanes], i % lanes);
            squares += x * x;
        }
        if (!std::isfinite(float(squares))) {
            return true;
        }
        const double scale = 1 / std::sqrt(squares / count + 1e-6);
        for (u32 i = start; i < start + count; ++i) {
            const double w = get(call.type, weight[(i - start) / lanes], i % lanes);
            const double x = get(call.type, residual[i / lanes], i % lanes);
            const double y = x * scale * (call.one_plus ? 1 + w : w);
            const double z = get(call.type, out[i / lanes], i % lanes);
            const double rounding = call.type == 0 ? 1e-5 : call.type == 1 ? 2e-3 : 1e-2;
            if (std::isfinite(y) && std::abs(y) < 60000 &&
                std::abs(y - z) > rounding * std::abs(y) + 1e-7) {
                return false;
            }
        }
        return true;
    }
};

} // namespace

extern "C" {

void set_stall(u32 us) {
    stall_us = us;
}

// Run a kernel by name. Arguments are 64-bit words, as many as it takes. Returns whether there is
// one.
bool run_kernel(const char *name, u32 grid, u32 num_threads, const Group *group, const u64 *a) {
    typedef void Plain(const u64 *, const Vector *, Vector *, u32, u32);
    typedef void Fused(const u64 *, const Vector *, Vector *, const Vector *, Vector *,
                       const Vector *, u32, u32, float, u32, u32);
    if (std::string(name) == "gather_bytes") {
        run_grid(grid, num_threads, [&] {
            own_group = *group;
            gather_bytes((const u64 *)a[0], (const Vector *)a[1], (Vector *)a[2], u32(a[3]),
                         u32(a[4]), u32(a[5]));
        });
        return true;
    }
    const struct {
        const char *name;
        Plain *plain;
        Fused *fused;
    } kernels[] = {
        {"one_shot_float32", one_shot_float32, nullptr},
        {"one_shot_float16", one_shot_float16, nullptr},
        {"one_shot_bfloat16", one_shot_bfloat16, nullptr},
        {"two_shot_float32", two_shot_float32, nullptr},
        {"two_shot_float16", two_shot_float16, nullptr},
        {"two_shot_bfloat16", two_shot_bfloat16, nullptr},
        {"fused_float32", nullptr, fused_float32},
        {"fused_float16", nullptr, fused_float16},
        {"fused_bfloat16", nullptr, fused_bfloat16},
    };
    for (const auto &kernel : kernels) {
        if (std::string(kernel.name) == name) {
            run_grid(grid, num_threads, [&] {
                own_group = *group;
                if (kernel.plain) {
                    kernel.plain((const u64 *)a[0], (const Vector *)a[1], (Vector *)a[2], u32(a[3]),
                                 u32(a[4]));
                } else {
                    kernel.fused((const u64 *)a[0], (const Vector *)a[1], (Vector *)a[2],
                                 (const Vector *)a[3], (Vector *)a[4], (const Vector *)a[5],
                                 u32(a[6]), u32(a[7]), float_of(u32(a[8])), u32(a[9]), u32(a[10]));
                }
            });
            return true;
        }
    }
    return false;
}
}

int main(int, char **argv) {
    const int num_calls = std::atoi(argv[1]);
    const u32 seed = u32(std::atoi(argv[2]));
    stall_us = u32(std::atoi(argv[3]));
    const u32 first_epoch = u32(std::strtoul(argv[4], nullptr, 0));
    dropped = u32(std::atoi(argv[5]));
    u32 abort_word = 0;
    std::vector<Rank *> ranks;
    for (u32 rank = 0; rank < WORLD; ++rank) {
        ranks.push_back(new Rank(rank));
    }
    for (Rank *own : ranks) {
        own->counters.epoch = first_epoch;
        for (Rank *peer : ranks) {
            own->group.flags[peer->rank] = u64(&peer->flags[0]);
            own->group.staging[peer->rank] = u64(&peer->staging[0]);
            own->group.sums[peer->rank] = u64(&peer->sums[0]);
            own->row[peer->rank] = u64(&peer->in[0]);
        }
        own->group.counters = u64(&own->counters);
        own->group.abort = u64(&abort_word);
        own->group.status = u64(&own->status);
        own->group.half_bytes = MAX_VECTORS * sizeof(Vector);
        own->group.rank = own->rank;
    }
    std::vector<std::thread> streams;
    for (Rank *own : ranks) {
        streams.emplace_back([=] {
            for (int i = 0; i < num_calls; ++i) {
                own->run(draw(seed + u32(i)));
            }
        });
    }
    for (std::thread &stream : streams) {
        stream.join();
    }
    u32 num_wrong = 0;
    for (Rank *rank : ranks) {
        num_wrong += rank->num_wrong + (rank->status.code != 0);
        delete rank;
    }
    std::printf("%u ranks, %d calls, %u wrong\n", WORLD, num_calls, num_wrong);
    return num_wrong != 0;
}
