// ptx: what csrc/collectives/all_reduce.cuh uses of a GPU beyond plain C++; it comes before that
// file in one program.
//   Tests put CPU threads in its place (tests/support/gpu_threads.h), so that everything else of
//   the kernels runs without a GPU. Includes nothing: NVRTC has no headers.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define CONSTANT __constant__
#define KERNEL extern "C" __global__ void __launch_bounds__(512, 1)

namespace {

constexpr u32 SPINS_PER_LOOK = 4096; // at the abort word, which is across the bus

// Whether a test build leaves out this part of the protocol.
DEVICE constexpr bool drops(u32 part) {
#ifdef HEADRACE_DROP
    return HEADRACE_DROP & part;
#else
    return part & 0;
#endif
}

// Release and acquire at the scope of the system: other GPUs and the host.
DEVICE void store_release(u64 *address, u64 value) {
    asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

DEVICE void store_relaxed(u64 *address, u64 value) {
    asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

DEVICE void store_release(u32 *address, u32 value) {
    asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

DEVICE u64 load_acquire(const u64 *address) {
    u64 value;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

DEVICE u32 load_relaxed(const u32 *address) {
    u32 value;
    asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// Between blocks of one GPU; both return what was there.
DEVICE u32 add(u32 *address, u32 value) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(address), "r"(value)
                 : "memory");
    return before;
}

DEVICE u32 exchange(u32 *address, u32 value) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.exch.b32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(address), "r"(value)
                 : "memory");
    return before;
}

DEVICE u64 now_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

DEVICE void rest() {
    asm volatile("nanosleep.u32 64;");
}

// Where a test build has a rank fall behind.
DEVICE void stall(u32 rank, u32 epoch) {
#ifdef HEADRACE_STALL
    if (rank == epoch / 4 % HEADRACE_WORLD) {
        for (int i = 0; i < 50; ++i) {
            asm volatile("nanosleep.u32 1000;");
        }
    }
#endif
}

template <typename T> DEVICE T &shared_memory() {
    __shared__ T memory;
    return memory;
}

DEVICE u32 bits_of(float value) {
    return __float_as_uint(value);
}

DEVICE float float_of(u32 bits) {
    return __uint_as_float(bits);
}

DEVICE float float_of_half(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

DEVICE u16 half_of(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

DEVICE float square_root(float value) {
    return __fsqrt_rn(value);
}

} // namespace
