// gpu_threads: CPU threads in place of a GPU's, for csrc/collectives/all_reduce.cuh. Comes where ptx.cuh would.
//   A grid is as many threads as it has on a GPU, all at once, so the protocol meets real
//   concurrency. PTX's memory operations are atomics of the same order, which ThreadSanitizer
//   follows.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <functional>
#include <pthread.h>
#include <sched.h>
#include <thread>
#include <unistd.h>
#include <vector>

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE inline
#define CONSTANT thread_local // a rank's threads are its own
#define KERNEL extern "C" void

using std::min;

namespace {

constexpr u32 SPINS_PER_LOOK = 8;
u32 stall_us = 0; // how long a rank falls behind, now and then
u32 dropped = 0;  // parts of the protocol

bool drops(u32 part) {
    return dropped & part;
}

struct Index {
    u32 x;
};
thread_local Index threadIdx, blockIdx, blockDim, gridDim;

struct Block {
    explicit Block(u32 num_threads) : votes(num_threads) {
        pthread_barrier_init(&barrier, nullptr, num_threads);
    }
    ~Block() { pthread_barrier_destroy(&barrier); }

    pthread_barrier_t barrier;
    std::vector<char> votes;
    alignas(16) char memory[4096];
};
thread_local Block *block;

void __syncthreads() {
    pthread_barrier_wait(&block->barrier);
}

bool __syncthreads_and(bool vote) {
    block->votes[threadIdx.x] = vote;
    __syncthreads();
    const bool all =
        std::all_of(block->votes.begin(), block->votes.end(), [](char v) { return v; });
    __syncthreads();
    return all;
}

template <typename T> T &shared_memory() {
    static_assert(sizeof(T) <= sizeof(Block::memory));
    return *reinterpret_cast<T *>(block->memory);
}

void store_release(u64 *at, u64 value) {
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
[[maybe_unused]] void store_relaxed(u64 *at, u64 value) {
    __atomic_store_n(at, value, __ATOMIC_RELAXED);
}
void store_release(u32 *at, u32 value) {
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
u64 load_acquire(const u64 *at) {
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
u32 load_relaxed(const u32 *at) {
    return __atomic_load_n(at, __ATOMIC_RELAXED);
}
u32 add(u32 *at, u32 value) {
    return __atomic_fetch_add(at, value, __ATOMIC_ACQ_REL);
}
u32 exchange(u32 *at, u32 value) {
    return __atomic_exchange_n(at, value, __ATOMIC_ACQ_REL);
}

u64 now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return u64(now.tv_sec) * 1000000000 + u64(now.tv_nsec);
}

void rest() {
    sched_yield();
}

void stall(u32 rank, u32 epoch) {
    if (stall_us && rank == epoch / 4 % HEADRACE_WORLD) {
        usleep(stall_us);
    }
}

template <typename To, typename From> To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

u32 bits_of(float value) {
    return same_bits<u32>(value);
}
float float_of(u32 bits) {
    return same_bits<float>(bits);
}
float float_of_half(u16 bits) {
    return float(same_bits<_Float16>(bits));
}
u16 half_of(float value) {
    return same_bits<u16>(_Float16(value));
}
float square_root(float value) {
    return std::sqrt(value);
}

// Run a kernel to its end.
void run_grid(u32 num_blocks, u32 num_threads, const std::function<void()> &kernel) {
    std::vector<std::thread> threads;
    std::vector<Block *> blocks;
    for (u32 b = 0; b < num_blocks; ++b) {
        blocks.push_back(new Block(num_threads));
        for (u32 t = 0; t < num_threads; ++t) {
            threads.emplace_back([=, &kernel, own = blocks.back()] {
                block = own;
                threadIdx.x = t, blockIdx.x = b, blockDim.x = num_threads, gridDim.x = num_blocks;
                kernel();
            });
        }
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    for (Block *b : blocks) {
        delete b;
    }
}

} // namespace
