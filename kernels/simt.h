// The programming model: one source for host and GPU. Kernels are written per warp of 32 lanes with these constructs:
//
//   Lane<T> x;              a variable with one copy per lane
//   FOR_LANES(l) { ... }    code that every lane executes; x[l] is lane l's copy
//   FOR_LANES_IN_TURN(l)    the same for lanes that access shared data with warp_atomic_*; sequential on the host only
//   ONE_LANE { ... }        code that one lane executes for all
//   ballot, reduce_*, scan_*, shuffle_*, transpose_bits
//                           communication between lanes; only between FOR_LANES blocks
//   WARP_SHARED(T, x, n);   an array shared by the warp; warp_sync() orders accesses
//   BLOCK_SHARED(T, x, n);  an array shared by the warps of a block, WARPS_PER_BLOCK with the numbers warp_of_block();
//                           block_sync() orders accesses, and is called by all of them
//   KERNEL(name, args...)   an entry point; FOR_TILES(t) iterates over the tiles of this warp
//
// On a GPU a warp is 32 threads. On the host Lane<T> is an array of 32 and FOR_LANES a loop, which the compiler
// vectorises. On both, the first two arguments of every kernel are `first` and `last`, the range of tiles to process.
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

constexpr int LANES = 32;

#ifdef __CUDACC__
#include "simt_cuda.h"
#else
#include "simt_host.h"
#endif

// Everything below is the same on host and GPU.

// Lane l gets the sum over the lanes 0 .. l.
template <class T>
DEVICE Lane<T> scan_inclusive(const Lane<T> &x) {
    return scan_strided(x, 1);
}

// Lane l gets the sum over the lanes 0 .. l-1.
DEVICE Lane<u32> scan_exclusive(const Lane<u32> &x) { return shift_in(0u, scan_inclusive(x)); }

// transpose_bits transposes 32 words of 32 bits: bit l of lane k's result (plane k) is bit k of lane l's word.
// store_planes writes the planes 0 .. width-1 of x; on the host it may write up to the next multiple of 8 planes.
#if defined(__CUDACC__) || !defined(__AVX2__)

template <int STEP>
DEVICE void transpose_step(Lane<u32> &x, u32 low) {
    const Lane<u32> other = shuffle_xor<STEP>(x);
    FOR_LANES(l) {
        const u32 as_low = (x[l] & low) | ((other[l] & low) << STEP);
        const u32 as_high = (x[l] & ~low) | ((other[l] & ~low) >> STEP);
        x[l] = (l & STEP) ? as_high : as_low;
    }
}

DEVICE void transpose_bits(Lane<u32> &x) {
    transpose_step<16>(x, 0x0000ffffu);
    transpose_step<8>(x, 0x00ff00ffu);
    transpose_step<4>(x, 0x0f0f0f0fu);
    transpose_step<2>(x, 0x33333333u);
    transpose_step<1>(x, 0x55555555u);
}

DEVICE void store_planes(Lane<u32> x, u32 width, u32 *to) {
    transpose_bits(x);
    FOR_LANES(l) if ((u32)l < width) to[l] = x[l];
}

#endif
