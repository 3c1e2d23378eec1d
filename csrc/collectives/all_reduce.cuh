// all_reduce: sum a tensor over the GPUs of one host, each reading the others' memory (CUDA IPC).
//   in, out: num_vectors * 16 bytes of fp32, fp16 or bf16, 16-byte aligned, the same count on every
//   rank. Sums are fp32, over ranks 0, 1, 2, ..., and are rounded once: all algorithms give the
//   same bits on all ranks. Bound by the link for large tensors, by two round trips for small ones.
//
//   one_shot   every rank reads all inputs.
//   two_shot   every rank sums its part of the tensor, then reads the others' sums.
//   fused      one_shot, then residual += sum and RMSNorm of that; a block per row.
//   gather     no sum: every rank reads all inputs, of any type, into `out`, one behind another.
//
//   With a `row`, inputs are read where they lie. These are a graph's tensors, whose addresses on
//   all ranks are in a table that is filled after capture. Without one, each rank copies its input
//   into a workspace that the others have mapped already.
//
//   Barriers are between blocks of the same index. So a block reads another rank's vector from the
//   block with its own index. A flag is (meta << 32 | epoch). Epochs count calls and are never
//   reset. Meta is a hash of the call's sizes, so ranks that call differently fail. A waiting peer
//   is at most one call behind, so a flag is there if its epoch is ours or the next. The distance
//   is taken modulo 2^32. Whatever goes wrong sets the abort word, which every
//   wait looks at.
//
//   The workspace has two halves, used in turn. A half is written again two calls later, after a
//   barrier of the call between. A rank enters that barrier when it has read everything of the
//   first call: calls are in stream order. Sums of parts are written past a barrier and need no
//   second copy.
//   Inputs at a `row` are the caller's to overwrite after the call, so it ends with a barrier.
//
//   HEADRACE_WORLD is the number of ranks. HEADRACE_DROP names parts of the protocol to leave out,
//   so that tests can see that they are needed. Includes nothing; comes after ptx.cuh.

namespace {

constexpr u32 WORLD = HEADRACE_WORLD;
constexpr u32 MAX_RANKS = 8;
constexpr u32 MAX_BLOCKS = 64;
constexpr u32 MAX_THREADS = 512;
constexpr u32 ROW_WORDS = 16; // flags of a block, a cache line of their own

enum Part : u32 { RELEASE = 1, DOUBLE_BUFFER = 2, EXIT = 4 }; // of the protocol

enum Code : u32 { ABORTED = 1, MISMATCH = 3, LATE = 4 }; // collectives.py: Outcome

struct alignas(16) Vector {
    u32 words[4];
};

} // namespace

// A rank's state of all ranks, written by the host (ipc_workspace.py).
struct Group {
    u64 flags[MAX_RANKS]; // u64 [2 phases][MAX_BLOCKS][ROW_WORDS] of each rank, as mapped by this
                          // one
    u64 staging[MAX_RANKS];
    u64 sums[MAX_RANKS];
    u64 counters; // Counters
    u64 abort;    // u32, in the control page
    u64 status;   // Status, in the control page
    u64 half_bytes;
    u64 rank;
    u64 limit_ns; // of a wait; 0 is none
};

// In constant memory, as a load of an address is awaited before each load of what is there.
extern "C" {
CONSTANT Group own_group;
}

namespace {

struct Counters { // a rank's own
    u32 epoch, num_arrived, failed;
};

struct Status { // control_page.py
    u32 code, peer, phase, block, epoch;
};

struct Shared {
    u32 epoch, failed;
    float sums[MAX_THREADS];
};

struct Sources {
    const Vector *of[WORLD];
};

// What each rank has, in the order in which this one reads it, and where it goes.
struct Turns {
    const Vector *of[WORLD];
    u32 to[WORLD];
};

// --- numbers ---

struct F32 {
    static constexpr u32 LANES = 4;
    DEVICE static float get(const Vector &v, u32 lane) { return float_of(v.words[lane]); }
    DEVICE static void put(Vector &v, u32 lane, float x) { v.words[lane] = bits_of(x); }
};

DEVICE u16 lane16(const Vector &v, u32 lane) {
    return u16(v.words[lane / 2] >> lane % 2 * 16);
}

DEVICE void put16(Vector &v, u32 lane, u16 bits) {
    const u32 shift = lane % 2 * 16;
    v.words[lane / 2] = (v.words[lane / 2] & ~(0xFFFFu << shift)) | u32(bits) << shift;
}

struct F16 {
    static constexpr u32 LANES = 8;
    DEVICE static float get(const Vector &v, u32 lane) { return float_of_half(lane16(v, lane)); }
    DEVICE static void put(Vector &v, u32 lane, float x) { put16(v, lane, half_of(x)); }
};

struct BF16 {
    static constexpr u32 LANES = 8;
    DEVICE static float get(const Vector &v, u32 lane) {
        return float_of(u32(lane16(v, lane)) << 16);
    }
    // To the nearest, ties to even; NaN becomes torch's.
    DEVICE static void put(Vector &v, u32 lane, float x) {
        const u32 bits = bits_of(x);
        const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
        put16(v, lane, is_nan ? 0x7FC0 : u16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16));
    }
};

// --- the protocol ---

DEVICE u64 *flag_of(const Group &group, u32 owner, u32 phase, u32 writer) {
    u64 *flags = reinterpret_cast<u64 *>(group.flags[owner]);
    return flags + (phase * MAX_BLOCKS + blockIdx.x) * ROW_WORDS + writer;
}

// Read a call's number; false if the group has failed.
DEVICE bool enter(const Group &group, u32 &epoch) {
    Shared &shared = shared_memory<Shared>();
    if (threadIdx.x == 0) {
        Counters *counters = reinterpret_cast<Counters *>(group.counters);
        shared.epoch = counters->epoch;
        shared.failed = load_relaxed(&counters->failed);
    }
    __syncthreads();
    epoch = shared.epoch;
    return !shared.failed;
}

// Count a call: the last block to come here does, when all have read its number. So it works in
// replays, which have no arguments of their own. The last warp does it when the block has met the
// others: before that, all would wait for it.
DEVICE void count(const Group &group, u32 epoch) {
    if (threadIdx.x == blockDim.x - 1) {
        Counters *counters = reinterpret_cast<Counters *>(group.counters);
        if (add(&counters->num_arrived, 1) == gridDim.x - 1) {
            counters->num_arrived = 0;
            counters->epoch = epoch + 1;
        }
    }
}

// Record the first failure and set the abort word for all ranks. Returns false.
DEVICE bool fail(const Group &group, Code code, u32 peer, u32 phase, u32 epoch) {
    Counters *counters = reinterpret_cast<Counters *>(group.counters);
    if (exchange(&counters->failed, 1) == 0) {
        Status *status = reinterpret_cast<Status *>(group.status);
        status->peer = peer;
        status->phase = phase;
        status->block = blockIdx.x;
        status->epoch = epoch;
        store_release(&status->code, code);
    }
    if (code != ABORTED) {
        store_release(reinterpret_cast<u32 *>(group.abort), code);
    }
    return false;
}

// Wait until a peer has come to a barrier.
DEVICE bool await(const Group &group, u32 phase, u32 peer, u32 epoch, u32 meta) {
    const u64 *flag = flag_of(group, u32(group.rank), phase, peer);
    const u64 started = group.limit_ns ? now_ns() : 0;
    for (u32 spins = 1;; ++spins) {
        const u64 word = load_acquire(flag);
        const u32 ahead = u32(word) - epoch;
        if (ahead <= 1) { // one ahead: it has compared our meta with its own
            return ahead == 1 || u32(word >> 32) == meta ||
                   fail(group, MISMATCH, peer, phase, epoch);
        }
        if (spins % SPINS_PER_LOOK == 0) {
            if (load_relaxed(reinterpret_cast<const u32 *>(group.abort))) {
                return fail(group, ABORTED, peer, phase, epoch);
            }
            if (group.limit_ns && now_ns() - started > group.limit_ns) {
                return fail(group, LATE, peer, phase, epoch);
            }
            rest();
        }
    }
}

// Wait for this block on all ranks: what was written before is visible after. All threads call it,
// and all get the same answer; false is that the call has failed, and with it the group.
DEVICE bool barrier(const Group &group, u32 phase, u32 epoch, u32 meta) {
    __syncthreads();
    bool ok = true;
    if (threadIdx.x < WORLD) {
        const u32 peer = threadIdx.x;
        u64 *flag = flag_of(group, peer, phase, u32(group.rank));
        const u64 word = u64(meta) << 32 | epoch;
        drops(RELEASE) ? store_relaxed(flag, word) : store_release(flag, word);
        ok = await(group, phase, peer, epoch, meta);
    }
    ok = __syncthreads_and(ok);
    stall(u32(group.rank), epoch);
    return ok;
}

// The first barrier of a call, which is counted there.
DEVICE bool meet(const Group &group, u32 epoch, u32 meta) {
    const bool ok = barrier(group, 0, epoch, meta);
    count(group, epoch);
    return ok;
}

// --- the data ---

DEVICE Vector *half_of_staging(const Group &group, u32 rank, u32 epoch) {
    const u32 half = drops(DOUBLE_BUFFER) ? 0 : epoch & 1;
    return reinterpret_cast<Vector *>(group.staging[rank] + half * group.half_bytes);
}

DEVICE const Vector *source_of(const Group &group, const u64 *row, u32 rank, u32 epoch) {
    return row ? reinterpret_cast<const Vector *>(row[rank]) : half_of_staging(group, rank, epoch);
}

DEVICE Sources sources_of(const Group &group, const u64 *row, u32 epoch) {
    Sources sources;
#pragma unroll
    for (u32 rank = 0; rank < WORLD; ++rank) {
        sources.of[rank] = source_of(group, row, rank, epoch);
    }
    return sources;
}

// The rank that this one reads in its turn: itself last, so that no two begin with the same.
DEVICE u32 rank_at(const Group &group, u32 turn) {
    return (u32(group.rank) + 1 + turn) % WORLD;
}

// Sum a vector over the ranks, in their order. All loads are under way before the first is used.
template <typename T> DEVICE Vector sum(const Sources &sources, u32 index) {
    Vector parts[WORLD];
#pragma unroll
    for (u32 rank = 0; rank < WORLD; ++rank) {
        parts[rank] = sources.of[rank][index];
    }
    Vector result;
#pragma unroll
    for (u32 lane = 0; lane < T::LANES; ++lane) {
        float total = T::get(parts[0], lane);
#pragma unroll
        for (u32 rank = 1; rank < WORLD; ++rank) {
            total += T::get(parts[rank], lane);
        }
        T::put(result, lane, total);
    }
    return result;
}

// The vectors of a thread: `index` of [0, count).
#define FOR_OWN(index, count)                                                                      \
    for (u32 index = blockIdx.x * blockDim.x + threadIdx.x; index < (count);                       \
         index += gridDim.x * blockDim.x)

// Copy an input to where the others can read it, unless they read it in place.
DEVICE void stage(const Group &group, const u64 *row, const Vector *in, u32 num_vectors,
                  u32 epoch) {
    if (!row) {
        Vector *staging = half_of_staging(group, u32(group.rank), epoch);
        FOR_OWN(i, num_vectors) {
            staging[i] = in[i];
        }
    }
}

// Copy `count` vectors of each rank to its place in `out`, as far as that goes. All loads are under
// way before the first is used.
DEVICE void collect(const Turns &turns, u32 count, Vector *out, u32 end) {
    FOR_OWN(i, count) {
        Vector theirs[WORLD];
#pragma unroll
        for (u32 turn = 0; turn < WORLD; ++turn) {
            if (turns.to[turn] + i < end) {
                theirs[turn] = turns.of[turn][i];
            }
        }
#pragma unroll
        for (u32 turn = 0; turn < WORLD; ++turn) {
            if (turns.to[turn] + i < end) {
                out[turns.to[turn] + i] = theirs[turn];
            }
        }
    }
}

// A call's end. Inputs read in place may be overwritten when all ranks have come here.
DEVICE void leave(const Group &group, const u64 *row, u32 epoch, u32 meta) {
    if (row && !drops(EXIT)) {
        barrier(group, 1, epoch, meta);
    }
}

template <typename T>
DEVICE void one_shot(const Group &group, const u64 *row, const Vector *in, Vector *out,
                     u32 num_vectors, u32 meta) {
    u32 epoch;
    if (!enter(group, epoch)) {
        return;
    }
    stage(group, row, in, num_vectors, epoch);
    if (!meet(group, epoch, meta)) {
        return;
    }
    const Sources sources = sources_of(group, row, epoch);
    FOR_OWN(i, num_vectors) {
        out[i] = sum<T>(sources, i);
    }
    leave(group, row, epoch, meta);
}

// Threads have the same place in every part, so a part's sums are read by the block that wrote
// them.
template <typename T>
DEVICE void two_shot(const Group &group, const u64 *row, const Vector *in, Vector *out,
                     u32 num_vectors, u32 meta) {
    u32 epoch;
    if (!enter(group, epoch)) {
        return;
    }
    const u32 part = (num_vectors + WORLD - 1) / WORLD;
    if (!row) {
        Vector *staging = half_of_staging(group, u32(group.rank), epoch);
        for (u32 start = 0; start < num_vectors; start += part) {
            FOR_OWN(i, min(part, num_vectors - start)) {
                staging[start + i] = in[start + i];
            }
        }
    }
    if (!meet(group, epoch, meta)) {
        return;
    }
    const Sources sources = sources_of(group, row, epoch);
    const u32 own = min(u32(group.rank) * part, num_vectors);
    Vector *sums = reinterpret_cast<Vector *>(group.sums[group.rank]);
    FOR_OWN(i, min(part, num_vectors - own)) {
        sums[i] = sum<T>(sources, own + i);
    }
    // Past this barrier no rank reads an input any more: no third one is needed.
    if (!barrier(group, 1, epoch, meta)) {
        return;
    }
    Turns turns;
#pragma unroll
    for (u32 turn = 0; turn < WORLD; ++turn) {
        const u32 rank = rank_at(group, turn);
        turns.of[turn] = reinterpret_cast<const Vector *>(group.sums[rank]);
        turns.to[turn] = rank * part;
    }
    collect(turns, part, out, num_vectors);
}

DEVICE void gather(const Group &group, const u64 *row, const Vector *in, Vector *out,
                   u32 num_vectors, u32 stride, u32 meta) {
    u32 epoch;
    if (!enter(group, epoch)) {
        return;
    }
    stage(group, row, in, num_vectors, epoch);
    if (!meet(group, epoch, meta)) {
        return;
    }
    Turns turns;
#pragma unroll
    for (u32 turn = 0; turn < WORLD; ++turn) {
        const u32 rank = rank_at(group, turn);
        turns.of[turn] = source_of(group, row, rank, epoch);
        turns.to[turn] = rank * stride;
    }
    collect(turns, num_vectors, out, WORLD * stride);
    leave(group, row, epoch, meta);
}

// Sum over the block, always in the same order.
DEVICE float block_sum(float value) {
    Shared &shared = shared_memory<Shared>();
    shared.sums[threadIdx.x] = value;
    __syncthreads();
    for (u32 stride = blockDim.x / 2; stride > 0; stride /= 2) {
        if (threadIdx.x < stride) {
            shared.sums[threadIdx.x] += shared.sums[threadIdx.x + stride];
        }
        __syncthreads();
    }
    const float total = shared.sums[0];
    __syncthreads(); // before the next row's
    return total;
}

struct Norm {
    const Vector *weight;
    float eps;
    bool one_plus; // the weight is 1 + what is stored (Gemma)
};

// residual_out = residual + sum; out = RMSNorm of that. Each is rounded as if done by itself.
template <typename T>
DEVICE void add_and_norm(const Sources &sources, u32 start, u32 row_vectors, const Vector *residual,
                         const Norm &norm, Vector *out, Vector *residual_out) {
    float squares = 0;
    for (u32 i = threadIdx.x; i < row_vectors; i += blockDim.x) {
        const Vector total = sum<T>(sources, start + i), before = residual[start + i];
        Vector after;
        for (u32 lane = 0; lane < T::LANES; ++lane) {
            T::put(after, lane, T::get(before, lane) + T::get(total, lane));
            squares += T::get(after, lane) * T::get(after, lane);
        }
        residual_out[start + i] = after;
    }
    const float mean = block_sum(squares) / float(row_vectors * T::LANES);
    const float scale = 1.0f / square_root(mean + norm.eps);
    for (u32 i = threadIdx.x; i < row_vectors; i += blockDim.x) {
        const Vector x = residual_out[start + i], weight = norm.weight[i];
        Vector y;
        for (u32 lane = 0; lane < T::LANES; ++lane) {
            const float w = T::get(weight, lane);
            T::put(y, lane, T::get(x, lane) * scale * (norm.one_plus ? 1.0f + w : w));
        }
        out[start + i] = y;
    }
}

template <typename T>
DEVICE void fused(const Group &group, const u64 *row, const Vector *in, const Vector *residual,
                  const Norm &norm, Vector *out, Vector *residual_out, u32 num_rows,
                  u32 row_vectors, u32 meta) {
    u32 epoch;
    if (!enter(group, epoch)) {
        return;
    }
    if (!row) {
        Vector *staging = half_of_staging(group, u32(group.rank), epoch);
        for (u32 r = blockIdx.x; r < num_rows; r += gridDim.x) {
            for (u32 i = threadIdx.x; i < row_vectors; i += blockDim.x) {
                staging[r * row_vectors + i] = in[r * row_vectors + i];
            }
        }
    }
    if (!meet(group, epoch, meta)) {
        return;
    }
    const Sources sources = sources_of(group, row, epoch);
    for (u32 r = blockIdx.x; r < num_rows; r += gridDim.x) {
        add_and_norm<T>(sources, r * row_vectors, row_vectors, residual, norm, out, residual_out);
    }
    leave(group, row, epoch, meta);
}

} // namespace

// `row` may be null. Scalars are 32 bits wide.
#define KERNELS_OF(T, suffix)                                                                      \
    KERNEL one_shot_##suffix(const u64 *row, const Vector *in, Vector *out, u32 num_vectors,       \
                             u32 meta) {                                                           \
        one_shot<T>(own_group, row, in, out, num_vectors, meta);                                   \
    }                                                                                              \
    KERNEL two_shot_##suffix(const u64 *row, const Vector *in, Vector *out, u32 num_vectors,       \
                             u32 meta) {                                                           \
        two_shot<T>(own_group, row, in, out, num_vectors, meta);                                   \
    }                                                                                              \
    KERNEL fused_##suffix(const u64 *row, const Vector *in, Vector *out, const Vector *residual,   \
                          Vector *residual_out, const Vector *weight, u32 num_rows,                \
                          u32 row_vectors, float eps, u32 one_plus, u32 meta) {                    \
        const Norm norm{weight, eps, one_plus != 0};                                               \
        fused<T>(own_group, row, in, residual, norm, out, residual_out, num_rows, row_vectors,     \
                 meta);                                                                            \
    }

// Numbers of any type. What one rank gives is `stride` vectors in `out` before the next one's.
KERNEL gather_bytes(const u64 *row, const Vector *in, Vector *out, u32 num_vectors, u32 stride,
                    u32 meta) {
    gather(own_group, row, in, out, num_vectors, stride, meta);
}

KERNELS_OF(F32, float32)
KERNELS_OF(F16, float16)
KERNELS_OF(BF16, bfloat16)
