// Error bits that kernels set in the caller's status word.
#pragma once
#include "simt.h"

constexpr u64 STATUS_BAD_STREAM = 1;  // decoding: the bytes are not a stream of this codec
constexpr u64 STATUS_NOT_FINITE = 2;  // encoding: the format cannot represent NaN and infinity
constexpr u64 STATUS_BAD_CHECKSUM = 4;  // a frame has other bytes than its sender wrote

DEVICE void report(u64 *status, u64 what) {
    if (what) ONE_LANE atomic_or(status, what);
}
