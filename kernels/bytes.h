// A warp's copy of a range of bytes, and elements at any address.
//
//   ROLLED for (...)        a short loop that is not unrolled
#pragma once
#include "simt.h"

#ifdef __CUDACC__

#define ROLLED _Pragma("unroll 1")

template <class Word>
DEVICE i64 copy_words(u8 *to, const u8 *from, i64 nbytes) {
    constexpr int AHEAD = 4;  // loads that do not wait for a store, which might change what they read
    const i64 words = nbytes / (i64)sizeof(Word);
    FOR_LANES(l) {
        i64 i = l;
        for (; i + (AHEAD - 1) * LANES < words; i += AHEAD * LANES) {
            Word x[AHEAD];
            UNROLL for (int k = 0; k < AHEAD; ++k) x[k] = ((const Word *)from)[i + k * LANES];
            UNROLL for (int k = 0; k < AHEAD; ++k) ((Word *)to)[i + k * LANES] = x[k];
        }
        for (; i < words; i += LANES) ((Word *)to)[i] = ((const Word *)from)[i];
    }
    return words * (i64)sizeof(Word);
}

DEVICE void copy_bytes(u8 *to, const u8 *from, i64 nbytes) {
    const u64 either = (u64)to | (u64)from;
    i64 done = 0;
    if (either % 16 == 0) {
        done = copy_words<uint4>(to, from, nbytes);
    } else if (either % 4 == 0) {
        done = copy_words<u32>(to, from, nbytes);
    }
    copy_words<u8>(to + done, from + done, nbytes - done);
}

// An element of an array is aligned to its own size (16 bytes: to 8).
template <class E>
DEVICE E load_element(const u8 *at) {
    return *(const E *)at;
}

template <class E>
DEVICE void store_element(u8 *at, E x) {
    *(E *)at = x;
}

#else

#define ROLLED

// One worker makes the whole copy, so here the ranges may overlap.
DEVICE void copy_bytes(u8 *to, const u8 *from, i64 nbytes) { memmove(to, from, (size_t)nbytes); }

template <class E>
DEVICE E load_element(const u8 *at) {
    E x;
    memcpy(&x, at, sizeof x);
    return x;
}

template <class E>
DEVICE void store_element(u8 *at, E x) {
    memcpy(at, &x, sizeof x);
}

#endif
