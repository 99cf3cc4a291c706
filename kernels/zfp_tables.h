// ZFP's embedded coding of bit planes as tables, made by the compiler from its definition.
//
// A block's 4 integers are coded one bit plane at a time, highest first. `known` counts the values that have had a one bit
// in some plane above: their bits are stored raw. The rest of the plane is coded in unary: a bit that is set if a one
// is left, then the bits up to and including that one (the last value's one is implied and needs no bit).
#pragma once
#include "simt.h"

constexpr int ZFP_BLOCK = 4;
constexpr int ZFP_STATES = ZFP_BLOCK + 1;

struct PlaneCode {
    u32 bits, length, known;

    MEMBER constexpr void put(u32 bit) { bits |= bit << length++; }

    MEMBER constexpr void encode(u32 plane) {
        for (u32 i = 0; i < known; ++i, plane >>= 1) put(plane & 1);
        while (known < ZFP_BLOCK) {
            put(plane != 0);
            if (plane == 0) break;
            for (; known < ZFP_BLOCK - 1; ++known, plane >>= 1) {
                put(plane & 1);
                if (plane & 1) break;
            }
            plane >>= 1;
            ++known;
        }
    }
};

// Two planes at a time. Index: known * 256 + the two bits of each value, the higher plane's above the lower's.
// Entry: bits 0-15 the code, 16-19 its length, 20-31 the next known * 256.
struct ZfpEncodeTable {
    u32 entry[ZFP_STATES * 256];

    MEMBER constexpr ZfpEncodeTable() : entry() {
        for (u32 i = 0; i < ZFP_STATES * 256; ++i) {
            u32 high = 0, low = 0;
            for (u32 v = 0; v < ZFP_BLOCK; ++v) {
                low |= (i >> (2 * v) & 1) << v;
                high |= (i >> (2 * v + 1) & 1) << v;
            }
            PlaneCode code = {0, 0, i / 256};
            code.encode(high);
            code.encode(low);
            entry[i] = code.bits | code.length << 16 | code.known << 28;
        }
    }
};

constexpr int ZFP_LONGEST_PLANE = 2 * ZFP_BLOCK - 1;
constexpr int ZFP_WINDOW = 1 << ZFP_LONGEST_PLANE;

// One plane at a time. Index: (left * ZFP_STATES + known) * 128 + the next 7 bits, where `left` is the number of bits left in
// the block (7 for more). A block may end in the middle of a plane: missing bits are zero, except for an announced
// one, which is at the position where the bits ended.
// Entry: bits 0-3 the plane, 4-7 the length, 8-31 the next known * 128.
struct ZfpDecodeRows {
    u32 entry[ZFP_STATES * ZFP_WINDOW];

    MEMBER constexpr ZfpDecodeRows(u32 left) : entry() {
        for (u32 i = 0; i < ZFP_STATES * ZFP_WINDOW; ++i) entry[i] = decode(left, i / ZFP_WINDOW, i % ZFP_WINDOW);
    }

    static MEMBER constexpr u32 decode(u32 left, u32 known, u32 window) {
        const u32 had = left;
        u32 plane = 0;
        for (u32 i = 0; i < known && left; ++i, --left, window >>= 1) plane |= (window & 1) << i;
        while (left && known < ZFP_BLOCK) {
            const u32 any = window & 1;
            --left, window >>= 1;
            if (!any) break;
            while (left && known < ZFP_BLOCK - 1) {
                const u32 bit = window & 1;
                --left, window >>= 1;
                if (bit) break;
                ++known;
            }
            plane |= 1u << known++;
        }
        return plane | (had - left) << 4 | known * ZFP_WINDOW << 8;
    }
};

CONSTANT ZfpEncodeTable ZFP_ENCODE;
CONSTANT ZfpDecodeRows ZFP_DECODE[ZFP_LONGEST_PLANE + 1] = {0, 1, 2, 3, 4, 5, 6, 7};
